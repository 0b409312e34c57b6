"""Each option can be built from YAML values, by itself and inside buffers of TorchRL and of this package."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from hydra.utils import get_object, instantiate
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from configs.settings import NAMES, PRIORITIZED, SETTINGS, node_of
from kit.rollouts import linear_actor, make_critic, make_rollout
from kit.rows import numbered
from torchrl_lightning import ExperienceBuffer, RingStorage, RolloutStorage, RolloutWriter

READ = {"[ours,key]": ("ours", "key"), "[[ours,key]]": (("ours", "key"),), "float32": torch.float32}
# The attribute that stores a setting, if it has another name.
TOLD = {
    "experience num_envs": "writer.num_envs",
    "model_based size": "max_size",
    "prioritized max_capacity": "max_size",
    "simple size": "max_size",
}
UNTOLD = {"observation_spec", "action_spec", "data_spec"}
# The settings that each sampler requires in a buffer.
SAMPLERS = {"uniform": (), "prioritized": PRIORITIZED, "sequence": ("batch_length=3",), "recent": ()}
HOUSES = {"torchrl": ("tensordict", "lazy_tensor"), "ours": ("torchrl_lightning_experience", "torchrl_lightning_ring")}


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_option_is_built_with_its_settings(built, group, name):
    settings = SETTINGS.get((group, name), ())
    part = built(group, name, *settings)
    assert type(part) is get_object(node_of(group, name).node._target_)
    for setting, value in (each.split("=", 1) for each in settings):
        if setting not in UNTOLD:
            told = attrgetter(TOLD.get(f"{name} {setting}", setting))(part)
            told = tuple(told) if isinstance(told, list) else told
            assert told == READ[value] if value in READ else str(told).lower() == value, (setting, told)


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_works_in_buffers_of_both_houses(composed, house, name):
    buffer, storage = HOUSES[house]
    cfg = composed(
        f"+replay_buffer={buffer}",
        f"+storage@replay_buffer.storage={storage}",
        f"+sampler@replay_buffer.sampler=torchrl_lightning_{name}",
        "+writer@replay_buffer.writer=torchrl_lightning_ring",
        "replay_buffer.storage.max_size=20",
        "replay_buffer.batch_size=8",
        *(f"replay_buffer.sampler.{field}" for field in SAMPLERS[name]),
    )
    buffer = instantiate(cfg.replay_buffer)
    kinds = (TensorDictReplayBuffer, LazyTensorStorage) if house == "torchrl" else (ExperienceBuffer, RingStorage)
    assert (type(buffer), type(buffer.storage)) == kinds
    assert type(buffer.sampler).__name__.lower() == f"{name}sampler"
    buffer.extend(numbered(10, ends=5))
    batch = buffer.sample()
    assert batch.shape[0] == 8
    assert batch["number"].flatten().tolist() == batch["index"].flatten().tolist()


def test_torchrls_buffer_config_takes_our_parts(composed, rollout):
    cfg = composed(
        "+replay_buffer=tensordict",
        "+storage@replay_buffer.storage=torchrl_lightning_rollout",
        "+writer@replay_buffer.writer=torchrl_lightning_rollout",
        "+sampler@replay_buffer.sampler=torchrl_lightning_minibatch",
        "+transform@replay_buffer.transform=torchrl_lightning_generalized_advantages",
        "replay_buffer.storage.size=3",
        "replay_buffer.sampler.by=environments",
        "replay_buffer.transform.on_write=true",
        "replay_buffer.batch_size=1",
        "replay_buffer.dim_extend=0",
    )
    buffer = instantiate(cfg.replay_buffer)
    assert type(buffer) is TensorDictReplayBuffer
    assert (type(buffer.storage), type(buffer.writer)) == (RolloutStorage, RolloutWriter)
    buffer.extend(rollout)
    assert torch.equal(buffer[:]["next", "reward"], rollout["next", "reward"].transpose(0, 1))
    batch = buffer.sample()
    assert batch.shape == (1, 3)
    assert batch["advantage"].isfinite().all()


def test_transform_serves_torchrls_module_transform(composed, rollout):
    cfg = composed(
        "+transform@part=module",
        "+value@part.module=torchrl_lightning_generalized_advantages",
        "part.inverse=true",
        "part.no_grad=true",
    )
    part = instantiate(cfg.part)
    part.module.critic = make_critic()
    buffer = TensorDictReplayBuffer(
        storage=RolloutStorage(3), writer=RolloutWriter(), transform=part, batch_size=6, dim_extend=0
    )
    buffer.extend(rollout)
    assert buffer[:]["advantage"].isfinite().all()


@pytest.mark.parametrize("name", ["vanilla", "gae", "vtrace", "ppod"])
def test_buffer_gets_the_modules_of_a_program(built, name):
    modules = {"actor": linear_actor(), "critic": make_critic()}
    buffer = built("replay_buffer", name, "size=3", **modules)
    assert {key: getattr(buffer, key) for key in modules} == modules


def test_buffer_takes_another_sampler(composed):
    cfg = composed(
        "+replay_buffer=torchrl_lightning_simple",
        "+sampler@replay_buffer.sampler=torchrl_lightning_prioritized",
        *(f"replay_buffer.{field}" for field in ("obs_dim=null", "act_dim=null", "size=20", "batch_size=3")),
        *(f"replay_buffer.sampler.{field}" for field in PRIORITIZED),
    )
    buffer = instantiate(cfg.replay_buffer)
    buffer.extend(make_rollout(4, 1))
    assert buffer.obs_dim == 1
    assert buffer.sample()["priority_weight"].shape == (3,)


def test_storage_in_files(built, tmp_path):
    storage = built("storage", "ring", "max_size=4", f"scratch_dir={tmp_path}")
    ExperienceBuffer(storage=storage).extend(numbered(3))
    assert storage.scratch_dir == tmp_path
    assert storage.get(torch.arange(3))["number"].tolist() == [0, 1, 2]


def test_what_a_model_learns_from_is_made_of_what_its_buffer_holds(built):
    buffer = built("replay_buffer", "model_based", "size=4", "num_envs=2")
    following = {"observation": torch.ones(2, 3), "reward": torch.ones(2, 1)}
    buffer.extend(TensorDict({"observation": torch.zeros(2, 3), "action": torch.zeros(2, 1), "next": following}, [2]))
    targets = built("transform", "dynamics_targets", *SETTINGS["transform", "dynamics_targets"])
    assert targets(buffer.get_all_buffer_data())["targets"].shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("group", "name", "fields", "message"),
    [
        ("transform", "generalized_advantages", ["value_key=[1,2]"], r"A key is a string or a list .*got \[1, 2\]"),
        ("writer", "rollout", ["recurrent_keys=3"], "Expected a list of keys"),
        ("sampler", "prioritized", [*PRIORITIZED, "dtype=flaot32"], "must be torch.float32 .* got flaot32"),
        ("storage", "rollout", ["siz=3"], "Could not override 'part.siz'"),
        ("sampler", "minibatch", ["shufle=3"], "Could not override 'part.shufle'"),
        ("storage", "rollout", [], "Missing mandatory value: part.size"),
        ("transform", "frame_stack", [], "Missing mandatory value: part.frame_stack"),
        ("replay_buffer", "gae", [], "Missing mandatory value: part.size"),
        ("replay_buffer", "vtrace", [], "Missing mandatory value: part.size"),
        ("replay_buffer", "episodic", ["num_environments=2"], "Missing mandatory value: part.data_spec"),
    ],
)
def test_what_is_wrong_or_missing_is_named(built, group, name, fields, message):
    with pytest.raises(Exception, match=message):
        built(group, name, *fields)
