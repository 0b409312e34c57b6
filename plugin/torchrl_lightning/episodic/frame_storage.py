"""Replay storage that stores each frame of stacked images once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.state import Attribute, check_state, mapping
from torchrl_lightning._core.torchrl_compat import entries_of
from torchrl_lightning._core.tree import (
    Path,
    Tree,
    key_text,
    leaves_of,
    nested_keys,
    next_key,
    path_of,
    to_tensordict,
    tree_of,
)
from torchrl_lightning._core.validators import integer
from torchrl_lightning.episodic.frame_ring import FrameRing, check_frames
from torchrl_lightning.replay import RingStorage
from torchrl_lightning.replay.cells import Cells, Names
from torchrl_lightning.replay.positions import Ints
from torchrl_lightning.replay.rings import rings_of


class FrameStorage(RingStorage):
    """A :class:`RingStorage` that stores each frame of image stacks once.

    Write stacked observations and next observations, for example from a recipe with ``frame_stack=K``. Reads return the
    written stacks bit for bit. The storage holds the newest frame of each step and the last frames of episodes, and
    builds the stacks on read. It also keeps the frames before the oldest step, which belong to the stack of this
    step. The storage needs a :class:`RingWriter`, which is part of every :class:`ExperienceBuffer`. All data are in
    CPU memory.

    For frames of ``S`` bytes, the storage takes ``S * (max_size + K * num_envs)`` bytes. Each stored end of an episode
    adds ``S`` to ``1.25 * S`` bytes, and the frame numbers take ``8 * K`` bytes per step. For example, 10,000 steps of
    8 environments with stacks of four 84 x 84 images and episodes of 300 steps take 71 MB instead of 564 MB. The
    storage then has 1.01 frames per step.

    Args:
        max_size: number of cells.
        frame_stack: frames per stack, ``K``.
        keys: keys of the stacks, each also present under ``"next"``.

    Raises:
        ValueError: a number is not positive. A write raises this error if an entry is not a stack of ``frame_stack``
            images, or the next stack is not the step's stack shifted by one frame.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer
        >>> buffer = ExperienceBuffer(storage=FrameStorage(100, 3))
        >>> stacks = torch.arange(6).clamp(min=2).unfold(0, 3, 1).view(4, 3, 1, 1).expand(4, 3, 8, 8)
        >>> _ = buffer.extend(TensorDict({"observation": stacks[:3], "next": {"observation": stacks[1:]}}, [3]))
        >>> buffer[:]["observation"][:, :, 0, 0].tolist()
        [[2, 2, 2], [2, 2, 3], [2, 3, 4]]
    """

    STATE = {**RingStorage.STATE, "frame_stack": Attribute(), "frames": Attribute(mapping, "_frame_states")}

    def __init__(
        self, max_size: int = 100_000, frame_stack: int = 4, *, keys: Sequence[NestedKey] = ("observation",)
    ) -> None:
        super().__init__(max_size)
        self.frame_stack = integer(frame_stack, "frame_stack")
        self.keys = nested_keys(keys)
        self.frames: dict[Path, FrameRing] = {}
        """The frames of each stacked entry."""
        self._schema: Tree = {}

    @property
    def reserved_frames(self) -> int:
        """Number of frames for which memory is allocated, over all keys."""
        return sum(frames.reserved for frames in self.frames.values())

    def incompatibility(self, specs: Any, learner: Any = None) -> str | None:
        """Return an error message if the storage cannot hold observations of these specs, else None."""
        shapes = [list(specs.observation[key].shape) for key in self.keys]
        if any(len(shape) != 3 for shape in shapes):
            return (
                f"frame_stack={self.frame_stack} needs observations of stacked images, got the shape {shapes[0]}. "
                "Use an environment that stacks images, such as env=atari, or other data, such as data=uniform."
            )
        if specs.frame_stack in (None, 1, self.frame_stack):  # the user's own wrappers may stack frames
            return None
        return f"frame_stack={self.frame_stack} must equal data.env.frame_stack={specs.frame_stack}."

    def check_shareable(self) -> NoReturn:
        """Raise ValueError: frames cannot be shared with other processes."""
        raise ValueError("A FrameStorage cannot be shared with other processes. Use RingStorage.")

    # ------------------------------------------------------------------ writing

    def allocate(self, data: TensorDictBase) -> None:
        """Allocate memory for rows like ``data`` (batch size ``[n]``).

        Raises:
            ValueError: the RingWriter is missing, the memory is too small, or an entry is not a stack of images.
            KeyError: an entry is missing.
        """
        rings = rings_of(self)
        if rings is None:
            raise ValueError(
                "A FrameStorage must have a RingWriter, which separates the environments. Pass the storage to an "
                "ExperienceBuffer."
            )
        tree = tree_of(data)
        leaves = dict(leaves_of(tree))
        numbers = torch.zeros((1, self.frame_stack), dtype=torch.int32)
        self.frames, self._schema = {}, to_tree({path: leaf[:1] for path, leaf in leaves.items()})
        for path in map(path_of, self.keys):
            after = next_key(path)
            if path not in leaves or after not in leaves:
                raise KeyError(
                    f"The data must have the entries {key_text(path)} and {key_text(after)}, got {sorted(leaves)}."
                )
            if leaves[path].shape != leaves[after].shape or leaves[path].dtype != leaves[after].dtype:
                raise ValueError(
                    f"The stacks {key_text(path)} and {key_text(after)} must have the same shape and dtype."
                )
            self.frames[path] = FrameRing(leaves[path], self.frame_stack, rings.length, rings.num_envs)
            leaves[path] = leaves[after] = numbers.expand(len(leaves[path]), -1)
        super().allocate(to_tensordict(to_tree(leaves), torch.Size([len(data)])))
        for path in self.frames:
            self.leaf(path).fill_(-1)

    def take_ownership(self, tree: Tree) -> None:
        """Use leaves ``[max_size, ...]`` as the cells; the leaves hold frame numbers instead of stacks."""
        super().take_ownership(tree)
        self.cells = FrameCells(tree, self._schema, self.frames)

    def leaf(self, path: Path) -> Tensor:
        """Return the stored leaf of a path; for a stack, return its frame numbers ``[max_size, K]``."""
        assert self.cells is not None
        return self.cells.leaves[self.cells.leaf_index[path]]

    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> NoReturn:
        """Raise TypeError: frames must be written in order, not to scattered cells."""
        raise TypeError("Only its RingWriter can write to a FrameStorage. Use extend of the buffer.")

    def clear(self) -> None:
        """Delete the stored data; ``ReplayBuffer.empty`` calls this method."""
        super().clear()
        for path, frames in self.frames.items():
            frames.clear()
            self.leaf(path).fill_(-1)

    # ------------------------------------------------------------------ reading

    def leaves(self, key: NestedKey) -> list[tuple[Path, Tensor]]:
        """Return stored leaves like :meth:`RingStorage.leaves`; stacks raise an error.

        Raises:
            KeyError: the entry is not stored, or it is a stack.
        """
        leaves = super().leaves(key)
        stacks = [path for path, _ in leaves if (path[1:] if path[0] == "next" else path) in self.frames]
        if stacks:
            raise KeyError(
                f"The entry {key_text(stacks[0])} is stored as frames and can only be read with complete steps."
            )
        return leaves

    def _view(self, index: Any) -> TensorDictBase:
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool):
            return self.get(self._from_end(torch.tensor([int(index)])))[0]
        if not self.is_prefix:
            return super()._view(index)  # raises an error
        return self.get(torch.arange(len(self))[index])

    # ------------------------------------------------------------------ state

    def _filled_cells(self) -> int:
        """Return the number of cells ever written, including removed steps, which still occupy frames."""
        return max((ring.written for ring in self.frames.values()), default=0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        cells = state["_packed"]
        super().__setstate__(state)
        for path in self.frames:
            self.leaf(path)[cells:] = -1

    @property
    def _frame_states(self) -> dict[str, Any]:
        uneven_cells = self._uneven_cells
        cells, frames = torch.arange(len(self)) if uneven_cells is None else uneven_cells, {}
        for path, ring in self.frames.items():
            numbers = torch.cat([self.leaf(path)[cells], self.leaf(next_key(path))[cells]])
            frames[".".join(path)] = ring.state_of(numbers)
        return frames

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        super()._validate_consistency(values)
        if values["data"] is None:
            return
        leaves, rings, frames = dict(leaves_of(values["data"])), rings_of(self), values["frames"]
        if rings is None:
            raise ValueError("A FrameStorage must have a RingWriter. Load the state of the complete buffer.")
        check_state(frames, {".".join(path_of(key)): mapping for key in self.keys}, self.OWNER)
        for path in map(path_of, self.keys):
            name, after = ".".join(path), next_key(path)
            if path not in leaves or after not in leaves:
                raise ValueError(
                    f"The state of the storage must have the entries {key_text(path)} and {key_text(after)}."
                )
            stack = frames[name].get("stack")
            numbers = leaves[path], leaves[after]
            check_frames(frames[name], name, *numbers, rings.num_envs, self.max_size, self.frame_stack)
            if self.frames and (stack.shape[1:] != self.frames[path].shape or stack.dtype != self.frames[path].dtype):
                raise ValueError(
                    f"The stacks {key_text(path)} of the state must have the shape and dtype of this storage."
                )

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Restore the filled cells and their frames."""
        data, count, cells, rings = (values[name] for name in ("data", "count", "cells", "frames"))
        if data is not None:
            leaves = dict(leaves_of(data))
            if self.cells is None:
                stacks = {path: rings[".".join(path)]["stack"] for path in map(path_of, self.keys)}
                after = {next_key(path): stack for path, stack in stacks.items()}
                rows = {path: leaf.new_zeros((1, *leaf.shape[1:])) for path, leaf in leaves.items()}
                self.allocate(to_tensordict(to_tree({**rows, **stacks, **after}), torch.Size([1])))
            indices = torch.arange(count) if cells is None else cells
            for path in self.frames:
                self.leaf(path).fill_(-1)
            for path, leaf in leaves.items():
                self.leaf(path)[indices] = leaf
            for path, ring in self.frames.items():
                ring.load_state(rings[".".join(path)], self.leaf(path), self.leaf(next_key(path)))
        self.record_cursor(values["cursor"])
        self.set_length(count)


class FrameCells(Cells):
    """Cells that store frame numbers, but are written and read as stacks.

    Args:
        tree: the leaves; the frame numbers are int32, ``[cells, K]``.
        schema: example rows of the written data.
        frames: the frames of each stacked entry.
    """

    def __init__(self, tree: Tree, schema: Tree, frames: dict[Path, FrameRing]) -> None:
        super().__init__(tree)
        self.schema, self.frames = schema, frames
        self._stacks = {path: (self.leaf_index[path], self.leaf_index[next_key(path)]) for path in frames}

    def match(self, data: TensorDictBase, rows: int) -> tuple[list[Tensor], tuple[Ints, Ints] | None]:
        """Validate ``data`` and return its leaves, including stacks."""
        leaves, _ = super().match(data, rows)
        for path, (index, next_index) in self._stacks.items():
            row = self.frames[path].first_discontinuity(leaves[index], leaves[next_index])
            if row is not None:
                raise ValueError(
                    f"The stack {key_text(next_key(path))} of row {row} must be {key_text(path)} shifted by one frame. "
                    "Nothing was written. Use RingStorage for entries that are not stacked by a recipe's frame_stack."
                )
        return leaves, None

    def scatter(self, leaves: list[Tensor], index: Tensor) -> None:
        """Copy matched leaves into cells; the rows of each environment must be in order."""
        stacks = {column for pair in self._stacks.values() for column in pair}
        for column, (store, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if column not in stacks:
                store.index_copy_(0, index, leaf.detach())
        for path, (leaf_index, next_index) in self._stacks.items():
            self.frames[path].write(
                leaves[leaf_index], leaves[next_index], index, self.leaves[leaf_index], self.leaves[next_index]
            )

    def gather(
        self, index: Tensor, names: Names = None, skip: Collection[Path] = frozenset(), after: Tensor | None = None
    ) -> dict[str, Any]:
        """Read entries of the cells ``index`` like :meth:`Cells.gather`, with complete stacks."""
        entries = super().gather(index, names, skip, after)
        for path, frames in self.frames.items():
            for full_path in (path, next_key(path)):
                level = entries
                for part in full_path[:-1]:
                    level = entries_of(level[part])
                if full_path[-1] in level:
                    level[full_path[-1]] = frames.read(level[full_path[-1]])
        return entries


def to_tree(leaves: Mapping[Path, Tensor]) -> Tree:
    """Build a nested dict from leaves."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        level = tree
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = leaf
    return tree
