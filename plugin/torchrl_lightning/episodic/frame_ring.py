"""Store each frame of stacked images once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.images import stack_axis
from torchrl_lightning._core.memory import allocate, check_free_memory, packed_rows, unpacked_rows
from torchrl_lightning._core.state import check_state, expect, tensor
from torchrl_lightning.kernels.compiled import copy_bytes, jitted


class FrameRing:
    """Frames of one stacked entry of several environments, including the entry under ``"next"``.

    A stack is stored as a row of frame numbers. Each environment has one ring of frames. It is longer than the ring of
    steps by one stack, so the frames before the oldest step remain stored. The newest frame after a step occupies the
    slot of the next step's newest frame. Both are the same frame if the next step's stack equals the stack after this
    step. Otherwise an episode begins or steps are missing: then the frame moves to a spare slot. The earlier frames of
    the new stack also get spare slots, unless all frames of the stack are equal. A spare slot becomes free when no
    stored step uses it; if no slot is free, the number of slots grows by a quarter. So reads always return the written
    stacks, regardless of flags and positions.

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
                f"A stack of {frame_stack} images is [{frame_stack}, H, W], [{frame_stack} * C, H, W] or "
                f"[H, W, {frame_stack} * C], got {list(self.shape)}; give frame_stack= the number that the environment "
                "stacks, and keys= the entries that it does so for."
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
        self.free, self.left = np.empty(len(self.spares), np.int32), np.array([len(numbers)])
        self.free[: len(numbers)] = numbers

    def _grow(self, size: int) -> None:
        former = self.spares
        check_free_memory(
            size * self.ring.shape[1], f"Room for {size} frames at the ends of episodes", "lower max_size"
        )
        self.spares = torch.empty((size, self.ring.shape[1]), dtype=torch.uint8)
        self.spares[: len(former)] = former
        self._set_free(np.concatenate([self.free[: self.left[0]], np.arange(len(former), size)]))

    @property
    def reserved(self) -> int:
        """Number of frames for which memory is allocated."""
        return len(self.ring) + len(self.spares)

    def first_discontinuity(self, stack: Tensor, after: Tensor) -> int | None:
        """Return the first row with ``after`` different from ``stack`` shifted by one frame, or None."""
        earlier, later = self._split(stack)[:, 1:], self._split(after)[:, :-1]
        if torch.equal(earlier, later):
            return None
        return int((earlier != later).flatten(1).any(1).nonzero()[0])

    def write(self, stack: Tensor, after: Tensor, cells: Tensor, now: Tensor, then: Tensor) -> None:
        """Store the frames of steps; the rows of each environment must be in chronological order.

        Args:
            stack: stacks of the steps, ``[n, ...]``.
            after: stacks after the steps.
            cells: cells of the steps, ``[n]``.
            now: frame numbers of all cells, ``[cells, K]``; negative for empty cells.
            then: frame numbers of the stacks after the steps.
        """
        shown, seen = self._split(stack).contiguous().numpy(), self._split(after).contiguous().numpy()
        start = 0
        while start < len(cells):
            start = jitted(write_frames)(
                start, cells.numpy(), shown, seen, self.ring.numpy(), self.spares.numpy(), self.free, self.left,
                self.counts, self.last, now.numpy(), then.numpy(),
            )  # fmt: skip
            if start < len(cells):
                self._grow(len(self.spares) + max(self.count, len(self.spares) // 4))

    def read(self, numbers: Tensor) -> Tensor:
        """Return the stacks of frame numbers ``[*B, K]``."""
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
        """Number of leading cells that have ever been written."""
        envs = len(self.counts)
        return min(int(self.counts.max()), len(self.ring) // envs - self.count) * envs

    @property
    def _used(self) -> tuple[int, int]:
        """Number of leading ring frames and of leading spare slots in use."""
        envs, spare = len(self.counts), np.setdiff1d(np.arange(len(self.spares)), self.free[: self.left[0]])
        return min(int(self.counts.max()) + 1, len(self.ring) // envs) * envs, int(spare.max(initial=-1)) + 1

    def __getstate__(self) -> dict[str, Any]:
        frames, spares = self._used
        rows = packed_rows(self.ring, frames), packed_rows(self.spares, spares)
        sizes = len(self.ring), len(self.spares)
        return {**self.__dict__, "ring": None, "spares": None, "packed": (rows, sizes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, sizes = state.pop("packed")
        self.__dict__.update(state)
        self.ring, self.spares = (unpacked_rows(part, len(part), size) for part, size in zip(rows, sizes, strict=True))

    def known_of(self, numbers: Tensor) -> dict[str, Any]:
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

    def learn(self, known: Mapping[str, Any], now: Tensor, then: Tensor) -> None:
        """Restore the state ``known`` of :meth:`known_of`; ``now`` and ``then`` are as in :meth:`write`."""
        self.clear()
        frames, spares = known["frames"], known["spares"]
        self.ring[: len(frames)] = frames
        if len(spares) > len(self.spares):
            self._grow(len(spares))
        self.spares[: len(spares)] = spares
        self.counts[:], self.last[:] = known["counts"].numpy(), known["last"].numpy()
        stored = now[:, 0] >= 0
        self.last[~stored[known["last"]].numpy()] = -1
        shown = torch.cat([now[stored].flatten(), then[stored].flatten()]).unique() - len(self.ring)
        self._set_free(np.setdiff1d(np.arange(len(self.spares)), shown.numpy()))


def check_frames(
    state_dict: Any, name: str, now: Tensor, then: Tensor, width: int, cells: int, frame_stack: int
) -> None:
    """Validate a state of frames against the frame numbers of the steps and the ring size; raise ValueError."""
    owner = f"frames of {name}"
    check_state(state_dict, {"stack": tensor_of_images, "counts": tensor(torch.int64, width, low=0)}, owner)
    stack = state_dict["stack"]
    size = stack.numel() * stack.element_size() // frame_stack
    schema = {
        "last": tensor(torch.int64, width, low=-1, high=cells - 1),
        "frames": tensor(torch.uint8, None, size),
        "spares": tensor(torch.uint8, None, size),
    }
    check_state(state_dict, schema, owner)
    rows, held, spare = cells + frame_stack * width, len(state_dict["frames"]), len(state_dict["spares"])
    used = min(int(state_dict["counts"].max()) + 1, rows // width) * width
    for numbers in (now, then):
        fits = numbers.dtype == torch.int32 and numbers.shape == (len(numbers), frame_stack)
        inside = (numbers >= 0) & ((numbers < held) | ((numbers >= rows) & (numbers < rows + spare)))
        if not fits or not inside.all() or held != used:
            raise ValueError(
                f"The {owner} state is foreign: it holds {held} and {spare} frames, its steps show others."
            )


tensor_of_images = expect(
    lambda value: isinstance(value, Tensor) and value.ndim == 4 and len(value) == 1 and value.is_cpu,
    "one stack of images",
)


def write_frames(
    start: int,
    cells: Any,
    shown: Any,
    seen: Any,
    ring: Any,
    spares: Any,
    free: Any,
    left: Any,
    counts: Any,
    last: Any,
    now: Any,
    then: Any,
) -> int:
    """Store the frames of steps (numba).

    Args:
        start: the first row to write.
        cells: cells of the steps, ``[n]``.
        shown: the stacks of the steps, ``[n, K, S]`` bytes.
        seen: the stacks after the steps; only the newest frames are new.
        ring: the frames of the environments, ``[R, S]``.
        spares: the spare slots, numbered from ``R`` on.
        free: numbers of the free spare slots, minus ``R``.
        left: number of free spare slots.
        counts: number of steps written per environment, ``[num_envs]``.
        last: cell of the last written step of each environment, or -1.
        now: frame numbers of each cell, ``[cells, K]``.
        then: frame numbers of the stack after each cell.

    Returns:
        The first row without enough spare slots, or ``n``.
    """
    # Copy bytes between addresses: numba needs three times as long to compile slice assignments.
    rows, size = ring.shape
    width, count = len(counts), shown.shape[1]
    length = rows // width
    kept, spared, source, newer = ring.ctypes.data, spares.ctypes.data, shown.ctypes.data, seen.ctypes.data
    numbers = np.empty(count, np.int32)
    for row in range(start, len(cells)):
        if left[0] < count:
            return row
        cell = cells[row]
        env = cell % width
        here, behind = counts[env] % length * width + env, (counts[env] + 1) % length * width + env
        before, newest = last[env], row * count + count - 1
        goes_on = before >= 0
        place = count - 1
        while goes_on and place >= 0:
            numbers[place] = number = then[before, place]
            frame = ring[number] if number < rows else spares[number - rows]
            different = np.uint8(0)
            for byte in range(size):
                different |= frame[byte] ^ shown[row, place, byte]
            goes_on = different == 0
            place -= 1
        if not goes_on:
            if before >= 0 and before != cell:
                left[0] -= 1
                copy_bytes(spared + free[left[0]] * size, kept + here * size, size)
                then[before, count - 1] = rows + free[left[0]]
            copy_bytes(kept + here * size, source + newest * size, size)
            different = np.uint8(0)
            for place in range(count - 1):
                for byte in range(size):
                    different |= shown[row, place, byte] ^ shown[row, count - 1, byte]
            for place in range(count):
                numbers[place] = here
                if different and place < count - 1:
                    left[0] -= 1
                    earlier = source + (row * count + place) * size
                    copy_bytes(spared + free[left[0]] * size, earlier, size)
                    numbers[place] = rows + free[left[0]]
        # Remove the overwritten step and free its spare slots, unless a later step uses them.
        if now[cell, 0] >= rows:
            free[left[0]] = now[cell, 0] - rows
            left[0] += 1
        if now[cell, 0] >= 0 and (then[cell, count - 1] >= rows or (before == cell and not goes_on)):
            for place in range(count):
                if then[cell, place] >= rows:
                    free[left[0]] = then[cell, place] - rows
                    left[0] += 1
        for place in range(count):
            now[cell, place] = numbers[place]
            then[cell, place] = numbers[place + 1] if place < count - 1 else behind
        copy_bytes(kept + behind * size, newer + newest * size, size)
        counts[env] += 1
        last[env] = cell
    return len(cells)


def read_frames(numbers: Any, ring: Any, spares: Any, frames: Any) -> None:
    """Copy the frames ``numbers``, ``[n]``, from ring or spare slots to ``frames``, ``[n, S]`` (numba)."""
    rows, size = ring.shape
    source, other, target = ring.ctypes.data, spares.ctypes.data, frames.ctypes.data
    for row in range(len(numbers)):
        number = numbers[row]
        address = source + number * size if number < rows else other + (number - rows) * size
        copy_bytes(target + row * size, address, size)
