"""Policies that also act without being dispatched by TensorDict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from kit.counting import RandomEnv
from torchrl_lightning.collectors import GymnasiumCollector, play_episodes


class Both(TensorDictModuleBase):
    """Acts in both ways alike and counts the calls of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3)
        self.in_keys, self.out_keys = ["observation"], ["action", "action_log_prob"]
        self.bare = self.dispatched = 0

    def choose(self, step: TensorDictBase) -> dict[Any, Tensor]:
        logits = self.net(step.get("observation"))
        if exploration_type() is ExplorationType.DETERMINISTIC:
            return {"action": logits.argmax(-1), "action_log_prob": torch.zeros(len(logits))}
        choice = torch.distributions.Categorical(logits=logits)
        action = choice.sample()
        return {"action": action, "action_log_prob": choice.log_prob(action)}

    def forward(self, step: TensorDictBase) -> TensorDictBase:
        self.dispatched += 1
        return step.update(self.choose(step))

    def compute_step(self, step: TensorDictBase) -> dict[Any, Tensor]:
        self.bare += 1
        return self.choose(step)


class Overridden(Both):
    def forward(self, step: TensorDictBase) -> TensorDictBase:
        return super().forward(step)


def batches(policy: Both, number: int = 3, **kwargs: Any) -> list[Any]:
    collector = GymnasiumCollector(RandomEnv, policy, num_envs=2, frames_per_batch=8, seed=1, **kwargs)
    return [batch.clone() for _, batch in zip(range(number), collector, strict=False)]


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_bare_and_dispatched_policies_give_the_same_batches(kind: ExplorationType) -> None:
    bare, dispatched = Both(), Overridden()
    for mine, other in zip(
        batches(bare, exploration_type=kind), batches(dispatched, exploration_type=kind), strict=True
    ):
        assert (mine == other).all()
    assert (bare.bare, bare.dispatched) == (12, 0)
    assert (dispatched.bare, dispatched.dispatched) == (0, 12)


def test_hook_or_a_replaced_forward_is_not_bypassed() -> None:
    hooked, replaced, seen = Both(), Both(), []
    handle = hooked.register_forward_hook(lambda *_: seen.append(1))
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    for policy in (hooked, replaced):
        batches(policy, 1)
        assert (policy.bare, policy.dispatched) == (0, 4)
    assert len(seen) == 4
    handle.remove()
    batches(hooked, 1)
    assert hooked.bare == 4


def test_attribute_of_that_name_is_no_bare_policy() -> None:
    policy = Overridden()
    policy.compute_step = nn.Tanh()  # type: ignore[assignment]
    batches(policy, 1)
    assert policy.dispatched == 4


def test_evaluation_episodes_are_played_by_the_bare_policy() -> None:
    policy = Both()
    play_episodes(RandomEnv, policy, 2, seed=0)
    assert policy.bare
    assert not policy.dispatched


def test_bare_policy_must_give_an_action() -> None:
    class Silent(Both):
        def compute_step(self, step: TensorDictBase) -> dict[Any, Tensor]:
            return {}

    with pytest.raises(KeyError, match="'action'"):
        batches(Silent(), 1)
