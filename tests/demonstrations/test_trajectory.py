"""One demonstration: what makes one, what it tells of itself, and which environment it fits."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

from kit.demonstrations import demo, episode
from torchrl_lightning import Demonstration, EnvironmentSpecs


def steps(action: torch.Tensor | None = None) -> TensorDict:
    action = torch.tensor([0, 1, 1]) if action is None else action
    return TensorDict({"observation": torch.zeros(3, 4), "action": action, "next": {"reward": torch.zeros(3, 1)}})


def specs(**changes: Any) -> EnvironmentSpecs:
    entries = {"observation": Unbounded((4,)), "action": Categorical(2), **changes}
    action = entries.pop("action")
    return EnvironmentSpecs(Composite({key: each for key, each in entries.items() if each is not None}), action, 1)


def test_length_return_and_keys() -> None:
    found = demo(0.5, -0.25, 1.0)
    assert (found.length, found.total_reward, found.steps.batch_size) == (3, 1.25, torch.Size([3]))
    assert found.observation_keys == ["image", ("inner", "vector")]
    assert (found.value, found.is_human, found.frame_skip) == (-math.inf, False, 1)


def test_steps_are_immutable() -> None:
    given, metadata = steps(), {"environment": "CartPole-v1"}
    found = Demonstration(given, metadata=metadata)
    given["more"], metadata["more"] = torch.zeros(3), "x"
    assert "more" not in found.steps
    assert "more" not in found.metadata
    with pytest.raises(RuntimeError, match="locked"):
        found.steps["more"] = torch.zeros(3)
    with pytest.raises(FrozenInstanceError):
        found.value = 1.0  # type: ignore[misc]


def test_truncate_keeps_the_next_observation() -> None:
    found = demo(0.0, 1.0, 0.0).truncate(2)
    assert found.length == 2
    assert found.last_observation is not None
    assert found.last_observation["inner", "vector"].tolist() == [2.0] * 3
    assert set(found.last_observation.keys()) == {"image", "inner"}
    assert found.truncate(2) is found
    with pytest.raises(ValueError, match=r"length must be between 1 and 2.*got 3"):
        found.truncate(3)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, (True, False)),  # nobody knows
        ({"terminated": True, "truncated": False}, (True, False)),
        ({"terminated": False, "truncated": True}, (False, True)),
        ({"terminated": True, "truncated": True}, (True, True)),
        ({"terminated": False, "truncated": False}, (False, True)),  # it went on
        ({"metadata": {"terminated": True}}, (True, False)),
        ({"metadata": {"terminated": False}}, (False, True)),
        ({"metadata": {"terminated": False}, "terminated": True, "truncated": False}, (True, False)),
        ({"metadata": {"terminated": "later"}}, (True, False)),
    ],
)
def test_ends_equal_the_recorded_flags(options: dict[str, Any], ends: tuple[bool, bool]) -> None:
    found = Demonstration(steps(), **options)
    assert found.ends == found.with_value(value=1.0, serial=3).ends == found.copied().ends == ends
    assert found.truncate(3).ends == ends
    assert found.truncate(2).ends == (False, True)


def test_demonstration_fits_its_environment() -> None:
    found = Demonstration(steps(), frame_skip=4, name="a.npz")
    found.fits(specs(), frame_skip=4)
    with pytest.raises(ValueError, match=r"'a\.npz'.*frame_skip=4.*frame_skip=2"):
        found.fits(specs(), frame_skip=2)
    inner = {"image": Bounded(0, 255, (2, 2), dtype=torch.uint8), "inner": Composite(vector=Unbounded((3,)))}
    demo(0.0).fits(specs(observation=None, **inner))


@pytest.mark.parametrize(
    ("actions", "spec"),
    [
        (torch.tensor([[0, 2], [1, 1], [1, 0]]), MultiCategorical([2, 3])),
        (torch.tensor([[0, 1], [1, 1], [1, 0]], dtype=torch.int8), Binary(2, (2,), dtype=torch.int8)),
        (torch.eye(3, dtype=torch.bool), OneHot(3)),
        (torch.tensor([[-1, 1], [1 + 1e-6, 0], [0, 0]]), Bounded(-1, 1, (2,))),  # but for rounding
    ],
)
def test_actions_of_all_spaces_fit(actions: torch.Tensor, spec: Any) -> None:
    Demonstration(steps(action=actions)).fits(specs(action=spec))


@pytest.mark.parametrize("kind", [torch.float32, torch.int32])
def test_action_outside_of_its_box_is_named_with_its_bounds(kind: torch.dtype) -> None:
    found = Demonstration(steps(action=torch.tensor([[0, 1], [1, 0], [0, 9]]).to(kind)), name="a.npz")
    found.fits(specs(action=Unbounded((2,), dtype=kind)))
    with pytest.raises(ValueError, match=r"'a.npz': 'action'\[2, 1\].*9.*\[-1, 2\]"):
        found.fits(specs(action=Bounded(torch.tensor([0, -1]), torch.tensor([1, 2]), (2,), dtype=kind)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation": Unbounded((5,))}, r"'observation' is \[4\] of float32 in each step, but \[5\]"),
        ({"observation": Unbounded((4,), dtype=torch.float64)}, r"but \[4\] of float64 in the environment; replay"),
        ({"observation": None, "pixels": Unbounded((4,))}, "entries 'observation', but the environment has 'pixels'"),
        ({"more": Unbounded((4,))}, "the environment has 'more', 'observation'"),
        ({"action": Unbounded((1,))}, r"'action' is \[\] of int64 in each step, but \[1\] of float32"),
        (
            {"action": Categorical(1)},
            "'action' has values from 0 to 1, which are not all in the environment's action space",
        ),
        ({"action": MultiCategorical([2, 2])}, "'action' is"),
    ],
)
def test_another_environment_is_refused_in_a_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"'a.npz'.*{message}") as error:
        Demonstration(steps(), name="a.npz").fits(specs(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_is_a_number_or_minus_infinity(value: float) -> None:
    demonstration = episode(7, 99.0)
    assert demonstration.with_value(value=-math.inf, serial=None).value == -math.inf
    with pytest.raises(ValueError, match="value"):
        demonstration.with_value(value=value, serial=None)
