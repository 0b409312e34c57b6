"""Actions with equal or nearly equal bounds, or with bounds beyond the range of float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded
from torchrl.envs import ExplorationType, set_exploration_type

from kit.specs import specs_of
from torchrl_lightning.agents import (
    PPOModule,
    SACModule,
    TD3Module,
    build_action_critic,
    build_actor,
    build_deterministic_actor,
    build_squashed_actor,
)
from torchrl_lightning.agents.networks.action_heads import action_bounds
from torchrl_lightning.agents.networks.squashed import action_range

Build = Callable[[Any], Any]


def bounded(low: list[float], high: list[float], dtype: torch.dtype = torch.float32) -> Bounded:
    return Bounded(torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype), dtype=dtype)


NARROW = {
    "equal": bounded([-1.0, 0.5], [1.0, 0.5]),
    "all equal": bounded([0.5, 0.5], [0.5, 0.5]),
    "equal at 0": bounded([0.0, -1.0], [0.0, 1.0]),
    "equal in float32": bounded([-1.0, 1e9], [1.0, 1e9 + 1e-3], torch.float64).to(torch.float32),
    "denormal": bounded([0.0, -1.0], [1e-42, 1.0]),
}
WIDE = {
    "symmetric": bounded([-3e38, -1.0], [3e38, 1.0]),
    "one side": bounded([-1.0, -1.0], [3e38, 1.0]),
    "both above 0": bounded([3e38, -1.0], [3.3e38, 1.0]),
    "all": bounded([-3.39e38] * 2, [3.39e38] * 2),
    "float64": bounded([-1e300, -1.0], [1e300, 1.0], torch.float64).to(torch.float32),
}
SQUASHED: dict[str, Build] = {
    "SAC": lambda specs: SACModule().build(specs),
    "TD3": lambda specs: TD3Module().build(specs),
    "squashed actor": build_squashed_actor,
    "deterministic actor": build_deterministic_actor,
    "critic": build_action_critic,
}
ACTORS: dict[str, Build] = {
    "actor": build_actor,
    "tanh actor": partial(build_actor, distribution="tanh_normal"),
    "PPO": lambda specs: PPOModule().build(specs),
    **SQUASHED,
}


@pytest.mark.parametrize("spec", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("build", ACTORS.values(), ids=ACTORS)
def test_components_without_a_range_are_refused_by_name(build: Build, spec: Bounded) -> None:
    with pytest.raises(ValueError, match=r"[01].*low="):
        build(specs_of(spec))


@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("build", SQUASHED.values(), ids=SQUASHED)
def test_squashed_actions_need_bounds_that_float32_computes_with(build: Build, spec: Bounded) -> None:
    with pytest.raises(TypeError, match="without bounds"):
        build(specs_of(spec))


@pytest.mark.parametrize("spec", [value for name, value in WIDE.items() if name != "both above 0"])
def test_normal_takes_huge_bounds_as_none(spec: Bounded) -> None:
    torch.manual_seed(0)
    actor = build_actor(specs_of(spec))
    step = TensorDict({"observation": torch.randn(64, 4)}, [64])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        actor(step)
    actor.get_dist(step).log_prob(step["action"]).sum().backward()
    assert step["action"].isfinite().all()
    assert step["action_log_prob"].isfinite().all()
    assert all(value.grad is not None and bool(value.grad.isfinite().all()) for value in actor.parameters())


def test_bounds_that_both_count_as_none_are_no_range() -> None:
    with pytest.raises(ValueError, match=r"0.*low=inf.*high=inf"):
        build_actor(specs_of(WIDE["both above 0"]))


def test_bounds_are_as_they_were_between_the_limits() -> None:
    low, high = action_bounds(bounded([-2.0, 1e-30, -1e36], [3.0, 2e-30, 1e36]))
    assert low.tolist() == pytest.approx([-2.0, 1e-30, -1e36])
    assert high.tolist() == pytest.approx([3.0, 2e-30, 1e36])
    low, high = action_bounds(bounded([-torch.finfo(torch.float32).max, 0.0], [1.0, math.inf]))
    assert (low.tolist(), high.tolist()) == ([-math.inf, 0.0], [1.0, math.inf])


def test_planners_take_constant_components() -> None:
    center, half_range = action_range(NARROW["equal"], allow_constants=True)
    assert (center.tolist(), half_range.tolist()) == ([0.0, 0.5], [1.0, 0.0])
