"""Constructors pass on by name what they do not use themselves."""

from __future__ import annotations

import inspect

import pytest

from torchrl_lightning import (
    DiscountedReturns,
    GAEBuffer,
    GeneralizedAdvantages,
    IntrinsicReturns,
    PPOBuffer,
    VanillaOnPolicyBuffer,
    VTraceAdvantages,
    VTraceBuffer,
)
from torchrl_lightning.rollout.advantages import AdvantageTransform


@pytest.mark.parametrize(
    ("cls", "base", "renamed"),
    [
        (GAEBuffer, VanillaOnPolicyBuffer, set()),
        (VTraceBuffer, VanillaOnPolicyBuffer, set()),
        (PPOBuffer, GAEBuffer, {"gae_lambda"}),
        *((cls, AdvantageTransform, set()) for cls in (DiscountedReturns, GeneralizedAdvantages)),
        *((cls, AdvantageTransform, set()) for cls in (VTraceAdvantages, IntrinsicReturns)),
    ],
)
def test_a_constructor_has_all_arguments_of_the_one_below(cls: type, base: type, renamed: set[str]) -> None:
    here, below = (inspect.signature(each.__init__).parameters for each in (cls, base))
    assert below.keys() - here.keys() == renamed


def test_arguments_arrive() -> None:
    buffer = PPOBuffer(2, 1, 8, 4, lam=0.5, num_envs=3, value_key="v", batch_keys=["action"], recompute_values=True)
    assert (buffer.gae_lambda, buffer.size, buffer.num_envs, buffer.value_key) == (0.5, 8, 3, "v")
    assert (buffer.batch_keys, buffer.recompute_values) == (("action",), True)
    transform = VTraceAdvantages(0.5, 0.25, rho_clip=2.0, reward_key="r", on_write=True)
    assert (transform.gamma, transform.lmbda, transform.rho_clip) == (0.5, 0.25, 2.0)
    assert (transform.reward_key, transform.on_write) == ("r", True)
