"""Each option for replay is composed, instantiated and used; in TorchRL's buffers too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from configs.conftest import make_rollout
from torchrl_lightning import (
    ExperienceBuffer,
    PPOBuffer,
    PrioritizedSampler,
    RecentSampler,
    RecurrentReplayBuffer,
    RingStorage,
    RingWriter,
    SequenceSampler,
    SimpleReplayBuffer,
    UniformSampler,
)

# What each sampler cannot do without.
REQUIRED = {
    "uniform": (),
    "prioritized": ("max_capacity=20", "alpha=1.0", "beta=0.5"),
    "sequence": ("batch_length=3",),
    "recent": (),
}
WRITERS = {key: ["+writer@replay_buffer.writer=torchrl_lightning_ring"] for key in ("sequence", "recent")}
KINDS = {
    "uniform": UniformSampler,
    "prioritized": PrioritizedSampler,
    "sequence": SequenceSampler,
    "recent": RecentSampler,
}


def steps(count: int, *ends: int, done_key: tuple[str, ...] = ("next", "done")) -> TensorDict:
    """Numbered steps of one environment; episodes end behind those of the given numbers."""
    number = torch.arange(count)
    data = TensorDict({"number": number, "recurrent_state": number[:, None, None].float()}, [count])
    data[done_key] = torch.isin(number, torch.tensor(ends)).unsqueeze(-1)
    return data


@pytest.fixture
def with_sampler(composed):
    """Composes a buffer, and below it a storage, one of our samplers and the writer that it needs."""

    def compose_buffer(buffer: str, storage: str, name: str, *fields: str) -> DictConfig:
        return composed(
            f"+replay_buffer={buffer}",
            f"+storage@replay_buffer.storage={storage}",
            f"+sampler@replay_buffer.sampler=torchrl_lightning_{name}",
            *WRITERS.get(name, []),
            "replay_buffer.storage.max_size=20",
            "replay_buffer.batch_size=8",
            *(f"replay_buffer.sampler.{field}" for field in (*REQUIRED[name], *fields)),
        ).replay_buffer

    return compose_buffer


@pytest.fixture(params=[("tensordict", "lazy_tensor"), ("torchrl_lightning_experience", "torchrl_lightning_ring")])
def house(request):
    return request.param


@pytest.mark.parametrize("name", KINDS)
def test_every_sampler_works_in_buffers_of_both_houses(with_sampler, house, name):
    buffer = instantiate(with_sampler(*house, name))
    ours = house[0] != "tensordict"
    assert type(buffer) is (ExperienceBuffer if ours else TensorDictReplayBuffer)
    assert type(buffer.storage) is (RingStorage if ours else LazyTensorStorage)
    assert type(buffer.sampler) is KINDS[name]
    buffer.extend(steps(10, 5))
    batch = buffer.sample()
    assert batch.shape[0] == 8
    assert batch["number"].tolist() == batch["index"].tolist()


def test_priorities_decide_what_is_drawn(with_sampler, house):
    buffer = instantiate(with_sampler(*house, "prioritized", "eps=0", "weight_norm=null"))
    buffer.extend(steps(10))
    batch = buffer.sample()
    assert len(batch["priority_weight"]) == 8
    priority = torch.zeros(10)
    priority[[2, 7]] = torch.tensor([1.0, 3.0])
    buffer.update_priority(torch.arange(10), priority)
    batch = buffer.sample()
    # Stratified draws: a quarter of them, three quarters of them.
    assert batch["number"].tolist() == [2, 2, 7, 7, 7, 7, 7, 7]
    weight = {2: (10 * 0.25) ** -0.5, 7: (10 * 0.75) ** -0.5}
    expected = torch.tensor([weight[number] for number in batch["number"].tolist()])
    torch.testing.assert_close(batch["priority_weight"].float(), expected)


def test_a_loss_hands_its_errors_back(with_sampler, house):
    buffer = instantiate(with_sampler(*house, "prioritized", "eps=0"))
    buffer.extend(steps(2))
    batch = buffer.sample()
    batch["td_error"] = torch.where(batch["number"] == 1, 5.0, 0.0)
    buffer.update_tensordict_priority(batch)
    assert set(buffer.sample()["number"].tolist()) == {1}


def test_windows_keep_to_their_episode(with_sampler, house):
    buffer = instantiate(with_sampler(*house, "sequence"))
    buffer.extend(steps(10, 5, 6))
    starts = set()
    for _ in range(10):
        batch = buffer.sample()
        assert batch.shape[:1] == (8,)
        number = batch["number"].reshape(8, 3)
        assert torch.equal(number, number[:, :1] + torch.arange(3))
        starts |= set(number[:, 0].tolist())
    assert starts == {0, 1, 2, 3, 7}


def test_keys_and_dtypes_are_read(built):
    writer = built("writer", "ring", "done_key=[ours,over]", "init_key=[begins]", "num_envs=1")
    assert isinstance(writer, RingWriter)
    sampler = built("sampler", "sequence", "batch_length=2", "recurrent_keys=[[agent,memory]]")
    assert sampler.recurrent_keys == [("agent", "memory")]
    buffer = ExperienceBuffer(storage=built("storage", "ring", "max_size=9"), writer=writer, sampler=sampler)
    buffer.extend(steps(4, 1, done_key=("ours", "over")))
    assert set(buffer.sample(16)["number"][:, 0].tolist()) == {0, 2}
    fields = (*REQUIRED["prioritized"], "priority_key=[ours,error]")
    prioritized = built("sampler", "prioritized", *fields, "dtype=float32")
    assert prioritized.dtype is torch.float32
    assert prioritized.priority_key == ("ours", "error")
    with pytest.raises(Exception, match=r"dtype must be torch.float32 or torch.float64, got flaot32"):
        built("sampler", "prioritized", *fields, "dtype=flaot32")


def test_a_buffer_of_several_environments(built):
    buffer = built("replay_buffer", "experience", "num_envs=2", "priority_key=[ours,error]", "batch_size=4")
    assert buffer.priority_key == ("ours", "error")
    buffer.extend(make_rollout(num_envs=2, steps=3))
    assert buffer.writer.positions.tolist() == [3, 3]
    assert buffer[:]["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.sample()["next", "reward"].shape == (4, 1)


def test_storage_in_files(built, tmp_path):
    storage = built("storage", "ring", "max_size=4", f"scratch_dir={tmp_path}")
    ExperienceBuffer(storage=storage).extend(steps(3))
    assert storage.scratch_dir == tmp_path
    assert storage.get(torch.arange(3))["number"].tolist() == [0, 1, 2]


def test_the_recurrent_buffer(built):
    buffer = built("replay_buffer", "recurrent", "capacity=6", "state_dim=2", "action_dim=1", "hidden_dim=3")
    assert isinstance(buffer, RecurrentReplayBuffer)
    # A config without a sampler leaves the buffer its own.
    assert isinstance(buffer.sampler, UniformSampler)
    buffer.add(torch.zeros(2), torch.ones(1), 0.5, torch.ones(2), False, torch.zeros(3))
    assert buffer.sample(1).hiddens.shape == (1, 3)


def test_the_simple_buffer(built):
    buffer = built("replay_buffer", "simple", "obs_dim=2", "act_dim=1", "size=6", "batch_size=2")
    assert isinstance(buffer, SimpleReplayBuffer)
    assert not buffer.sampler.with_replacement
    for reward in (1.0, 2.0):
        step = {"obs": [0.0, 0.0], "next_obs": [1.0, 1.0], "act": [0.5], "rew": reward, "done": False}
        buffer.store(step)
    assert sorted(buffer.sample_batch()["rew"].tolist()) == [1.0, 2.0]


def test_a_simple_buffer_takes_another_sampler(composed):
    cfg = composed(
        "+replay_buffer=torchrl_lightning_simple",
        "+sampler@replay_buffer.sampler=torchrl_lightning_prioritized",
        *(f"replay_buffer.{field}" for field in ("obs_dim=null", "act_dim=null", "size=20", "batch_size=3")),
        *(f"replay_buffer.sampler.{field}" for field in REQUIRED["prioritized"]),
    )
    buffer = instantiate(cfg.replay_buffer)
    buffer.extend(make_rollout(1, 4))
    assert buffer.obs_dim == 4
    assert buffer.sample()["priority_weight"].shape == (3,)


def test_the_ppo_buffer(built):
    dims = ("obs_dim=2", "act_dim=1", "size=4", "batch_size=3")
    buffer = built("replay_buffer", "ppo", *dims, "gamma=0.5", "lam=1.0")
    assert isinstance(buffer, PPOBuffer)
    assert (buffer.gamma, buffer.lam) == (0.5, 1.0)
    act = SimpleNamespace(action=torch.zeros(1), value=0.0, logp=-1.0)
    for last in (False, False, True):
        buffer.store({"obs": torch.zeros(2), "act": act, "rew": 1.0, "done": last})
    buffer.finish_path()
    assert buffer.sample_batch()["ret"].sort().values.tolist() == [1.0, 1.5, 1.75]


@pytest.mark.parametrize(
    ("group", "name", "field"),
    [
        ("storage", "ring", "max_size"),
        ("storage", "rollout", "size"),
        ("sampler", "prioritized", "max_capacity"),
        ("sampler", "sequence", "batch_length"),
        ("replay_buffer", "recurrent", "capacity"),
        ("replay_buffer", "simple", "obs_dim"),
        ("replay_buffer", "ppo", "obs_dim"),
    ],
)
def test_what_is_missing_is_named(built, group, name, field):
    with pytest.raises(Exception, match=f"Missing mandatory value: part.{field}"):
        built(group, name)


def test_a_model_based_buffer_and_what_its_batches_are_made_of(built):
    buffer = built("replay_buffer", "model_based", "size=4", "num_envs=2")
    following = {"observation": torch.ones(2, 3), "reward": torch.ones(2, 1)}
    buffer.extend(TensorDict({"observation": torch.zeros(2, 3), "action": torch.zeros(2, 1), "next": following}, [2]))
    spec = {"_target_": "torchrl.data.Unbounded", "shape": [3]}
    observed = {"_target_": "torchrl.data.Composite", "observation": spec}
    targets = built("transform", "dynamics_targets", observation_spec=observed, action_spec={**spec, "shape": [1]})
    assert targets(buffer.get_all_buffer_data())["targets"].shape == (1, 2, 4)
