"""Store each frame of stacked images once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.images import stack_axis
from torchrl_lightning._core.memory import allocate, check_free_memory, pack_rows, unpack_rows
from torchrl_lightning._core.state import check_state, expect, tensor
from torchrl_lightning.kernels.compiled import copy_bytes, jitted


class FrameRing:
    """Store the frames of one stacked entry, and of the same entry under ``"next"``, for several environments.

    A stack is stored as a row of frame numbers. Each environment has one ring of frames. The ring of frames is longer
    than the ring of steps by one stack, so the frames before the oldest step remain stored. The newest frame
    after a step and the newest frame of the next step share one slot. They are the same frame if the next step's stack
    equals the stack after this step. If the stacks differ, an episode begins or steps are missing, and the frame after
    this step moves to a spare slot. The earlier frames of the next step's stack also get spare slots, unless all frames
    of that stack are equal. A spare slot becomes free when no stored step uses it. If no slot is free, the number of
    slots grows by a quarter. So reads always return the written stacks, regardless of flags and positions.

    Args:
        stack: rows of stacks; only shape and dtype matter.
        frame_stack: frames per stack.
        length: steps per environment.
        num_envs: number of environments.

    Raises:
        ValueError: ``stack`` does not hold ``frame_stack`` images, or the memory is too small.
    """

    def __init__(self, stack: Tensor, frame_stack: int, length: int, num_envs: int) -> None:
        self.shape, self.dtype, self.count = tuple(stack.shape[1:]), stack.dtype, frame_stack
        self.axis = stack_axis(self.shape)
        if len(self.shape) != 3 or self.shape[self.axis] % frame_stack:
            raise ValueError(
                f"A stack of {frame_stack} images must be [{frame_stack}, H, W], [{frame_stack} * C, H, W] or "
                f"[H, W, {frame_stack} * C], got {list(self.shape)}. Pass the environment's number of stacked frames "
                "as frame_stack, and the keys of its stacked entries as keys."
            )
        size = stack[:1].numel() * stack.element_size() // frame_stack
        rows = (length + frame_stack) * num_envs
        check_free_memory(rows * size, f"The ring of {rows} frames", "lower max_size")
        self.ring = allocate(rows * size, torch.uint8, "cpu").view(rows, size)
        self.counts, self.last = np.zeros(num_envs, np.int64), np.full(num_envs, -1, np.int64)
        self.clear()

    def clear(self) -> None:
        """Mark all frames as unused."""
        self.last[:] = -1
        self.spares = torch.empty((self.count, self.ring.shape[1]), dtype=torch.uint8)
        self._set_free(np.arange(len(self.spares)))

    def _set_free(self, numbers: Any) -> None:
        self.free, self.num_free = np.empty(len(self.spares), np.int32), np.array([len(numbers)])
        self.free[: len(numbers)] = numbers

    def _grow(self, size: int) -> None:
        old_spares = self.spares
        check_free_memory(
            size * self.ring.shape[1], f"The memory of {size} frames at the ends of episodes", "lower max_size"
        )
        self.spares = torch.empty((size, self.ring.shape[1]), dtype=torch.uint8)
        self.spares[: len(old_spares)] = old_spares
        self._set_free(np.concatenate([self.free[: self.num_free[0]], np.arange(len(old_spares), size)]))

    @property
    def reserved(self) -> int:
        """Number of frames for which memory is allocated."""
        return len(self.ring) + len(self.spares)

    def first_discontinuity(self, stack: Tensor, after: Tensor) -> int | None:
        """Return the first row with an ``after`` that is not its ``stack`` shifted by one frame, or None."""
        earlier, later = self._split(stack)[:, 1:], self._split(after)[:, :-1]
        if torch.equal(earlier, later):
            return None
        return int((earlier != later).flatten(1).any(1).nonzero()[0])

    def write(self, stack: Tensor, next_stack: Tensor, cells: Tensor, numbers: Tensor, next_numbers: Tensor) -> None:
        """Store the frames of steps; the rows of each environment must be in chronological order.

        Args:
            stack: stacks of the steps, ``[n, ...]``.
            next_stack: stacks after the steps.
            cells: cells of the steps, ``[n]``.
            numbers: frame numbers of all cells, ``[cells, K]``; negative for empty cells.
            next_numbers: frame numbers of the stacks after the steps.
        """
        stacks, next_stacks = self._split(stack).contiguous().numpy(), self._split(next_stack).contiguous().numpy()
        start = 0
        while start < len(cells):
            start = jitted(write_frames)(
                start, cells.numpy(), stacks, next_stacks, self.ring.numpy(), self.spares.numpy(), self.free,
                self.num_free, self.counts, self.last, numbers.numpy(), next_numbers.numpy(),
            )  # fmt: skip
            if start < len(cells):
                self._grow(len(self.spares) + max(self.count, len(self.spares) // 4))

    def read(self, numbers: Tensor) -> Tensor:
        """Return the stacks with the frame numbers ``[*B, K]``."""
        flat = numbers.reshape(-1).numpy()
        frames = np.empty((len(flat), self.ring.shape[1]), np.uint8)
        jitted(read_frames)(flat, self.ring.numpy(), self.spares.numpy(), frames)
        return self._join(torch.from_numpy(frames)).view(*numbers.shape[:-1], *self.shape)

    def _split(self, stack: Tensor) -> Tensor:
        if self.axis:
            height, width, channels = self.shape
            stack = stack.view(len(stack), height, width, self.count, channels // self.count).movedim(3, 1)
        return stack.reshape(len(stack), self.count, -1).view(torch.uint8)

    def _join(self, frames: Tensor) -> Tensor:
        frames = frames.view(self.dtype)
        if not self.axis:
            return frames
        height, width, channels = self.shape
        return frames.view(-1, self.count, height, width, channels // self.count).movedim(1, 3).contiguous()

    # ------------------------------------------------------------------ state

    @property
    def written(self) -> int:
        """Number of cells ever written; these are the first cells."""
        envs = len(self.counts)
        return min(int(self.counts.max()), len(self.ring) // envs - self.count) * envs

    @property
    def _used(self) -> tuple[int, int]:
        """Lengths of the used leading parts of the ring and of the spare slots."""
        envs, spare = len(self.counts), np.setdiff1d(np.arange(len(self.spares)), self.free[: self.num_free[0]])
        return min(int(self.counts.max()) + 1, len(self.ring) // envs) * envs, int(spare.max(initial=-1)) + 1

    def __getstate__(self) -> dict[str, Any]:
        frames, spares = self._used
        rows = pack_rows(self.ring, frames), pack_rows(self.spares, spares)
        sizes = len(self.ring), len(self.spares)
        return {**self.__dict__, "ring": None, "spares": None, "packed": (rows, sizes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, sizes = state.pop("packed")
        self.__dict__.update(state)
        self.ring, self.spares = (unpack_rows(row, len(row), size) for row, size in zip(rows, sizes, strict=True))

    def state_of(self, numbers: Tensor) -> dict[str, Any]:
        """Return the stored frames as a state; ``numbers`` are the frame numbers of all stored steps."""
        highest = int(numbers.max()) if numbers.numel() else 0
        frames = self.ring[: self._used[0]]
        spares = self.spares[: max(highest + 1 - len(self.ring), 0)]
        return {
            "stack": torch.zeros((1, *self.shape), dtype=self.dtype),
            "counts": self.counts,
            "last": self.last,
            "frames": frames,
            "spares": spares,
        }

    def load_state(self, state: Mapping[str, Any], numbers: Tensor, next_numbers: Tensor) -> None:
        """Restore a state from :meth:`state_of`, with the frame numbers described in :meth:`write`."""
        self.clear()
        frames, spares = state["frames"], state["spares"]
        self.ring[: len(frames)] = frames
        if len(spares) > len(self.spares):
            self._grow(len(spares))
        self.spares[: len(spares)] = spares
        self.counts[:], self.last[:] = state["counts"].numpy(), state["last"].numpy()
        stored = numbers[:, 0] >= 0
        self.last[~stored[state["last"]].numpy()] = -1
        used_spares = torch.cat([numbers[stored].flatten(), next_numbers[stored].flatten()]).unique() - len(self.ring)
        self._set_free(np.setdiff1d(np.arange(len(self.spares)), used_spares.numpy()))


def check_frames(
    state_dict: Any, name: str, numbers: Tensor, next_numbers: Tensor, width: int, cells: int, frame_stack: int
) -> None:
    """Raise ValueError if a state of frames does not match the frame numbers of the steps or the ring size."""
    owner = f"frames of {name}"
    check_state(state_dict, {"stack": image_stack, "counts": tensor(torch.int64, width, low=0)}, owner)
    stack = state_dict["stack"]
    size = stack.numel() * stack.element_size() // frame_stack
    schema = {
        "last": tensor(torch.int64, width, low=-1, high=cells - 1),
        "frames": tensor(torch.uint8, None, size),
        "spares": tensor(torch.uint8, None, size),
    }
    check_state(state_dict, schema, owner)
    rows, num_frames, num_spares = cells + frame_stack * width, len(state_dict["frames"]), len(state_dict["spares"])
    num_used = min(int(state_dict["counts"].max()) + 1, rows // width) * width
    for array in (numbers, next_numbers):
        is_numbers = array.dtype == torch.int32 and array.shape == (len(array), frame_stack)
        is_stored = (array >= 0) & ((array < num_frames) | ((array >= rows) & (array < rows + num_spares)))
        if not is_numbers or not is_stored.all() or num_frames != num_used:
            raise ValueError(
                f"The state of {owner} must contain the frames of its steps, got {num_frames} ring frames and "
                f"{num_spares} spare frames."
            )


image_stack = expect(
    lambda value: isinstance(value, Tensor) and value.ndim == 4 and len(value) == 1 and value.is_cpu,
    "one stack of images",
)


def write_frames(
    start: int,
    cells: Any,
    stacks: Any,
    next_stacks: Any,
    ring: Any,
    spares: Any,
    free: Any,
    num_free: Any,
    counts: Any,
    last: Any,
    cell_numbers: Any,
    next_numbers: Any,
) -> int:
    """Store the frames of steps (numba).

    Args:
        start: the first row to write.
        cells: cells of the steps, ``[n]``.
        stacks: the stacks of the steps, ``[n, K, S]`` bytes.
        next_stacks: the stacks after the steps; only the newest frame of each is stored.
        ring: the frames of the environments, ``[R, S]``.
        spares: the spare slots, numbered from ``R`` on.
        free: indices of the free slots in ``spares``.
        num_free: number of free spare slots.
        counts: number of steps written per environment, ``[num_envs]``.
        last: cell of the last written step of each environment, or -1.
        cell_numbers: frame numbers of each cell, ``[cells, K]``.
        next_numbers: frame numbers of the stack after each cell.

    Returns:
        The first row without enough spare slots, or ``n``.
    """
    # Copy bytes between addresses, because numba needs three times as long to compile slice assignments.
    rows, size = ring.shape
    width, count = len(counts), stacks.shape[1]
    length = rows // width
    ring_address, spare_address = ring.ctypes.data, spares.ctypes.data
    stack_address, next_stack_address = stacks.ctypes.data, next_stacks.ctypes.data
    numbers = np.empty(count, np.int32)
    for row in range(start, len(cells)):
        if num_free[0] < count:
            return row
        cell = cells[row]
        env = cell % width
        slot, next_slot = counts[env] % length * width + env, (counts[env] + 1) % length * width + env
        previous, newest = last[env], row * count + count - 1
        continues = previous >= 0
        index = count - 1
        while continues and index >= 0:
            numbers[index] = number = next_numbers[previous, index]
            frame = ring[number] if number < rows else spares[number - rows]
            different = np.uint8(0)
            for byte in range(size):
                different |= frame[byte] ^ stacks[row, index, byte]
            continues = different == 0
            index -= 1
        if not continues:
            if previous >= 0 and previous != cell:
                num_free[0] -= 1
                copy_bytes(spare_address + free[num_free[0]] * size, ring_address + slot * size, size)
                next_numbers[previous, count - 1] = rows + free[num_free[0]]
            copy_bytes(ring_address + slot * size, stack_address + newest * size, size)
            different = np.uint8(0)
            for index in range(count - 1):
                for byte in range(size):
                    different |= stacks[row, index, byte] ^ stacks[row, count - 1, byte]
            for index in range(count):
                numbers[index] = slot
                if different and index < count - 1:
                    num_free[0] -= 1
                    earlier_address = stack_address + (row * count + index) * size
                    copy_bytes(spare_address + free[num_free[0]] * size, earlier_address, size)
                    numbers[index] = rows + free[num_free[0]]
        # Remove the overwritten step and free its spare slots, unless a later step uses them.
        if cell_numbers[cell, 0] >= rows:
            free[num_free[0]] = cell_numbers[cell, 0] - rows
            num_free[0] += 1
        is_filled, has_spare_slot = cell_numbers[cell, 0] >= 0, next_numbers[cell, count - 1] >= rows
        if is_filled and (has_spare_slot or (previous == cell and not continues)):
            for index in range(count):
                if next_numbers[cell, index] >= rows:
                    free[num_free[0]] = next_numbers[cell, index] - rows
                    num_free[0] += 1
        for index in range(count):
            cell_numbers[cell, index] = numbers[index]
            next_numbers[cell, index] = numbers[index + 1] if index < count - 1 else next_slot
        copy_bytes(ring_address + next_slot * size, next_stack_address + newest * size, size)
        counts[env] += 1
        last[env] = cell
    return len(cells)


def read_frames(numbers: Any, ring: Any, spares: Any, frames: Any) -> None:
    """Copy the frames ``numbers``, ``[n]``, from ring or spare slots to ``frames``, ``[n, S]`` (numba)."""
    rows, size = ring.shape
    ring_address, spare_address, frame_address = ring.ctypes.data, spares.ctypes.data, frames.ctypes.data
    for row in range(len(numbers)):
        number = numbers[row]
        address = ring_address + number * size if number < rows else spare_address + (number - rows) * size
        copy_bytes(frame_address + row * size, address, size)
