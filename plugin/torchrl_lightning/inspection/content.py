"""What lies in a saved or live state: its entries, and which step of which environment each row is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.entries import Path, leaves_of

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

    def ends(self, content: Content) -> NDArray[np.bool_]:
        """Return which cells hold the last step of an episode that does not continue, by a flag or by a cut."""
        found = np.zeros(content.length * content.num_envs, np.bool_)
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
            found[(position[begins] - 1) % content.length * content.num_envs + owner[begins]] = True
        closed = env[(content.behind > content.first) & ~self.is_open]
        found[(content.behind[closed] - 1) % content.length * content.num_envs + closed] = True
        return found


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
        stack: How many frames a stack has whose frames are stored once.
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
    stack: int | None = None
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

    @property
    def cells(self) -> slice:
        """The cells of all steps, whether they are there or not."""
        first = self.begin % self.content.length * self.content.num_envs
        return slice(first, first + math.prod(self.shape))

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
        numbers: NDArray[Any] = rows.reshape(len(rows), -1)[:, 0].float().numpy() if rows.numel() else np.zeros(0)
        if self.valid is None:
            return numbers.reshape(self.shape)
        full = np.full(self.shape, missing, numbers.dtype)
        full[self.valid] = numbers
        return full


def contents_in(state: Any, name: str, last: int | None = None) -> Iterator[Content]:
    """Find the buffers in a state, however deep it is nested.

    Args:
        state: Nested dicts and lists of tensors and scalars, as a part's ``state_dict(copy=False)``, a folder of a
            buffer or a checkpoint has it.
        name: What it is called.
        last: Look at the newest cells alone, about so many.

    Yields:
        Each buffer.
    """
    yield from _search(state, name, last, 0)


def _search(node: Any, name: str, last: int | None, depth: int) -> Iterator[Content]:
    if depth > DEPTH:
        return
    if isinstance(node, list | tuple):
        for number, entry in enumerate(node):
            yield from _search(entry, f"{name}[{number}]" if len(node) > 1 else name, last, depth + 1)
    if not isinstance(node, Mapping):
        return
    found = None
    storage, writer = node.get("storage"), node.get("writer")
    if isinstance(storage, Mapping) and "num_steps" in storage:
        found = _rollout(storage, name)
    elif isinstance(storage, Mapping) and isinstance(writer, Mapping) and {"positions", "oldest"} <= set(writer):
        found = _rings(storage, writer, _mass(node.get("sampler")), name, last)
    elif {"max_size", "count", "data"} <= set(node):
        found = _rings(node, None, None, name, last)
    elif {"capacity", "reward", "value", "annealed"} <= set(node):
        found = demonstrations([*node["reward"], *node["value"]], name, node["capacity"])
    if found is not None:
        yield found
    for key, entry in node.items():
        if found is None or key not in ("storage", "data", "reward", "value"):
            yield from _search(
                entry, f"{name}: {key}" if isinstance(entry, Mapping) and depth else name, last, depth + 1
            )


def _mass(sampler: Any) -> Leaf | None:
    while isinstance(sampler, Mapping):
        if "leaves" in sampler:
            mass: Leaf = sampler["leaves"]
            return mass
        sampler = sampler.get("prioritized")
    return None


def _rings(
    storage: Mapping[str, Any], writer: Mapping[str, Any] | None, mass: Leaf | None, name: str, last: int | None
) -> Content:
    count, cells = storage["count"], storage["cells"]
    if writer is None:
        first, behind, length = np.zeros(1, np.int64), np.full(1, count), max(count, 1)
        kind = "storage"
    else:
        first, behind = (writer[each][:].numpy().copy() for each in ("oldest", "positions"))
        length, kind = writer["length"], "replay buffer"
    if last is not None:
        first = np.maximum(first, behind - max(1, last // len(first)))
    leaves = {path: leaf for path, leaf in leaves_of(storage["data"] or {}) if len(leaf)}
    stack = storage.get("frame_stack")
    found = None if cells is None else cells[:].numpy()
    known, index = None if writer is None else writer.get("index"), None
    if known is not None:
        is_open = torch.as_tensor(known["open"][:]).numpy().copy()
        index = Index(known["column"], known["done"], is_open)
    return Content(
        name,
        kind,
        leaves,
        count,
        storage["max_size"],
        length,
        first,
        behind,
        found,
        mass,
        writer is not None,
        stack,
        index,
    )


def _rollout(storage: Mapping[str, Any], name: str) -> Content:
    steps, envs = storage["num_steps"], storage["num_envs"] or 1
    trees = (storage["data"], storage.get("added"))
    leaves = {
        path: leaf.flatten(0, 1)
        for tree in trees
        for path, leaf in leaves_of(tree or {})
        if leaf.shape[:2] == (steps, envs)
    }
    first, behind = np.zeros(envs, np.int64), np.full(envs, steps)
    return Content(name, "rollout", leaves, steps * envs, storage["size"] * envs, max(steps, 1), first, behind)


def demonstrations(states: Sequence[Mapping[str, Any]], name: str, capacity: int | None = None) -> Content:
    """Return what demonstrations hold, one behind the other, by what each of them is: ``steps`` and its ends.

    The end of one that does not say how it ended counts as terminal.
    """
    trees = [dict(leaves_of(state["steps"])) for state in states]
    shared = [path for path in (trees[0] if trees else ()) if all(path in tree for tree in trees)]
    shared = [path for path in shared if len({tree[path].shape[1:] for tree in trees}) == 1]
    leaves: dict[Path, Leaf] = {path: Chained([tree[path] for tree in trees]) for path in shared}
    lengths = [len(next(iter(tree.values()))) for tree in trees]
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
