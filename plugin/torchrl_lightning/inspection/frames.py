"""Stacks of images whose frames are stored once, as the rows of an entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.files import StoredRows
from torchrl_lightning.fitting import Fault
from torchrl_lightning.images import stack_axis


@dataclass(frozen=True)
class FrameRows:
    """Stacks that are put together when they are read.

    Attributes:
        numbers: The numbers of the frames of each stack, ``[count, K]``.
        ring: The frames below number ``spares_from``, ``[n, bytes]``.
        spares: The other frames.
        spares_from: The number of the first of them.
        shape: The shape of one stack.
        dtype: Its dtype.
        axis: The axis of the stack that the frames are joined along.
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

    def __getitem__(self, part: slice) -> Tensor:
        """Read some of the stacks, which are next to each other."""
        numbers = self.numbers[part]
        found, place = np.unique(numbers.numpy(), return_inverse=True)
        size = self.ring[:1].shape[1]
        frames = np.empty((len(found), size), np.uint8)
        for source, first, behind in ((self.ring, 0, self.spares_from), (self.spares, self.spares_from, 1 << 31)):
            low, high = np.searchsorted(found, (first, behind))
            chosen = found[low:high] - first
            if len(chosen) and chosen[-1] >= len(source):
                raise Fault(f"a step shows frame {int(chosen[-1]) + first}, which is not stored")
            for run in np.split(np.arange(len(chosen)), np.flatnonzero(np.diff(chosen) != 1) + 1):
                if len(run):
                    rows = source[int(chosen[run[0]]) : int(chosen[run[-1]]) + 1]
                    frames[low + run[0] : low + run[-1] + 1] = rows.numpy()
        if len(found) and found[0] < 0:
            raise Fault("a step shows a frame with a negative number")
        stacks = torch.from_numpy(frames[place.reshape(-1)]).view(self.dtype)
        if not self.axis:
            return stacks.view(len(numbers), *self.shape)
        height, width, channels = self.shape
        count = numbers.shape[1]
        joined = stacks.view(len(numbers), count, height, width, channels // count).movedim(1, 3)
        return joined.reshape(len(numbers), *self.shape)


def frame_rows(numbers: Any, frames: Any, max_size: int, num_envs: int, frame_stack: Any) -> FrameRows:
    """Return the stacks of an entry of which a state holds the numbers of frames and the frames.

    Raises:
        ValueError: The state is not as a storage of frames writes it.
    """
    stack = frames.get("stack") if isinstance(frames, Mapping) else None
    if not isinstance(stack, Tensor) or stack.ndim != 4 or type(frame_stack) is not int or frame_stack < 1:
        raise Fault("its frames lack the shape of a stack of images")
    shape, axis = tuple(stack.shape[1:]), stack_axis(stack.shape[1:])
    count = shape[axis]
    size = stack.numel() * stack.element_size() // frame_stack
    rows = {name: frames.get(name) for name in ("frames", "spares")}
    for name, leaf in rows.items():
        first = leaf[:0] if isinstance(leaf, Tensor | StoredRows) and leaf.shape else None
        if first is None or first.dtype != torch.uint8 or tuple(first.shape[1:]) != (size,):
            raise Fault(f"its {name} are no rows of {size} bytes, as stacks of {list(shape)} need them")
    first = numbers[:0]
    if first.dtype != torch.int32 or tuple(first.shape[1:]) != (frame_stack,) or not size or count % frame_stack:
        raise Fault(f"a step does not hold the numbers of {frame_stack} frames")
    spares_from = max_size + frame_stack * num_envs
    return FrameRows(numbers, rows["frames"], rows["spares"], spares_from, shape, stack.dtype, axis)
