"""Find the buffers in a saved or live state, and map their rows to steps of environments."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.file_limits import SHOWN_BUFFERS, SHOWN_ENTRIES
from torchrl_lightning._core.files import ChunkedTensor, MappedTensor
from torchrl_lightning._core.tree import Path, leaves_of
from torchrl_lightning._core.untrusted import MESSAGE_LIMIT, printable
from torchrl_lightning.inspection.leaves import ConcatRows, Ints, Leaf, checked, frame_rows, rows_of, shape_of

PIECE = 1 << 22  # bytes of an entry to read at a time
DEPTH = 16


@dataclass(frozen=True)
class Index:
    """The episode index of a buffer.

    Attributes:
        column: A position for each filled cell. It is at least the step's own position if the step begins an episode.
        done: Whether a flag ends the episode at each filled cell.
        is_open: Whether the newest episode of each environment continues, ``[N]``.
    """

    column: Leaf
    done: Leaf
    is_open: NDArray[np.bool_]


@dataclass(frozen=True)
class BufferView:
    """A buffer in a state, with the range of steps to inspect.

    Attributes:
        name: The name of the buffer or its source.
        kind: ``"replay buffer"``, ``"rollout"``, ``"storage"`` or ``"demonstrations"``.
        leaves: The entries, ``[count, ...]`` each: the filled cells in ascending order.
        count: Number of filled cells.
        capacity: Number of cells; for demonstrations, the maximum number of demonstrations.
        length: Cells of each environment's ring: cell ``p % length * N + e`` stores step ``p`` of environment ``e``.
        first: The position of the oldest inspected step, ``[N]``.
        behind: The position after the newest step, ``[N]``.
        cells: The indices of the filled cells; None if the first ``count`` cells are filled.
        mass: The sampling weight of each cell, or None for a buffer without priorities.
        index: The episode index, or None.
    """

    name: str
    kind: str
    leaves: Mapping[Path, Leaf] = field(repr=False)
    count: int
    capacity: int
    length: int
    first: Ints = field(repr=False)
    behind: Ints = field(repr=False)
    cells: Leaf | None = field(default=None, repr=False)
    mass: Leaf | None = field(default=None, repr=False)
    index: Index | None = field(default=None, repr=False)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self.first)

    @property
    def looked_at(self) -> int:
        """Number of inspected cells."""
        return int((self.behind - self.first).sum())

    def find(self, *names: str, below: str | None = None) -> Path | None:
        """Return the key of an entry with one of the names as its last part, or None; prefer keys below ``next``."""
        found = [path for path in self.leaves if path[-1] in names and (below is None or path[0] == below)]
        return min(found, key=lambda path: (path[0] != "next", len(path)), default=None)

    def walk(self, row_bytes: int) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """Yield the inspected steps in the order of their rows.

        Args:
            row_bytes: Bytes of memory per row, which limits the number of rows per piece.

        Yields:
            Rows, cells, environments and ages of the steps; the newest step has age 0.

        Raises:
            Fault: Some of these steps are missing in the filled cells.
        """
        size = max(1, PIECE // row_bytes)
        held, newest, number, last = self.behind - self.first, self.behind - 1, 0, -1
        for begin in range(0, self.count if self.looked_at else 0, size):
            rows = np.arange(begin, min(begin + size, self.count))
            cells = rows if self.cells is None else self.cells[begin : begin + size].numpy()
            low, high = int(cells[0]) // self.num_envs, int(cells[-1]) // self.num_envs
            if not ((newest - low) % self.length < held + high - low).any():
                continue
            slot = cells // self.num_envs
            env = cells - slot * self.num_envs
            age = newest[env] - slot
            age -= age // self.length * self.length
            valid = age < held[env]
            if self.cells is not None:
                valid &= np.diff(cells, prepend=last) > 0
                last = cells[-1]
            number += int(valid.sum())
            found = rows, cells, env, age
            if not valid.all():
                found = rows[valid], cells[valid], env[valid], age[valid]
            if len(found[0]):
                yield found
        if number != self.looked_at:
            raise UserError(
                f"positions must lead to the {self.count:,} filled cells, got {number:,} of {self.looked_at:,}"
            )

    def pieces(self, leaf: Leaf) -> Iterator[Tensor]:
        """Yield an entry of the inspected steps in the order of their rows, a few megabytes at a time."""
        row_bytes = max(32, leaf[:1].nbytes)
        if self.looked_at == self.count:
            size = max(1, PIECE // row_bytes)
            yield from (leaf[begin : begin + size] for begin in range(0, self.count, size))
        else:
            yield from (rows_of(leaf, rows) for rows, *_ in self.walk(row_bytes))

    def steps(self, leaf: Leaf, env: int, begin: int, end: int) -> Tensor:
        """Return an entry of the steps ``begin`` to ``end`` of an environment, ``[n, ...]``."""
        found = [leaf[:0]]
        while begin < end:
            stop = min(end, begin - begin % self.length + self.length)  # the end of the ring
            rows = np.arange(begin, stop) % self.length * self.num_envs + env
            if (cells := self.cells) is not None:
                first = bisect_left(range(self.count), rows[0], key=lambda row: int(cells[row : row + 1]))
                rows = first + np.searchsorted(cells[first : first + int(rows[-1] - rows[0]) + 1].numpy(), rows)
            found.append(rows_of(leaf, rows))
            begin = stop
        return torch.cat(found)


def unreadable(name: str, error: Exception) -> str:
    """Return a line with the reason why a buffer cannot be inspected."""
    name, reason = printable(name), " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, ValueError | OSError):
        reason = f"it is no state of ours: {type(error).__name__}: {printable(reason)}"
    return printable(reason if reason.startswith(name) else f"{name} cannot be shown: {reason}", MESSAGE_LIMIT)


def contents_in(state: Any, name: str, last: int | None = None) -> Iterator[BufferView | str]:
    """Yield the buffers in a nested state.

    Args:
        state: Nested dicts and lists of tensors and scalars from ``state_dict(copy=False)``, a buffer folder or a
            checkpoint.
        name: The name of the state.
        last: Inspect only about this number of the newest cells.

    Yields:
        Each buffer, or a line with the reason why it cannot be inspected.
    """
    for number, found in enumerate(_search(state, printable(name), last, 0)):
        if number == SHOWN_BUFFERS:
            yield f"{printable(name)} holds more than {SHOWN_BUFFERS} buffers; the others are left out"
            return
        yield found


def _search(node: Any, name: str, last: int | None, depth: int) -> Iterator[BufferView | str]:
    if depth > DEPTH:
        return
    if isinstance(node, list | tuple):
        for number, entry in enumerate(node):
            yield from _search(entry, f"{name}[{number}]" if len(node) > 1 else name, last, depth + 1)
    if not isinstance(node, Mapping):
        return
    found: BufferView | str | None
    try:
        found = _content_of(node, name, last)
    except Exception as error:  # NumPy and torch raise any error for a damaged or hostile state
        found = unreadable(name, error)
    if found is not None:
        yield found
    for key, entry in node.items():
        if found is None or key not in ("storage", "data", "reward", "value"):
            below = f"{name}: {printable(key, 80)}" if isinstance(entry, Mapping) and depth else name
            yield from _search(entry, below, last, depth + 1)


def _content_of(node: Mapping[Any, Any], name: str, last: int | None) -> BufferView | None:
    """Return the buffer in a state, or None for any other mapping."""
    storage, writer = node.get("storage"), node.get("writer")
    if isinstance(storage, Mapping) and "num_steps" in storage:
        return _rollout(storage, name)
    if isinstance(storage, Mapping) and isinstance(writer, Mapping) and {"positions", "oldest"} <= set(writer):
        return _rings(storage, writer, _mass(node.get("sampler")), name, last)
    if {"max_size", "count", "data"} <= set(node):
        return _rings(node, None, None, name, last)
    if {"capacity", "reward", "value", "annealed"} <= set(node):
        parts = node["reward"], node["value"]
        if not all(isinstance(part, list | tuple) for part in parts):
            raise UserError("its demonstrations are no lists")
        return demonstrations([*parts[0], *parts[1]], name, _count(node["capacity"], "capacity"))
    return None


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise UserError(f"{name} must be a whole number of at least {least}, got {printable(repr(value), 80)}")
    return value


def _numbers(value: Any, name: str, count: int | None = None) -> Ints:
    """Return a vector of integers; raise Fault for any other value."""
    return checked(value, name, [torch.int64], count)[:].numpy().copy()


def _leaves(tree: Any, count: int | None) -> dict[Path, Any]:
    """Return the entries of a state by key; raise Fault unless each has ``count`` rows (None for any number)."""
    if not isinstance(tree, Mapping):
        raise UserError(f"data must be a dict, got a {type(tree).__name__}")
    found = dict(leaves_of(dict(tree)))
    if len(found) > SHOWN_ENTRIES:
        raise UserError(f"it must have at most {SHOWN_ENTRIES} entries, got {len(found):,}")
    for path, leaf in found.items():
        name = ".".join(printable(part, 80) for part in path)
        if not isinstance(leaf, Tensor | MappedTensor | ChunkedTensor) or not shape_of(leaf):
            raise UserError(f"{name} must be a tensor with a row for each step, got a {type(leaf).__name__}")
        if count is not None and len(leaf) != count:
            raise UserError(f"{name} must have {count:,} rows, one for each filled cell, got {len(leaf):,}")
        if not all(isinstance(part, str) for part in path):
            raise UserError(f"the key {name} must consist of texts")
    # Each claimed cell costs time, even an empty one.
    if count and sum(math.prod(shape_of(leaf)) for leaf in found.values()) < count:
        raise UserError(f"its entries hold no numbers for {count:,} cells")
    return {path: leaf.detach() if isinstance(leaf, Tensor) else leaf for path, leaf in found.items()}


def _mass(sampler: Any) -> Leaf | None:
    for _ in range(DEPTH):
        if not isinstance(sampler, Mapping):
            return None
        if "leaves" in sampler:
            return checked(sampler["leaves"], "its priorities", [torch.float32, torch.float64], None)
        sampler = sampler.get("prioritized")
    return None


def _rings(
    storage: Mapping[str, Any], writer: Mapping[str, Any] | None, mass: Leaf | None, name: str, last: int | None
) -> BufferView:
    count, capacity = _count(storage["count"], "count"), _count(storage["max_size"], "max_size", 1)
    leaves: dict[Path, Any] = {} if storage["data"] is None else _leaves(storage["data"], count)
    if writer is None:  # without a writer, the order of the rows is unknown
        first, behind, length, cells, index = np.zeros(1, np.int64), np.full(1, count), max(count, 1), None, None
    else:
        first, length = _numbers(writer["oldest"], "oldest"), _count(writer["length"], "length", 1)
        behind = _numbers(writer["positions"], "positions", len(first))
        cells = None if storage["cells"] is None else checked(storage["cells"], "cells", [torch.int64], count)
        index = _index(writer.get("index"), count, len(first))
    held = behind - first
    if not len(held) or (first < 0).any() or (held < 0).any() or (behind > 1 << 61).any() or (held > length).any():
        raise UserError(f"positions and oldest must be at most length={length:,} steps apart, and not negative")
    if sum(held.tolist()) > count:
        raise UserError(
            f"positions and oldest must span at most the {count:,} filled cells, got {sum(held.tolist()):,}"
        )
    if last is not None:
        first = np.maximum(first, behind - max(1, last // len(first)))
    leaves = _stacked(leaves, storage, len(first))
    kind = "storage" if writer is None else "replay buffer"
    return BufferView(name, kind, leaves, count, capacity, length, first, behind, cells, mass, index)


def _index(known: Any, count: int, num_envs: int) -> Index | None:
    """Return the episode index of a writer, or None; raise Fault if it does not fit this buffer."""
    if known is None:
        return None
    if not isinstance(known, Mapping):
        raise UserError(f"index must be a dict, got a {type(known).__name__}")
    rows = (("column", torch.int64, count), ("done", torch.bool, count), ("open", torch.bool, num_envs))
    column, done, is_open = (checked(known.get(key), f"index.{key}", [dtype], size) for key, dtype, size in rows)
    return Index(column, done, is_open[:].numpy().copy())


def _stacked(leaves: Mapping[Path, Any], storage: Mapping[str, Any], num_envs: int) -> dict[Path, Leaf]:
    """Return the entries; replace frame numbers by stacked images if the storage stores each frame once."""
    found, frames = dict(leaves), storage.get("frames")
    names = frames if isinstance(frames, Mapping) else {}
    for path, numbers in leaves.items():
        name = ".".join(path[1:] if path[0] == "next" else path)
        if name in names:
            found[path] = frame_rows(numbers, names[name], storage["max_size"], num_envs, storage.get("frame_stack"))
    return found if storage["count"] else {}


def _rollout(storage: Mapping[str, Any], name: str) -> BufferView:
    steps = _count(storage["num_steps"], "num_steps")
    envs = _count(storage["num_envs"] or 1, "num_envs", 1)
    capacity = _count(storage["size"], "size") * envs
    trees = (tree for tree in (storage["data"], storage.get("added")) if tree)
    leaves = {
        path: _flattened(leaf)
        for tree in trees
        for path, leaf in _leaves(tree, None).items()
        if tuple(shape_of(leaf)[:2]) == (steps, envs)
    }
    if steps and not any(math.prod(leaf.shape) >= steps * envs for leaf in leaves.values()):
        raise UserError(f"no entry holds numbers for {steps:,} steps of {envs:,} environments")
    first, behind = np.zeros(envs, np.int64), np.full(envs, steps)
    return BufferView(name, "rollout", leaves, steps * envs, capacity, max(steps, 1), first, behind)


def _flattened(leaf: Any) -> Any:
    """Merge the first two dimensions, steps and environments, into one."""
    shape = torch.Size([leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]])
    return replace(leaf, shape=shape) if isinstance(leaf, MappedTensor) else leaf.reshape(shape)


def demonstrations(states: Sequence[Mapping[str, Any]], name: str, capacity: int | None = None) -> BufferView:
    """Return demonstrations as one buffer, concatenated.

    Each state has ``steps``, ``terminated`` and ``truncated``. A demonstration with ``terminated`` None counts as
    terminated.
    """
    trees = [_leaves(state["steps"], None) for state in states]
    shared = [path for path in (trees[0] if trees else ()) if all(path in tree for tree in trees)]
    shared = [path for path in shared if len({tree[path].shape[1:] for tree in trees}) == 1]
    leaves: dict[Path, Leaf] = {path: ConcatRows([tree[path] for tree in trees]) for path in shared}
    lengths = [len(next(iter(tree.values()))) for tree in trees]
    for tree, length in zip(trees, lengths, strict=True):
        if not length or any(len(leaf) != length for leaf in tree.values()):
            raise UserError("the entries of a demonstration must have equal numbers of rows, and at least one")
    ends = [(True, False) if each["terminated"] is None else (each["terminated"], each["truncated"]) for each in states]
    count, newest = sum(lengths), np.cumsum(lengths, dtype=np.int64) - 1
    flags = torch.zeros(3, count, 1, dtype=torch.bool)
    flags[:, newest, 0] = torch.tensor([(*end, True) for end in ends], dtype=torch.bool).view(-1, 3).T
    leaves |= {("next", name): flags[number] for number, name in enumerate(("terminated", "truncated", "done"))}
    first, behind = np.zeros(1, np.int64), np.full(1, count)
    room = len(states) if capacity is None else capacity
    return BufferView(name, "demonstrations", leaves if count else {}, count, room, max(count, 1), first, behind)
