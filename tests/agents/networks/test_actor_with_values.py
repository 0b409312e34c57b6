"""An actor that writes its critic's values during collection: the same rollouts with fewer passes of the trunk."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical, Unbounded
from torchrl.envs import ExplorationType, set_exploration_type

from kit.actor_critic import fit, rollouts
from kit.images import CountedImages
from kit.runs import SaveAt, parameters
from kit.specs import specs_of
from torchrl_lightning import GAEBuffer, GymnasiumCollector, VTraceBuffer
from torchrl_lightning.agents import A2CModule, CNNNetwork, MLPNetwork, PPOModule, RandomNetworkDistillation
from torchrl_lightning.agents.networks.actors import ActorWithValues

SMALL = CNNNetwork([4, 4, 4], [2, 2, 2], [1, 1, 1], [8])
SPECS = specs_of(Categorical(3), pixels=Unbounded((2, 7, 7)))
images = partial(CountedImages, (7, 7), "truncated", alone=True, drawn=True)


class SeparateValues(PPOModule):
    """PPO with a policy that does not compute values."""

    @property
    def collection_policy(self) -> Any:
        return self.policy


def build_policy(**settings: Any) -> tuple[Any, ActorWithValues]:
    torch.manual_seed(0)
    module: Any = PPOModule(network=SMALL, **settings).build(SPECS)
    return module, module.collection_policy


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MODE, None])
def test_actor_with_values_writes_outputs_of_actor_and_critic(kind: Any) -> None:
    module, actor = build_policy(intrinsic=RandomNetworkDistillation())
    step = TensorDict({"pixels": torch.randn(5, 2, 7, 7)}, [5])
    with torch.no_grad(), set_exploration_type(kind):
        torch.manual_seed(1)
        written = actor(step.copy())
        torch.manual_seed(1)
        expected = module.critic(module.policy(step.copy()))
    assert set(written.keys()) == {*step.keys(), *actor.out_keys} == set(expected.keys())
    assert actor.out_keys == ["action", "action_log_prob", "state_value", "intrinsic_state_value"]
    assert all(torch.equal(written[key], expected[key]) for key in actor.out_keys)
    assert torch.equal(actor.get_dist(step).logits, module.policy.get_dist(step).logits)


def test_actor_with_values_calls_hooks_of_the_actor() -> None:
    module, actor = build_policy()
    module.policy.register_forward_hook(lambda policy, args, out: out.set("hook", torch.ones(5)))
    step = TensorDict({"pixels": torch.randn(5, 2, 7, 7)}, [5])
    assert actor(step.copy())["hook"].tolist() == [1.0] * 5
    assert "state_value" in actor(step.copy())


def test_valued_policy_needs_a_shared_costly_trunk() -> None:
    module, actor = build_policy()
    assert isinstance(actor, ActorWithValues)
    assert actor.actor is module.policy
    separate = CNNNetwork([4, 4, 4], [2, 2, 2], [1, 1, 1], [8], shared=False)
    for network in (separate, MLPNetwork([8], shared=True)):
        other: Any = A2CModule(network=network).build(SPECS)
        assert other.collection_policy is other.policy


def train(folder: Any, module: Any, data: Any = None, **settings: Any) -> tuple[Any, Any, list[int]]:
    """Train, and return learner, data and the number of rows of each pass without gradients."""
    data, passes = rollouts(env=images, **(data or {})), []

    def count(trunk: nn.Module, inputs: Any, features: Any) -> None:
        if not torch.is_grad_enabled():
            passes.append(len(inputs[0]))

    torch.manual_seed(2)
    learner = module(network=SMALL)
    learner.build(data.specs).policy.trunk.encoder.register_forward_hook(count)
    fit(folder, data, learner, **settings)
    return learner, data, passes


def test_actor_with_values_learns_the_same_with_fewer_passes(tmp_path: Any) -> None:
    valued, data, passes = train(tmp_path, PPOModule)
    separate, _, separate_passes = train(tmp_path, SeparateValues)
    torch.testing.assert_close(parameters(valued), parameters(separate), rtol=1e-5, atol=1e-6)
    assert "state_value" in data.buffer.storage.schema
    acting = [4] * 16
    assert [rows for rows in separate_passes if rows == 64] == [64, 64]
    assert 64 not in passes
    assert passes[:16] == acting
    assert len(separate_passes) == len(passes) + 2


@pytest.mark.parametrize("before", [PPOModule, SeparateValues])
def test_run_resumes_in_the_middle_of_a_rollout(before: Any, tmp_path: Any) -> None:
    """The interrupted rollout may contain no values."""
    saving, start = SaveAt(tmp_path / "at.ckpt", "on_train_batch_end", 5, then="go on"), {"reset_at_each_batch": True}
    uninterrupted, _, _ = train(tmp_path, before, max_epochs=3, callbacks=[saving], data=start)
    resumed, _, _ = train(tmp_path, PPOModule, max_epochs=3, ckpt_path=saving.path, data=start)
    torch.testing.assert_close(parameters(uninterrupted), parameters(resumed), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("buffer", [VTraceBuffer, partial(GAEBuffer, recompute_values=True)], ids=["vtrace", "gae"])
def test_unused_values_are_not_stored(buffer: Any, tmp_path: Any) -> None:
    _, data, _ = train(tmp_path, A2CModule, {"buffer": buffer})
    assert "state_value" not in data.buffer.storage.schema


def test_user_collector_gets_the_policy_without_values(tmp_path: Any) -> None:
    policies: list[Any] = []

    def collector(env: Any, policy: Any, num_envs: int, frames_per_batch: int) -> Any:
        policies.append(policy)
        return GymnasiumCollector(env, policy, num_envs=num_envs, frames_per_batch=frames_per_batch)

    module, data, _ = train(tmp_path, PPOModule, {"collector": collector})
    assert policies == [module.policy]
    assert "state_value" not in data.buffer.storage.schema
