"""A state that does not fit is refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.rollouts import estimated, make_critic, make_rollout
from torchrl_lightning import GAEBuffer

MISSING = object()


def filled(seed: int = 0, **kwargs: Any) -> GAEBuffer:
    buffer = GAEBuffer(5, critic=make_critic(), generator=torch.Generator().manual_seed(seed), **kwargs)
    data = make_rollout(seed=seed, intrinsic_state_value=torch.zeros(5, 3, 1))
    data["next", "intrinsic_reward"] = torch.rand(3, 5, 1)
    data["next", "intrinsic_state_value"] = torch.zeros(3, 5, 1)
    return estimated(buffer, data)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def having(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def damage(state: dict[str, Any]) -> None:
        for name in path[:-1]:
            state = state[name]
        state[path[-1]] = value
        if value is MISSING:
            del state[path[-1]]

    return damage


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    return having(MISSING, *path)


DAMAGES = {
    "version": having(0, "schema_version"),
    "sampler version": having(0, "sampler", "schema_version"),
    "writer version": having(0, "writer", "schema_version"),
    "sampler unit": having("environments", "sampler", "by"),
    "no sampler": without("sampler"),
    "no write count": without("writer", "write_count"),
    "no steps": without("storage", "num_steps"),
    "too many steps": having(6, "storage", "num_steps"),
    "other data": without("storage", "data", "action"),
    "shorter added data": having(torch.zeros(2, 3, 1), "storage", "added", "advantage"),
    "other tail": having(torch.zeros(7, 1), "storage", "tail", "is_init"),
    "broken generator": having(torch.zeros(3, dtype=torch.uint8), "generator"),
    "broken sampler generator": having(None, "sampler", "generator"),
    "other transforms": having({"weight": torch.zeros(2)}, "transforms"),
    "other statistics": having(0.5, "intrinsic", "gamma"),
    "no statistics": without("intrinsic", "mean"),
}


# A fresh buffer takes any data.
CASES = [(name, fresh) for name in DAMAGES for fresh in (False, True) if not (fresh and name == "other data")]


@pytest.mark.parametrize(("name", "fresh"), CASES)
def test_a_failed_load_leaves_the_buffer_as_it_was(name: str, fresh: bool) -> None:
    state = filled(seed=1).state_dict()
    buffer = GAEBuffer(5, generator=torch.Generator().manual_seed(0)) if fresh else filled()
    before = copy.deepcopy(buffer.state_dict())
    DAMAGES[name](state)
    with pytest.raises((ValueError, KeyError, RuntimeError)):
        buffer.load_state_dict(state)
    assert equal(buffer.state_dict(), before)
    good = filled(seed=1).state_dict()
    buffer.load_state_dict(good)
    assert equal(buffer.state_dict(), good)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    filled(seed=1).dumps(tmp_path / "state")
    buffer = filled()
    before = copy.deepcopy(buffer.state_dict())
    for file in (tmp_path / "state").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="damaged or foreign"):
        buffer.loads(tmp_path / "state")
    assert equal(buffer.state_dict(), before)
    with pytest.raises(FileNotFoundError):
        buffer.loads(tmp_path / "elsewhere")
