"""Convert demonstrations and their values to saved states and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_lightning._core.state import bounded_integer, check_state, expect, flag, mapping, number, sequence, text
from torchrl_lightning._core.tree import to_tensordict
from torchrl_lightning._core.tree_checks import check_tree
from torchrl_lightning._core.validators import optional
from torchrl_lightning.demonstrations.trajectory import Demonstration

_OWNER = "demonstration"


def to_state(demonstration: Demonstration) -> dict[str, Any]:
    """Return the fields of a demonstration as tensors and scalars, without copying the tensors."""
    last = demonstration.last_observation
    trees = {"steps": demonstration.steps.to_dict(), "last_observation": None if last is None else last.to_dict()}
    return {**vars(demonstration), **trees, "metadata": dict(demonstration.metadata)}


def to_states(demonstrations: Iterable[Demonstration]) -> list[dict[str, Any]]:
    """Return the fields of each demonstration."""
    return [to_state(demo) for demo in demonstrations]


def from_state(state: Any) -> Demonstration:
    """Build a demonstration from a copy of its state; raise a ValueError if the state is invalid."""
    ends = {"terminated": None, "truncated": None}  # missing in older states
    return Demonstration(**check_state({**ends, **mapping(state, _OWNER)}, _SCHEMA, _OWNER))


def from_states(value: Any, name: str) -> tuple[Demonstration, ...]:
    """Validate the result of :func:`to_states`, and build the demonstrations from copies."""
    return tuple(map(from_state, sequence(value, name)))


def lowest_as_none(value: float) -> float | None:
    """Return None for minus infinity, and other numbers unchanged. States store minus infinity as None."""
    return None if value == -math.inf else value


def none_as_lowest(value: Any, name: str) -> float:
    """Validate the result of :func:`lowest_as_none`, and return the number."""
    return -math.inf if value is None else number()(value, name)


def _tree(value: Any, name: str) -> TensorDictBase:
    check_tree(mapping(value, name), torch.Size([]), _OWNER)
    return to_tensordict(value, torch.Size([])).clone()


def _metadata(value: Any, name: str) -> dict[str, Any]:
    return copy.deepcopy(dict(mapping(value, name)))


_SCHEMA = {
    "steps": _tree,
    "last_observation": optional(_tree),
    "is_human": flag,
    "value": expect(lambda value: type(value) is float and value < math.inf, "a number below infinity"),
    "frame_skip": bounded_integer(1),
    "terminated": optional(flag),
    "truncated": optional(flag),
    "name": text,
    "metadata": _metadata,
    "serial": bounded_integer(),
}
