"""Detection of trajectories that were cut without a flag: new rows are compared with stored successors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.keys import COLLECTOR, FLAGS, IS_INIT, NEXT
from torchrl_lightning._core.state import Attribute, Stateful, sequence, state_error
from torchrl_lightning._core.tree import Path, Tree, leaves_of
from torchrl_lightning.replay.positions import Flags, Ints

CHUNK = 1 << 24
"""Number of bytes compared at a time."""
ReadEntry = Callable[[Path], Tensor]


def _read_paths(value: Any, name: str) -> set[Path]:
    """Validate a list of keys, each a list of strings, and return it as a set of paths."""
    for key in sequence(value, name):
        if not isinstance(key, list | tuple) or not key or any(not isinstance(part, str) for part in key):
            raise state_error(key, f"an entry of {name}", "a list of strings")
    return {tuple(key) for key in value}


def _as_lists(paths: Iterable[Path]) -> list[list[str]]:
    return [list(path) for path in sorted(paths)]


class SuccessorCheck(Stateful):
    """Compare rows with stored successors, and learn which entries can be compared.

    The entry ``("next", X)`` of a step equals the entry ``X`` of the following step, unless the episode ends or the
    data were changed before (normalised, relabelled, folded). So an entry is used only after both values were equal at
    a step without an end flag. If the values differ inside one write, the entry is never used again. NaN equals NaN.
    """

    OWNER = "successor check"
    STATE = {
        "matched": Attribute(_read_paths, to_saved=_as_lists),
        "differed": Attribute(_read_paths, to_saved=_as_lists),
    }

    def __init__(self) -> None:
        self.matched: set[Path] = set()
        """The entries in use."""
        self.differed: set[Path] = set()
        """The permanently excluded entries."""

    def exclude(self, path: Path) -> None:
        """Exclude an entry from all later comparisons."""
        self.matched.discard(path)
        self.differed.add(path)

    def find_cuts(
        self,
        paths: Iterable[Path],
        read_row: ReadEntry,
        read_successor: Callable[[Path, Ints], Tensor],
        done: Flags,
        init: Flags,
        is_compared: Flags,
    ) -> tuple[Flags, Path | None, bool]:
        """Compare new rows with the stored successors of the previous steps.

        Args:
            paths: the entries that can be compared; each also exists under ``"next"``.
            read_row: a function that returns an entry of the rows, time-major ``[T * M, ...]``.
            read_successor: a function that returns the stored successors of an entry at the last step of each
                environment.
            done: mask of rows that end an episode, ``[T, M]``.
            init: mask of rows that begin an episode, ``[T, M]``; may be empty.
            is_compared: mask of environments, ``[M]``; true to compare the first new row with the last stored step.

        Returns:
            Three values: a mask ``[M]``, true if an environment's first row does not continue the stored trajectory; an
            entry that differs, or None; and whether any entry was used.
        """
        steps, num_envs = done.shape
        cut, differing_path, was_used = np.zeros(num_envs, np.bool_), None, False
        continues = ~done[:-1]
        if init.size:
            continues &= ~init[1:]
            is_compared = is_compared & ~init[0]
        rows, env = np.flatnonzero(continues), np.flatnonzero(is_compared)
        for path in paths:
            if path in self.differed or not (rows.size or env.size):
                continue
            values = read_row(path)
            has_matched = path in self.matched
            if rows.size:
                next_values = read_row((NEXT, *path))
                if rows.size == (steps - 1) * num_envs:
                    equal = equal_rows(next_values[:-num_envs], values[num_envs:])
                else:
                    index = torch.from_numpy(rows).to(values.device)
                    equal = equal_rows(next_values.index_select(0, index), values.index_select(0, index + num_envs))
                if not equal.all():
                    self.exclude(path)
                    continue
                has_matched = True
            if env.size:
                first = values.index_select(0, torch.from_numpy(env).to(values.device))
                equal = equal_rows(read_successor(path, env), first)
                if has_matched and not equal.all():
                    cut[env[~equal]], differing_path = True, path
                was_used |= has_matched
                has_matched |= bool(equal.any())
            if has_matched:
                self.matched.add(path)
        return cut, differing_path, was_used


def comparable_paths(written: Tree | Mapping[str, Any], stored: Tree, flags: Iterable[Path]) -> list[Path]:
    """Return the entries of rows that can be compared with stored successors.

    Args:
        written: leaves of the rows to write.
        stored: leaves in the storage, which may have other shapes or dtypes.
        flags: paths of the flags that begin or end episodes.
    """
    written_leaves, stored_leaves = dict(leaves_of(dict(written))), dict(leaves_of(stored))
    paths = []
    for path, leaf in written_leaves.items():
        successor = stored_leaves.get((NEXT, *path))
        if (
            successor is not None
            and path[0] not in (NEXT, COLLECTOR)
            and path[-1] not in (*FLAGS, IS_INIT)
            and path not in flags
            and successor.shape[1:] == leaf.shape[1:]
            and successor.dtype == leaf.dtype
            and written_leaves[(NEXT, *path)].dtype == successor.dtype
            and written_leaves[(NEXT, *path)].shape[1:] == successor.shape[1:]
            and _has_equality(leaf.dtype)
        ):
            paths.append(path)
    return paths


def _has_equality(dtype: torch.dtype) -> bool:
    try:
        return bool(torch.zeros(1, dtype=dtype).eq(torch.zeros(1, dtype=dtype)).all())
    except (NotImplementedError, RuntimeError):
        return False


def equal_rows(one: Tensor, other: Tensor) -> Flags:
    """Return a mask of equal rows in two tensors of the same shape and dtype, ``[n]``; NaN equals NaN.

    Examples:
        >>> nan = float("nan")
        >>> equal_rows(torch.tensor([[0.0, nan], [1.0, nan]]), torch.tensor([[0.0, nan], [1.0, 2.0]])).tolist()
        [True, False]
    """
    is_equal = np.ones(len(one), np.bool_)
    if not one.numel():
        return is_equal
    step = max(1, CHUNK // (one[:1].numel() * one.element_size()))
    for begin in range(0, len(one), step):
        a, b = one.detach()[begin : begin + step], other.detach()[begin : begin + step]
        equal = a == b
        if (a.is_floating_point() or a.is_complex()) and not bool(equal.all()):
            equal |= (a != a) & (b != b)  # NaN equals NaN
        is_equal[begin : begin + step] = (equal.flatten(1).all(1) if equal.ndim > 1 else equal).cpu().numpy()
    return is_equal
