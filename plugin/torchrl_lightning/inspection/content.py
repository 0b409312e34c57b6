"""What lies in a saved or live state: its entries, and which step of which environment each row is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.entries import Path, leaves_of
from torchrl_lightning.files import Rows, StoredRows
from torchrl_lightning.fitting import Fault
from torchrl_lightning.inspection.frames import frame_rows
from torchrl_lightning.limits import SHOWN_BUFFERS, SHOWN_ENTRIES
from torchrl_lightning.untrusted import MESSAGE_LIMIT, printable

PIECE = 1 << 22  # bytes of an entry that are read at a time
DEPTH = 16
Ints = NDArray[np.int64]


class Leaf(Protocol):
    """Rows of one entry, of which pieces are read: a tensor, or what stands for one."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Tensor: ...


@dataclass(frozen=True)
class Chained:
    """The rows of several tensors, one behind the other, each in the dtype of the first."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, part: slice) -> Tensor:
        """Join the rows of a piece."""
        start, stop, _ = part.indices(len(self))
        found, begin = [self.parts[0][:0]], 0
        for rows in self.parts:
            found.append(rows[max(start - begin, 0) : max(stop - begin, 0)].to(self.parts[0].dtype))
            begin += len(rows)
        return torch.cat(found)


@dataclass(frozen=True)
class Index:
    """The episode index of a buffer.

    Attributes:
        column: For each filled cell a position: that of the step itself or a later one if the step begins an episode.
        done: Whether the step in each filled cell ends its episode by a flag.
        is_open: Whether the newest episode of each environment continues, ``[N]``.
    """

    column: Leaf
    done: Leaf
    is_open: NDArray[np.bool_]

    def ends(self, content: Content) -> Tensor:
        """Return for each filled cell whether its step is the last of an episode that does not continue."""
        found = np.zeros(content.count, np.bool_)
        env = np.arange(content.num_envs)
        for piece in content.pieces(16):
            column = torch.as_tensor(piece.rows(self.column)).numpy()
            position = np.broadcast_to(np.arange(piece.begin, piece.end)[:, None], piece.shape)
            owner = np.broadcast_to(env, piece.shape)
            if piece.valid is None:
                position, owner = position.ravel(), owner.ravel()
            else:
                position, owner = position[piece.valid], owner[piece.valid]
            begins = (column >= position) & (position > content.first[owner])
            found[content.row_of(position[begins] - 1, owner[begins])] = True
        closed = env[(content.behind > content.first) & ~self.is_open]
        found[content.row_of(content.behind[closed] - 1, closed)] = True
        return torch.from_numpy(found)


@dataclass(frozen=True)
class Content:
    """What a state holds, and how to walk through it in the order of time.

    Attributes:
        name: Where it is from.
        kind: What it is: ``"replay buffer"``, ``"rollout"``, ``"storage"`` or ``"demonstrations"``.
        leaves: The entries, ``[count, ...]`` each: the filled cells in ascending order.
        count: How many cells are filled.
        capacity: How many there are.
        length: Cells of each environment's ring: step ``p`` of environment ``e`` lies in ``p % length * N + e``.
        first: The oldest step that is looked at, ``[N]``.
        behind: Behind the newest step, ``[N]``.
        cells: The filled cells, where they are not the first ones.
        mass: What each cell is drawn in proportion to, if it has a priority.
        ordered: Whether the order of the rows is known.
        index: The episode index of a buffer; None if it has none.
    """

    name: str
    kind: str
    leaves: Mapping[Path, Leaf] = field(repr=False)
    count: int
    capacity: int
    length: int
    first: Ints = field(repr=False)
    behind: Ints = field(repr=False)
    cells: Ints | None = field(default=None, repr=False)
    mass: Leaf | None = field(default=None, repr=False)
    ordered: bool = True
    index: Index | None = field(default=None, repr=False)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self.first)

    @property
    def looked_at(self) -> int:
        """Number of the cells that are looked at."""
        return int((self.behind - self.first).sum())

    def find(self, *names: str, below: str | None = None) -> Path | None:
        """Return the first entry whose last part has one of the names; below ``next``, if there is such a one."""
        found = [path for path in self.leaves if path[-1] in names and (below is None or path[0] == below)]
        return min(found, key=lambda path: (path[0] != "next", len(path)), default=None)

    def row_of(self, position: Ints, env: Ints) -> Ints:
        """Return the rows of the entries that hold steps of environments."""
        cell: Ints = position % self.length * self.num_envs + env
        return cell if self.cells is None else np.searchsorted(self.cells, cell)

    def pieces(self, row_bytes: int) -> Iterator[Piece]:
        """Walk through the steps, all environments side by side, so many at a time as a piece holds."""
        if not self.looked_at:
            return
        step = max(1, PIECE // max(1, row_bytes) // self.num_envs)
        at, end = int(self.first.min()), int(self.behind.max())
        even = bool((self.first == self.first[0]).all() and (self.behind == self.behind[0]).all())
        while at < end:
            stop = min(at + step, end, at - at % self.length + self.length)
            valid = None
            if not even or self.cells is not None:
                row = np.arange(at, stop)[:, None]
                valid = (self.first <= row) & (row < self.behind)
            yield Piece(self, at, stop, valid)
            at = stop


@dataclass(frozen=True)
class Piece:
    """Steps ``begin`` to ``end`` of all environments; ``valid`` says which of them are there, ``[T, N]``."""

    content: Content
    begin: int
    end: int
    valid: NDArray[np.bool_] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Steps, and environments."""
        return self.end - self.begin, self.content.num_envs

    def rows(self, leaf: Leaf) -> Tensor:
        """Read what is there of an entry, ``[n, ...]``, in the order of time."""
        first = self.begin % self.content.length * self.shape[1]
        last = first + math.prod(self.shape)
        if self.valid is None:
            return leaf[first:last]
        valid = self.valid.ravel()
        if self.content.cells is None:
            return leaf[first:last][torch.from_numpy(np.flatnonzero(valid[: len(leaf) - first]))]
        low, high = np.searchsorted(self.content.cells, (first, last))
        place = np.zeros(last - first, np.int64)
        place[self.content.cells[low:high] - first] = np.arange(high - low)
        return leaf[int(low) : int(high)][torch.from_numpy(place[valid])]

    def grid(self, leaf: Leaf, missing: Any = 0) -> NDArray[Any]:
        """Read the first number of each row of an entry, ``[T, N]``."""
        rows = self.rows(leaf)
        first = rows.reshape(len(rows), -1)[:, 0] if rows.numel() else torch.zeros(len(rows))
        numbers: NDArray[Any] = (first.real if first.is_complex() else first).double().numpy()
        if self.valid is None:
            return numbers.reshape(self.shape)
        full = np.full(self.shape, missing, numbers.dtype)
        full[self.valid] = numbers
        return full


@dataclass(frozen=True)
class Unreadable:
    """A buffer that cannot be shown: one line that says why."""

    line: str


def unreadable(name: str, error: Exception) -> Unreadable:
    """Return the line that stands for a buffer whose state raises an error."""
    name, reason = printable(name), " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, ValueError | OSError):
        reason = f"it is no state of ours: {type(error).__name__}: {printable(reason)}"
    return Unreadable(
        printable(reason if reason.startswith(name) else f"{name} cannot be shown: {reason}", MESSAGE_LIMIT)
    )


def contents_in(state: Any, name: str, last: int | None = None) -> Iterator[Content | Unreadable]:
    """Find the buffers in a state, however deep it is nested.

    Args:
        state: Nested dicts and lists of tensors and scalars, as a part's ``state_dict(copy=False)``, a folder of a
            buffer or a checkpoint has it.
        name: What it is called.
        last: Look at the newest cells alone, about so many.

    Yields:
        Each buffer, or the reason why it cannot be shown.
    """
    for number, found in enumerate(_search(state, printable(name), last, 0)):
        if number == SHOWN_BUFFERS:
            yield Unreadable(f"{printable(name)} holds more than {SHOWN_BUFFERS} buffers; the others are left out")
            return
        yield found


def _search(node: Any, name: str, last: int | None, depth: int) -> Iterator[Content | Unreadable]:
    if depth > DEPTH:
        return
    if isinstance(node, list | tuple):
        for number, entry in enumerate(node):
            yield from _search(entry, f"{name}[{number}]" if len(node) > 1 else name, last, depth + 1)
    if not isinstance(node, Mapping):
        return
    found: Content | Unreadable | None
    try:
        found = _content_of(node, name, last)
    except Exception as error:  # a damaged or hostile state makes numpy and torch raise anything
        found = unreadable(name, error)
    if found is not None:
        yield found
    for key, entry in node.items():
        if found is None or key not in ("storage", "data", "reward", "value"):
            below = f"{name}: {printable(key, 80)}" if isinstance(entry, Mapping) and depth else name
            yield from _search(entry, below, last, depth + 1)


def _content_of(node: Mapping[Any, Any], name: str, last: int | None) -> Content | None:
    """Return the buffer that a mapping is the state of; None if it is none."""
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
            raise Fault("its demonstrations are no lists")
        return demonstrations([*parts[0], *parts[1]], name, _count(node["capacity"], "capacity"))
    return None


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise Fault(f"{name} must be a whole number of at least {least}, got {printable(repr(value), 80)}")
    return value


def _numbers(value: Any, name: str) -> Ints:
    """Return a vector of integers of a state."""
    rows = value[:] if isinstance(value, StoredRows | Rows) else value
    if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.dtype != torch.int64:
        what = f"{list(rows.shape)} of {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise Fault(f"{name} must be a vector of int64, got {what}")
    return rows.detach().numpy().copy()


def shape_of(leaf: Any) -> torch.Size:
    """Return the shape of a tensor, or of what stands for one."""
    found: torch.Size = torch.Size([len(leaf), *leaf.leaf.shape[1:]]) if isinstance(leaf, Rows) else leaf.shape
    return found


def _leaves(tree: Any, count: int | None) -> dict[Path, Any]:
    """Return the entries of a state, of ``count`` rows each."""
    if not isinstance(tree, Mapping):
        raise Fault(f"data must be a dict, got a {type(tree).__name__}")
    found = dict(leaves_of(dict(tree)))
    if len(found) > SHOWN_ENTRIES:
        raise Fault(f"it must have at most {SHOWN_ENTRIES} entries, got {len(found):,}")
    for path, leaf in found.items():
        name = ".".join(printable(part, 80) for part in path)
        if not isinstance(leaf, Tensor | StoredRows | Rows) or not shape_of(leaf):
            raise Fault(f"{name} must be a tensor with a row for each step, got a {type(leaf).__name__}")
        if count is not None and len(leaf) != count:
            raise Fault(f"{name} must have {count:,} rows, one for each filled cell, got {len(leaf):,}")
        if not all(isinstance(part, str) for part in path):
            raise Fault(f"the key {name} must consist of texts")
    # A claimed cell costs time, whether or not it holds anything.
    if count and sum(math.prod(shape_of(leaf)) for leaf in found.values()) < count:
        raise Fault(f"its entries hold no numbers for {count:,} cells")
    return {path: leaf.detach() if isinstance(leaf, Tensor) else leaf for path, leaf in found.items()}


def _mass(sampler: Any) -> Leaf | None:
    for _ in range(DEPTH):
        if not isinstance(sampler, Mapping):
            return None
        if "leaves" in sampler:
            mass: Any = sampler["leaves"]
            first = mass[:0] if isinstance(mass, Tensor | StoredRows) and len(mass.shape) == 1 else None
            if first is None or not first.is_floating_point():
                raise Fault("its priorities must be a vector of floating-point numbers")
            return mass.detach() if isinstance(mass, Tensor) else mass
        sampler = sampler.get("prioritized")
    return None


def _rings(
    storage: Mapping[str, Any], writer: Mapping[str, Any] | None, mass: Leaf | None, name: str, last: int | None
) -> Content:
    count, capacity = _count(storage["count"], "count"), _count(storage["max_size"], "max_size", 1)
    cells = None if storage["cells"] is None else _numbers(storage["cells"], "cells")
    if writer is None:
        first, behind, length = np.zeros(1, np.int64), np.full(1, count), max(count, 1)
        kind = "storage"
    else:
        first, behind = (_numbers(writer[each], each) for each in ("oldest", "positions"))
        length, kind = _count(writer["length"], "length", 1), "replay buffer"
    _check_positions(first, behind, length, count, cells)
    if last is not None:
        first = np.maximum(first, behind - max(1, last // len(first)))
    leaves: dict[Path, Any] = {} if storage["data"] is None else _leaves(storage["data"], count)
    if isinstance(frames := storage.get("frames"), Mapping) and leaves:
        leaves |= _stacks(leaves, frames, capacity, len(first), storage.get("frame_stack"))
    leaves = leaves if count else {}
    index = None if writer is None else _index(writer.get("index"), count, len(first))
    return Content(name, kind, leaves, count, capacity, length, first, behind, cells, mass, writer is not None, index)


def _index(known: Any, count: int, num_envs: int) -> Index | None:
    """Return the episode index of a writer, None if it has none; raise ValueError if it is not of this buffer."""
    if known is None:
        return None
    if not isinstance(known, Mapping):
        raise Fault(f"index must be a dict, got a {type(known).__name__}")
    rows = {"column": torch.int64, "done": torch.bool, "open": torch.bool}
    for key, dtype in rows.items():
        wanted = torch.Size([num_envs if key == "open" else count])
        if not isinstance(known.get(key), Tensor | StoredRows | Rows) or shape_of(known[key]) != wanted:
            raise Fault(f"index.{key} must have the shape {list(wanted)}")
        if known[key][:0].dtype != dtype:
            raise Fault(f"index.{key} must be {dtype}, got {known[key][:0].dtype}")
    return Index(known["column"], known["done"], torch.as_tensor(known["open"][:]).numpy().copy())


def _stacks(
    leaves: Mapping[Path, Any], frames: Mapping[Any, Any], max_size: int, num_envs: int, frame_stack: Any
) -> dict[Path, Any]:
    """Return the entries whose frames are stored once, with their images in place of the numbers of frames."""
    found: dict[Path, Any] = {}
    for path, numbers in leaves.items():
        name = ".".join(path[1:] if path[0] == "next" else path)
        if name in frames:
            found[path] = frame_rows(numbers, frames[name], max_size, num_envs, frame_stack)
    return found


def _check_positions(first: Ints, behind: Ints, length: int, count: int, cells: Ints | None) -> None:
    """Validate the counters of rings; raise ValueError if they lead to cells that are not filled."""
    envs = len(first)
    if not envs or len(behind) != envs:
        raise Fault(f"positions and oldest must have one number for each environment, got {len(behind)} and {envs}")
    held = behind - first
    if (first < 0).any() or (held < 0).any() or (behind > 1 << 61).any() or (held > length).any():
        raise Fault(f"positions and oldest must be at most length={length:,} steps apart, and not negative")
    if cells is None:
        wraps = (behind - 1) // length != first // length
        highest = np.where(wraps, length - 1, (behind - 1) % length) * envs + np.arange(envs)
        if (highest[held > 0] >= count).any():
            raise Fault(f"positions lead to cells behind the {count:,} filled ones")
        return
    if len(cells) != count or (count and cells[0] < 0) or (np.diff(cells) <= 0).any():
        raise Fault(f"cells must be {count:,} ascending numbers, got {len(cells):,}")
    if int(held.sum()) > count:
        raise Fault(f"positions and oldest span {int(held.sum()):,} steps, more than the {count:,} filled cells")


def _rollout(storage: Mapping[str, Any], name: str) -> Content:
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
        raise Fault(f"no entry holds numbers for {steps:,} steps of {envs:,} environments")
    first, behind = np.zeros(envs, np.int64), np.full(envs, steps)
    return Content(name, "rollout", leaves, steps * envs, capacity, max(steps, 1), first, behind)


def _flattened(leaf: Any) -> Any:
    """Return rows of steps and environments as rows."""
    shape = torch.Size([leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]])
    return replace(leaf, shape=shape) if isinstance(leaf, StoredRows) else leaf.reshape(shape)


def demonstrations(states: Sequence[Mapping[str, Any]], name: str, capacity: int | None = None) -> Content:
    """Return what demonstrations hold, one behind the other, by what each of them is: ``steps`` and its ends.

    The end of one that does not say how it ended counts as terminal.
    """
    trees = [_leaves(state["steps"], None) for state in states]
    shared = [path for path in (trees[0] if trees else ()) if all(path in tree for tree in trees)]
    shared = [path for path in shared if len({tree[path].shape[1:] for tree in trees}) == 1]
    leaves: dict[Path, Leaf] = {path: Chained([tree[path] for tree in trees]) for path in shared}
    lengths = [len(next(iter(tree.values()))) for tree in trees]
    for tree, length in zip(trees, lengths, strict=True):
        if any(len(leaf) != length for leaf in tree.values()):
            raise Fault("the entries of a demonstration must have equal numbers of rows")
    ends = [(True, False) if each["terminated"] is None else (each["terminated"], each["truncated"]) for each in states]
    for number, flag in enumerate(("terminated", "truncated")):
        leaves["next", flag] = Chained(
            [_at_end(length, end[number]) for length, end in zip(lengths, ends, strict=True)]
        )
    leaves["next", "done"] = Chained([_at_end(length, True) for length in lengths])
    count = sum(lengths)
    first, behind = np.zeros(1, np.int64), np.full(1, count)
    room = len(states) if capacity is None else capacity
    return Content(name, "demonstrations", leaves if count else {}, count, room, max(count, 1), first, behind)


def _at_end(length: int, value: bool) -> Tensor:
    flags = torch.zeros(length, 1, dtype=torch.bool)
    flags[-1:] = value
    return flags
