"""An actor that writes its critic's values as it collects: the same rollouts, by fewer passes of the trunk."""

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


class Twice(PPOModule):
    """Its policy leaves the values to its critic."""

    @property
    def valued_policy(self) -> Any:
        return self.policy


def built(**settings: Any) -> tuple[Any, ActorWithValues]:
    torch.manual_seed(0)
    module: Any = PPOModule(network=SMALL, **settings).build(SPECS)
    return module, module.valued_policy


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MODE, None])
def test_it_writes_what_actor_and_critic_write(kind: Any) -> None:
    module, both = built(intrinsic=RandomNetworkDistillation())
    step = TensorDict({"pixels": torch.randn(5, 2, 7, 7)}, [5])
    with torch.no_grad(), set_exploration_type(kind):
        torch.manual_seed(1)
        written = both(step.copy())
        torch.manual_seed(1)
        apart = module.critic(module.policy(step.copy()))
    assert set(written.keys()) == {*step.keys(), *both.out_keys} == set(apart.keys())
    assert both.out_keys == ["action", "action_log_prob", "state_value", "intrinsic_state_value"]
    assert all(torch.equal(written[key], apart[key]) for key in both.out_keys)
    assert torch.equal(both.get_dist(step).logits, module.policy.get_dist(step).logits)


def test_hooks_of_the_actor_are_heard() -> None:
    module, both = built()
    module.policy.register_forward_hook(lambda policy, args, out: out.set("heard", torch.ones(5)))
    step = TensorDict({"pixels": torch.randn(5, 2, 7, 7)}, [5])
    assert both(step.copy())["heard"].tolist() == [1.0] * 5
    assert "state_value" in both(step.copy())


def test_only_where_a_costly_trunk_is_shared() -> None:
    module, both = built()
    assert isinstance(both, ActorWithValues)
    assert both.actor is module.policy
    apart = CNNNetwork([4, 4, 4], [2, 2, 2], [1, 1, 1], [8], shared=False)
    for network in (apart, MLPNetwork([8], shared=True)):
        other: Any = A2CModule(network=network).build(SPECS)
        assert other.valued_policy is other.policy


def trained(folder: Any, module: Any, data: Any = None, **settings: Any) -> tuple[Any, Any, list[int]]:
    """Train, and return how many rows each pass without gradients has had."""
    data, passes = rollouts(env=images, **(data or {})), []

    def count(trunk: nn.Module, given: Any, features: Any) -> None:
        if not torch.is_grad_enabled():
            passes.append(len(given[0]))

    torch.manual_seed(2)
    learner = module(network=SMALL)
    learner.build(data.specs).policy.trunk.encoder.register_forward_hook(count)
    fit(folder, data, learner, **settings)
    return learner, data, passes


def test_run_is_the_same_but_for_the_passes_that_it_spares(tmp_path: Any) -> None:
    valued, data, passes = trained(tmp_path, PPOModule)
    twice, _, others = trained(tmp_path, Twice)
    torch.testing.assert_close(parameters(valued), parameters(twice), rtol=1e-5, atol=1e-6)
    assert "state_value" in data.buffer.storage.schema
    acting = [4] * 16
    assert [each for each in others if each == 64] == [64, 64]
    assert 64 not in passes
    assert passes[:16] == acting
    assert len(others) == len(passes) + 2


@pytest.mark.parametrize("before", [PPOModule, Twice])
def test_run_goes_on_in_the_middle_of_a_rollout(before: Any, tmp_path: Any) -> None:
    """Also one whose rollout has no values, as those of a policy that leaves them to its critic."""
    saving, start = SaveAt(tmp_path / "at.ckpt", "on_train_batch_end", 5, then="go on"), {"reset_at_each_batch": True}
    whole, _, _ = trained(tmp_path, before, max_epochs=3, callbacks=[saving], data=start)
    resumed, _, _ = trained(tmp_path, PPOModule, max_epochs=3, ckpt_path=saving.path, data=start)
    torch.testing.assert_close(parameters(whole), parameters(resumed), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("buffer", [VTraceBuffer, partial(GAEBuffer, recompute_values=True)], ids=["vtrace", "gae"])
def test_values_that_nobody_would_read_are_not_written(buffer: Any, tmp_path: Any) -> None:
    _, data, _ = trained(tmp_path, A2CModule, {"buffer": buffer})
    assert "state_value" not in data.buffer.storage.schema


def test_collector_of_the_users_gets_the_policy_itself(tmp_path: Any) -> None:
    given: list[Any] = []

    def collector(env: Any, policy: Any, num_envs: int, frames_per_batch: int) -> Any:
        given.append(policy)
        return GymnasiumCollector(env, policy, num_envs=num_envs, frames_per_batch=frames_per_batch)

    module, data, _ = trained(tmp_path, PPOModule, {"collector": collector})
    assert given == [module.policy]
    assert "state_value" not in data.buffer.storage.schema
