"""Each option is composed, instantiated and used."""

from __future__ import annotations

import pytest
import torch
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import TensorDictReplayBuffer

from configs.conftest import make_rollout
from torchrl_lightning import (
    GAEBuffer,
    MinibatchSampler,
    RolloutStorage,
    RolloutWriter,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
    gae,
)


def time_major(rollout, key):
    return rollout[key].transpose(0, 1)


def test_storage_writer_and_sampler_make_a_buffer_of_torchrl(built, rollout):
    buffer = TensorDictReplayBuffer(
        storage=built("storage", "rollout", "size=3", "num_envs=2"),
        writer=built("writer", "rollout", "recurrent_keys=[[agent,recurrent_state]]"),
        sampler=built("sampler", "minibatch", "shuffle=false"),
        batch_size=4,
        dim_extend=0,
    )
    buffer.extend(rollout)
    assert buffer[:].shape == (3, 2)
    assert buffer[:]["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert [batch["next", "reward"].flatten().tolist() for batch in buffer] == [[0, 1, 2, 3], [4, 5]]


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
    assert isinstance(buffer.storage, RolloutStorage)
    assert isinstance(buffer.writer, RolloutWriter)
    assert isinstance(buffer.sampler, MinibatchSampler)
    buffer.extend(rollout)
    batch = buffer.sample()
    assert batch.shape == (1, 3)
    assert batch["advantage"].isfinite().all()


@pytest.mark.parametrize("group", ["transform", "value"])
def test_generalized_advantages(built, rollout, group):
    transform = built(group, "generalized_advantages", "gamma=0.9", "lmbda=0.8", "advantage_key=[ours,advantage]")
    transform(rollout)
    flag = torch.zeros(3, 2, 1, dtype=torch.bool)
    one = torch.ones(3, 2, 1)
    advantage, target = gae(time_major(rollout, ("next", "reward")), one, one, flag, flag, 0.9, 0.8)
    torch.testing.assert_close(time_major(rollout, ("ours", "advantage")), advantage)
    torch.testing.assert_close(time_major(rollout, "value_target"), target)


@pytest.mark.parametrize("group", ["transform", "value"])
def test_discounted_returns(built, group):
    rollout = make_rollout(1, 3)
    built(group, "discounted_returns", "gamma=0.5", "bootstrap=false")(rollout)
    assert rollout["value_target"].flatten().tolist() == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("group", ["transform", "value"])
def test_vtrace_advantages(built, rollout, group):
    rollout["ours", "log_prob"] = rollout["action_log_prob"].clone()
    on_policy = built(group, "vtrace_advantages", "gamma=0.5", "current_log_prob_key=[ours,log_prob]")
    on_policy(rollout)
    # On policy V-trace is the bootstrapped return of GAE with lambda = 1.
    other = make_rollout()
    built(group, "generalized_advantages", "gamma=0.5", "lmbda=1")(other)
    torch.testing.assert_close(rollout["value_target"], other["value_target"])


@pytest.mark.parametrize("group", ["transform", "value"])
def test_intrinsic_returns(built, group):
    rollout = make_rollout(1, 2)
    one = torch.ones(1, 2, 1)
    rollout["next", "curiosity"] = one
    rollout["intrinsic_state_value"] = one
    rollout["next", "intrinsic_state_value"] = one
    rollout["next", "done"] = rollout["next", "terminated"] = ~rollout["next", "done"]
    transform = built(
        group, "intrinsic_returns", "gamma=0.5", "lmbda=1", "normalize=false", "reward_key=[next,curiosity]"
    )
    # The stream goes on across the ends of episodes.
    assert transform(rollout)["intrinsic_value_target"].flatten().tolist() == [1.75, 1.5]


def test_a_transform_serves_torchrls_module_transform(composed, rollout):
    cfg = composed(
        "+transform@part=module",
        "+value@part.module=torchrl_lightning_generalized_advantages",
        "part.inverse=true",
        "part.no_grad=true",
    )
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    part = instantiate(cfg.part)
    part.module.critic = critic
    buffer = TensorDictReplayBuffer(
        storage=RolloutStorage(3), writer=RolloutWriter(), transform=part, batch_size=6, dim_extend=0
    )
    buffer.extend(rollout)
    assert buffer[:]["advantage"].isfinite().all()


@pytest.mark.parametrize(
    ("name", "kind"), [("vanilla", VanillaOnPolicyBuffer), ("gae", GAEBuffer), ("vtrace", VTraceBuffer)]
)
def test_buffers(built, name, kind):
    actor = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    buffer = built("replay_buffer", name, "size=3", "gamma=0.5", "batch_size=4", actor=actor)
    assert type(buffer) is kind
    assert buffer.gamma == 0.5
    assert buffer.actor is actor
    rollout = make_rollout()
    buffer.extend(rollout)
    if kind is VTraceBuffer:
        with pytest.raises(RuntimeError, match="critic is needed"):
            buffer.sample(4)
    else:
        assert buffer.sample(4)["observation"].shape == (4, 4)
        buffer.before_gradients()
        batches = list(buffer.generate_batches(2))
        rewards = torch.cat([batch["next", "reward"] for batch in batches]).flatten()
        assert sorted(rewards.tolist()) == [0, 1, 2, 3, 4, 5]
        assert all(batch["advantage"].isfinite().all() for batch in batches)


def test_a_buffers_keys_may_be_nested(built):
    buffer = built("replay_buffer", "gae", "size=3", "value_key=[ours,value]", "value_target_key=[ours,target]")
    rollout = make_rollout()
    rollout["ours", "value"] = rollout["state_value"]
    rollout["next", "ours", "value"] = rollout["next", "state_value"]
    buffer.insert_data_slice(rollout)
    buffer.before_gradients()
    assert next(buffer.generate_batches(1))["ours", "target"].shape == (6, 1)


@pytest.mark.parametrize("override", ["part.siz=3", "part.shufle=false"])
def test_a_typo_names_the_field(composed, override):
    group, name = ("storage", "rollout") if "siz" in override else ("sampler", "minibatch")
    with pytest.raises(ConfigCompositionException) as error:
        composed(f"+{group}@part=torchrl_lightning_{name}", override)
    assert override.split("=")[0].removeprefix("part.") in str(error.value.__cause__)


def test_what_is_no_key_is_refused(built):
    with pytest.raises(Exception, match=r"A key is a string or a list of strings.*got \[1, 2\]"):
        built("transform", "generalized_advantages", "value_key=[1,2]")
    with pytest.raises(Exception, match="Expected a list of keys"):
        built("writer", "rollout", "recurrent_keys=3")
