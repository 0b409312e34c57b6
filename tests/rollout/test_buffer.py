"""A buffer of rollouts made of its parts: the documented ones are shells over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.rollouts import both_values, linear_actor, make_rollout
from torchrl_lightning import GAE, GAEBuffer, MonteCarlo, RolloutBuffer, VanillaOnPolicyBuffer, VTrace, VTraceBuffer
from torchrl_lightning.rollout.estimates import Estimator

SHELLS: dict[str, tuple[Estimator, Any]] = {
    "returns": (MonteCarlo(standardize=True), VanillaOnPolicyBuffer(5)),
    "GAE": (GAE(standardize=True, lmbda=0.8), GAEBuffer(5, gae_lambda=0.8)),
    "V-trace": (VTrace(standardize=True, rho_clip=0.7), VTraceBuffer(5, clip_rho_thres=0.7)),
}
RESULTS = ("advantage", "value_target", "intrinsic_advantage", "intrinsic_value_target")


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_estimates_as_its_parts_do(name: str) -> None:
    estimator, shell = SHELLS[name]
    data, actor = make_rollout(), linear_actor()
    data["next", "intrinsic_reward"] = data["next", "reward"].abs()
    plain = RolloutBuffer(5, estimator)
    for buffer in (plain, shell):
        buffer.extend(data)
        buffer.before_gradients(actor, both_values())
    before = plain.rollout["advantage"].clone()
    actor.module[0].module.weight.data[1] = -0.5
    for buffer in (plain, shell):
        buffer.before_epoch(actor, both_values())
    assert plain.required_keys == shell.required_keys
    assert plain.metrics() == shell.metrics()
    assert all(torch.equal(plain.rollout[key], shell.rollout[key]) for key in RESULTS)
    assert torch.equal(before, plain.rollout["advantage"]) is not estimator.follows_policy
