"""Read slices of an entry in a state. The entry is a tensor, or an object that replaces a tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.files import ChunkedTensor, MappedTensor
from torchrl_lightning._core.images import stack_axis

Ints = NDArray[np.int64]


class Leaf(Protocol):
    """The rows of one entry, which can be sliced."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Tensor: ...


@dataclass(frozen=True)
class ConcatRows:
    """The concatenated rows of several tensors, in the dtype of the first."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, rows_slice: slice) -> Tensor:
        """Return the rows of a slice as one tensor."""
        start, stop, _ = rows_slice.indices(len(self))
        slices, begin = [self.parts[0][:0]], 0
        for tensor in self.parts:
            slices.append(tensor[max(start - begin, 0) : max(stop - begin, 0)].to(self.parts[0].dtype))
            begin += len(tensor)
        return torch.cat(slices)


def shape_of(leaf: Any) -> torch.Size:
    """Return the shape of an entry, rows first."""
    shape: torch.Size = torch.Size([len(leaf), *leaf.leaf.shape[1:]]) if isinstance(leaf, ChunkedTensor) else leaf.shape
    return shape


def check_leaf(leaf: Any, name: str, dtypes: Collection[torch.dtype], *shape: int | None) -> Any:
    """Return a leaf of a state; raise UserError unless it has one of the dtypes and the shape (None for any size)."""
    is_leaf = isinstance(leaf, Tensor | MappedTensor | ChunkedTensor) and len(shape_of(leaf)) > 0
    sizes, dtype = (list(shape_of(leaf)), leaf[:0].dtype) if is_leaf else ([], type(leaf).__name__)
    expected_sizes = [
        size if expected_size is None else expected_size for expected_size, size in zip_longest(shape, sizes)
    ]
    if sizes != expected_sizes or dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise UserError(f"{name} must be {expected} of shape {[*shape]}, got {dtype} of shape {sizes}")
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def rows_of(leaf: Leaf, ascending: Ints) -> Tensor:
    """Return rows at ascending indices."""
    begin = int(ascending[0])
    rows = leaf[begin : int(ascending[-1]) + 1]
    return rows if len(rows) == len(ascending) else rows[torch.from_numpy(ascending - begin)]


def numbers_of(leaf: Leaf, rows: Ints) -> NDArray[Any]:
    """Return the first number of each selected row, or 0 for empty rows; the indices may have any order."""
    if not leaf[:1].numel():
        return np.zeros(len(rows))
    begin = int(rows.min())
    chunk = leaf[begin : int(rows.max()) + 1]
    first = chunk.reshape(len(chunk), -1)[:, 0]
    first = first.real if first.is_complex() else first
    numbers: NDArray[Any] = (first.double() if first.is_floating_point() else first).numpy()[rows - begin]
    return numbers


def read_rows(leaf: Leaf, ascending: Ints, size: int) -> Iterator[Tensor]:
    """Yield rows at ascending indices; each read spans at most ``size`` neighbouring rows."""
    start = 0
    while start < len(ascending):
        end = int(np.searchsorted(ascending, ascending[start] + size))
        yield rows_of(leaf, ascending[start:end])
        start = end


@dataclass(frozen=True)
class FrameRows:
    """Frame stacks that are assembled on reading.

    Attributes:
        numbers: The numbers of the frames of each stack, ``[count, K]``.
        ring: The frames with numbers below ``spares_from``, ``[n, bytes]``.
        spares: The frames with higher numbers.
        spares_from: The number of the first spare frame.
        shape: The shape of one stack.
        dtype: The dtype of a stack.
        axis: The axis of a stack along which the frames are joined.
    """

    numbers: Any
    ring: Any
    spares: Any
    spares_from: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows_slice: slice) -> Tensor:
        """Return the stacks of a slice."""
        numbers = self.numbers[rows_slice]
        frame_numbers, inverse = np.unique(numbers.numpy(), return_inverse=True)
        if len(frame_numbers) and frame_numbers[0] < 0:
            raise UserError("a step refers to a frame with a negative number")
        frames = [self.ring[:0]]
        for source, first, stop in ((self.ring, 0, self.spares_from), (self.spares, self.spares_from, 1 << 31)):
            frame_rows = frame_numbers[(frame_numbers >= first) & (frame_numbers < stop)] - first
            if len(frame_rows) and frame_rows[-1] >= len(source):
                raise UserError(f"a step refers to frame {int(frame_rows[-1]) + first}, which is not stored")
            frames += read_rows(source, frame_rows, len(frame_numbers))
        stacks = torch.cat(frames)[torch.from_numpy(inverse.reshape(-1))].view(self.dtype)
        if not self.axis:
            return stacks.view(len(numbers), *self.shape)
        height, width, channels = self.shape
        count = numbers.shape[1]
        joined = stacks.view(len(numbers), count, height, width, channels // count).movedim(1, 3)
        return joined.reshape(len(numbers), *self.shape)


def frame_rows(numbers: Any, frames: Any, max_size: int, num_envs: int, frame_stack: Any) -> FrameRows:
    """Return the frame stacks of an entry from the frame numbers and frames in a state.

    Raises:
        ValueError: The state does not match the format of a frame storage.
    """
    stack = frames.get("stack") if isinstance(frames, Mapping) else None
    if not isinstance(stack, Tensor) or stack.ndim != 4 or type(frame_stack) is not int or frame_stack < 1:
        raise UserError("its frames lack the shape of a stack of images")
    shape, axis = tuple(stack.shape[1:]), stack_axis(stack.shape[1:])
    size = stack.numel() * stack.element_size() // frame_stack
    if not size or shape[axis] % frame_stack:
        raise UserError(f"its stacks of shape {list(shape)} do not consist of {frame_stack} frames")
    check_leaf(numbers, "the numbers of its frames", [torch.int32], None, frame_stack)
    ring = check_leaf(frames.get("frames"), "its frames", [torch.uint8], None, size)
    spares = check_leaf(frames.get("spares"), "its spares", [torch.uint8], None, size)
    return FrameRows(numbers, ring, spares, max_size + frame_stack * num_envs, shape, stack.dtype, axis)
