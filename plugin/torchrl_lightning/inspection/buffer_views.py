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
from torchrl_lightning.inspection.leaves import ConcatRows, Ints, Leaf, check_leaf, frame_rows, rows_of, shape_of

CHUNK_BYTES = 1 << 22  # maximum number of bytes per read of an entry
DEPTH = 16


@dataclass(frozen=True)
class EpisodeIndex:
    """The episode index of a buffer.

    Attributes:
        column: A position for each filled cell. If a step begins an episode, this is its own or a later position.
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
        leaves: The entries, each ``[count, ...]``, with the filled cells in ascending order.
        count: Number of filled cells.
        capacity: Number of cells; for demonstrations, the maximum number of demonstrations.
        length: Number of cells per ring; cell ``p % length * N + e`` stores step ``p`` of environment ``e``.
        first: The position of the oldest inspected step, ``[N]``.
        stop: The position after the newest step, ``[N]``.
        cells: The indices of the filled cells; None if the first ``count`` cells are filled.
        sampling_weights: The sampling weight of each cell, or None for a buffer without priorities.
        index: The episode index, or None.
    """

    name: str
    kind: str
    leaves: Mapping[Path, Leaf] = field(repr=False)
    count: int
    capacity: int
    length: int
    first: Ints = field(repr=False)
    stop: Ints = field(repr=False)
    cells: Leaf | None = field(default=None, repr=False)
    sampling_weights: Leaf | None = field(default=None, repr=False)
    index: EpisodeIndex | None = field(default=None, repr=False)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self.first)

    @property
    def num_inspected(self) -> int:
        """Number of inspected cells."""
        return int((self.stop - self.first).sum())

    def find(self, *names: str, below: str | None = None) -> Path | None:
        """Return the key of an entry that ends with one of the names, or None; prefer keys below ``next``."""
        paths = [path for path in self.leaves if path[-1] in names and (below is None or path[0] == below)]
        return min(paths, key=lambda path: (path[0] != "next", len(path)), default=None)

    def walk(self, row_bytes: int) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """Yield the inspected steps in the order of their rows.

        Args:
            row_bytes: Bytes of memory per row, which limits the number of rows per piece.

        Yields:
            Rows, cells, environments and ages of the steps; the newest step has age 0.

        Raises:
            UserError: Some inspected steps are not in the filled cells.
        """
        chunk_rows = max(1, CHUNK_BYTES // row_bytes)
        num_stored, newest, num_found, last_cell = self.stop - self.first, self.stop - 1, 0, -1
        for begin in range(0, self.count if self.num_inspected else 0, chunk_rows):
            rows = np.arange(begin, min(begin + chunk_rows, self.count))
            cells = rows if self.cells is None else self.cells[begin : begin + chunk_rows].numpy()
            low, high = int(cells[0]) // self.num_envs, int(cells[-1]) // self.num_envs
            if not ((newest - low) % self.length < num_stored + high - low).any():
                continue
            slot = cells // self.num_envs
            env = cells - slot * self.num_envs
            age = newest[env] - slot
            age -= age // self.length * self.length
            valid = age < num_stored[env]
            if self.cells is not None:
                valid &= np.diff(cells, prepend=last_cell) > 0
                last_cell = cells[-1]
            num_found += int(valid.sum())
            steps = rows, cells, env, age
            if not valid.all():
                steps = rows[valid], cells[valid], env[valid], age[valid]
            if len(steps[0]):
                yield steps
        if num_found != self.num_inspected:
            raise UserError(
                f"positions must lead to the {self.count:,} filled cells, got {num_found:,} of {self.num_inspected:,}"
            )

    def chunks(self, leaf: Leaf) -> Iterator[Tensor]:
        """Yield an entry of the inspected steps in the order of their rows, a few megabytes at a time."""
        row_bytes = max(32, leaf[:1].nbytes)
        if self.num_inspected == self.count:
            chunk_rows = max(1, CHUNK_BYTES // row_bytes)
            yield from (leaf[begin : begin + chunk_rows] for begin in range(0, self.count, chunk_rows))
        else:
            yield from (rows_of(leaf, rows) for rows, *_ in self.walk(row_bytes))

    def steps(self, leaf: Leaf, env: int, begin: int, end: int) -> Tensor:
        """Return an entry of the steps ``begin`` to ``end`` of an environment, ``[n, ...]``."""
        chunks = [leaf[:0]]
        while begin < end:
            chunk_end = min(end, begin - begin % self.length + self.length)  # the end of the ring
            rows = np.arange(begin, chunk_end) % self.length * self.num_envs + env
            if (cells := self.cells) is not None:
                first = bisect_left(range(self.count), rows[0], key=lambda row: int(cells[row : row + 1]))
                rows = first + np.searchsorted(cells[first : first + int(rows[-1] - rows[0]) + 1].numpy(), rows)
            chunks.append(rows_of(leaf, rows))
            begin = chunk_end
        return torch.cat(chunks)


def unreadable(name: str, error: Exception) -> str:
    """Return a line with the reason why a buffer cannot be inspected."""
    name, reason = printable(name), " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, ValueError | OSError):
        reason = f"it is not a state of this package: {type(error).__name__}: {printable(reason)}"
    return printable(reason if reason.startswith(name) else f"{name} cannot be shown: {reason}", MESSAGE_LIMIT)


def find_buffers(state: Any, name: str, last: int | None = None) -> Iterator[BufferView | str]:
    """Yield the buffers in a nested state.

    Args:
        state: Nested dicts and lists of tensors and scalars from ``state_dict(copy=False)``, a buffer folder or a
            checkpoint.
        name: The name of the state.
        last: Inspect only about this number of the newest cells.

    Yields:
        Each buffer, or a line with the reason why it cannot be inspected.
    """
    for number, buffer in enumerate(_search(state, printable(name), last, 0)):
        if number == SHOWN_BUFFERS:
            yield f"{printable(name)} has more than {SHOWN_BUFFERS} buffers; the others are skipped"
            return
        yield buffer


def _search(node: Any, name: str, last: int | None, depth: int) -> Iterator[BufferView | str]:
    if depth > DEPTH:
        return
    if isinstance(node, list | tuple):
        for number, entry in enumerate(node):
            yield from _search(entry, f"{name}[{number}]" if len(node) > 1 else name, last, depth + 1)
    if not isinstance(node, Mapping):
        return
    buffer: BufferView | str | None
    try:
        buffer = _buffer_view(node, name, last)
    except Exception as error:  # NumPy and torch raise any error for a damaged or hostile state
        buffer = unreadable(name, error)
    if buffer is not None:
        yield buffer
    for key, entry in node.items():
        if buffer is None or key not in ("storage", "data", "reward", "value"):
            child_name = f"{name}: {printable(key, 80)}" if isinstance(entry, Mapping) and depth else name
            yield from _search(entry, child_name, last, depth + 1)


def _buffer_view(node: Mapping[Any, Any], name: str, last: int | None) -> BufferView | None:
    """Return the buffer in a state, or None for any other mapping."""
    storage, writer = node.get("storage"), node.get("writer")
    if isinstance(storage, Mapping) and "num_steps" in storage:
        return _rollout_view(storage, name)
    if isinstance(storage, Mapping) and isinstance(writer, Mapping) and {"positions", "oldest"} <= set(writer):
        return _ring_view(storage, writer, _sampling_weights_of(node.get("sampler")), name, last)
    if {"max_size", "count", "data"} <= set(node):
        return _ring_view(node, None, None, name, last)
    if {"capacity", "reward", "value", "annealed"} <= set(node):
        parts = node["reward"], node["value"]
        if not all(isinstance(part, list | tuple) for part in parts):
            raise UserError("its demonstrations must be lists")
        return demonstrations([*parts[0], *parts[1]], name, _check_count(node["capacity"], "capacity"))
    return None


def _check_count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise UserError(f"{name} must be an integer of at least {least}, got {printable(repr(value), 80)}")
    return value


def _check_integers(value: Any, name: str, count: int | None = None) -> Ints:
    """Return a vector of integers; raise UserError for any other value."""
    return check_leaf(value, name, [torch.int64], count)[:].numpy().copy()


def _check_leaves(tree: Any, count: int | None) -> dict[Path, Any]:
    """Return the entries of a state by key; raise UserError unless each has ``count`` rows (None for any number)."""
    if not isinstance(tree, Mapping):
        raise UserError(f"data must be a dict, got a {type(tree).__name__}")
    leaves = dict(leaves_of(dict(tree)))
    if len(leaves) > SHOWN_ENTRIES:
        raise UserError(f"it must have at most {SHOWN_ENTRIES} entries, got {len(leaves):,}")
    for path, leaf in leaves.items():
        name = ".".join(printable(part, 80) for part in path)
        if not isinstance(leaf, Tensor | MappedTensor | ChunkedTensor) or not shape_of(leaf):
            raise UserError(f"{name} must be a tensor with a row for each step, got a {type(leaf).__name__}")
        if count is not None and len(leaf) != count:
            raise UserError(f"{name} must have {count:,} rows, one for each filled cell, got {len(leaf):,}")
        if not all(isinstance(part, str) for part in path):
            raise UserError(f"the key {name} must consist of strings")
    # Each cell costs time, even a cell without numbers.
    if count and sum(math.prod(shape_of(leaf)) for leaf in leaves.values()) < count:
        raise UserError(f"its entries have no numbers for {count:,} cells")
    return {path: leaf.detach() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}


def _sampling_weights_of(sampler: Any) -> Leaf | None:
    for _ in range(DEPTH):
        if not isinstance(sampler, Mapping):
            return None
        if "leaves" in sampler:
            return check_leaf(sampler["leaves"], "its priorities", [torch.float32, torch.float64], None)
        sampler = sampler.get("prioritized")
    return None


def _ring_view(
    storage: Mapping[str, Any],
    writer: Mapping[str, Any] | None,
    sampling_weights: Leaf | None,
    name: str,
    last: int | None,
) -> BufferView:
    count, capacity = _check_count(storage["count"], "count"), _check_count(storage["max_size"], "max_size", 1)
    leaves: dict[Path, Any] = {} if storage["data"] is None else _check_leaves(storage["data"], count)
    if writer is None:  # without a writer, the order of the rows is unknown
        first, stop, length, cells, index = np.zeros(1, np.int64), np.full(1, count), max(count, 1), None, None
    else:
        first, length = _check_integers(writer["oldest"], "oldest"), _check_count(writer["length"], "length", 1)
        stop = _check_integers(writer["positions"], "positions", len(first))
        cells = None if storage["cells"] is None else check_leaf(storage["cells"], "cells", [torch.int64], count)
        index = _episode_index(writer.get("index"), count, len(first))
    num_stored = stop - first
    if (
        not len(num_stored)
        or (first < 0).any()
        or (num_stored < 0).any()
        or (stop > 1 << 61).any()
        or (num_stored > length).any()
    ):
        raise UserError(f"positions and oldest must be at most length={length:,} steps apart, and not negative")
    if sum(num_stored.tolist()) > count:
        raise UserError(
            f"positions and oldest must span at most the {count:,} filled cells, got {sum(num_stored.tolist()):,}"
        )
    if last is not None:
        first = np.maximum(first, stop - max(1, last // len(first)))
    leaves = _with_frame_stacks(leaves, storage, len(first))
    kind = "storage" if writer is None else "replay buffer"
    return BufferView(name, kind, leaves, count, capacity, length, first, stop, cells, sampling_weights, index)


def _episode_index(state: Any, count: int, num_envs: int) -> EpisodeIndex | None:
    """Return the episode index of a writer, or None; raise UserError if it does not fit this buffer."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise UserError(f"index must be a dict, got a {type(state).__name__}")
    fields = (("column", torch.int64, count), ("done", torch.bool, count), ("open", torch.bool, num_envs))
    column, done, is_open = (check_leaf(state.get(key), f"index.{key}", [dtype], size) for key, dtype, size in fields)
    return EpisodeIndex(column, done, is_open[:].numpy().copy())


def _with_frame_stacks(leaves: Mapping[Path, Any], storage: Mapping[str, Any], num_envs: int) -> dict[Path, Leaf]:
    """Return the entries; if the storage stores each frame once, replace frame numbers by stacked images."""
    stacked, frames = dict(leaves), storage.get("frames")
    names = frames if isinstance(frames, Mapping) else {}
    for path, numbers in leaves.items():
        name = ".".join(path[1:] if path[0] == "next" else path)
        if name in names:
            stacked[path] = frame_rows(numbers, names[name], storage["max_size"], num_envs, storage.get("frame_stack"))
    return stacked if storage["count"] else {}


def _rollout_view(storage: Mapping[str, Any], name: str) -> BufferView:
    steps = _check_count(storage["num_steps"], "num_steps")
    envs = _check_count(storage["num_envs"] or 1, "num_envs", 1)
    capacity = _check_count(storage["size"], "size") * envs
    trees = (tree for tree in (storage["data"], storage.get("added")) if tree)
    leaves = {
        path: _flattened(leaf)
        for tree in trees
        for path, leaf in _check_leaves(tree, None).items()
        if tuple(shape_of(leaf)[:2]) == (steps, envs)
    }
    if steps and not any(math.prod(leaf.shape) >= steps * envs for leaf in leaves.values()):
        raise UserError(f"no entry has numbers for {steps:,} steps of {envs:,} environments")
    first, stop = np.zeros(envs, np.int64), np.full(envs, steps)
    return BufferView(name, "rollout", leaves, steps * envs, capacity, max(steps, 1), first, stop)


def _flattened(leaf: Any) -> Any:
    """Merge the first two dimensions, steps and environments, into one."""
    shape = torch.Size([leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]])
    return replace(leaf, shape=shape) if isinstance(leaf, MappedTensor) else leaf.reshape(shape)


def demonstrations(states: Sequence[Mapping[str, Any]], name: str, capacity: int | None = None) -> BufferView:
    """Concatenate demonstrations and return them as one buffer.

    Each state has ``steps``, ``terminated`` and ``truncated``. A demonstration with ``terminated`` None counts as
    terminated.
    """
    trees = [_check_leaves(state["steps"], None) for state in states]
    shared = [path for path in (trees[0] if trees else ()) if all(path in tree for tree in trees)]
    shared = [path for path in shared if len({tree[path].shape[1:] for tree in trees}) == 1]
    leaves: dict[Path, Leaf] = {path: ConcatRows([tree[path] for tree in trees]) for path in shared}
    lengths = [len(next(iter(tree.values()))) for tree in trees]
    for tree, length in zip(trees, lengths, strict=True):
        if not length or any(len(leaf) != length for leaf in tree.values()):
            raise UserError("the entries of a demonstration must have equal numbers of rows, and at least one")
    ends = [
        (True, False) if state["terminated"] is None else (state["terminated"], state["truncated"]) for state in states
    ]
    count, newest = sum(lengths), np.cumsum(lengths, dtype=np.int64) - 1
    flags = torch.zeros(3, count, 1, dtype=torch.bool)
    flags[:, newest, 0] = torch.tensor([(*end, True) for end in ends], dtype=torch.bool).view(-1, 3).T
    leaves |= {("next", name): flags[number] for number, name in enumerate(("terminated", "truncated", "done"))}
    first, stop = np.zeros(1, np.int64), np.full(1, count)
    max_demonstrations = len(states) if capacity is None else capacity
    return BufferView(
        name, "demonstrations", leaves if count else {}, count, max_demonstrations, max(count, 1), first, stop
    )
