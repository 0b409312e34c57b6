"""Begin and end of the episode of every stored step, kept up to date in O(1) per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.replay.episode_kernels import write_row
from torchrl_lightning.replay.rings import Ints
from torchrl_lightning.replay.sharing import SharedArrays
from torchrl_lightning.scan import compiled

Flags = NDArray[np.bool_]


class EpisodeIndex(SharedArrays):
    """Begin and end position of the episode of every stored step.

    One column holds, for the first step of a finished episode, the position of its last step, and for every other step
    the position of the first one (after ALF's ``keep_episodic_info``). What cannot be written there is kept once per
    environment: the begin of the running episode, and the end of the one episode whose first step was overwritten.

    An episode ends at a step whose done flag is set, or before a step that begins a new one. An unfinished episode ends
    at its newest step; one whose first step was overwritten (headless) begins at the oldest stored step.

    Args:
        length: cells of each ring.
        positions: next position of every environment, ``[num_envs]``, shared with the writer.
        floor: positions below are not stored, ``[num_envs]``, shared with the writer.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning.replay import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(8))
        >>> done = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
        >>> _ = buffer.extend(TensorDict({"next": {"done": done}}, [5]))
        >>> env, position = torch.zeros(5, dtype=torch.long), torch.arange(5)
        >>> buffer.writer.index.begin(env, position).tolist()
        [0, 0, 0, 3, 3]
        >>> buffer.writer.index.steps_to_end(env, position).tolist()
        [2, 1, 0, 1, 0]
    """

    ARRAYS = ("_column", "_done", "_begin", "_open", "_headless_end")

    def __init__(self, length: int, positions: Ints, floor: Ints) -> None:
        self.length = length
        self.num_envs = len(positions)
        self.attach(positions, floor)
        cells = length * self.num_envs
        self._column: Ints = np.zeros(cells, np.int64)  # untouched pages cost nothing
        self._done: Flags = np.zeros(cells, np.bool_)
        self._begin: Ints = np.zeros(self.num_envs, np.int64)  # of the running (or, if not open, the last) episode
        self._open: Flags = np.zeros(self.num_envs, np.bool_)
        self._headless_end: Ints = np.full(self.num_envs, -1, np.int64)
        self._all_open = False
        self._bind()

    def attach(self, positions: Ints, floor: Ints) -> None:
        """Use the arrays of the writer after they moved."""
        self._positions, self._floor = positions, floor

    def follow(self) -> None:
        """Refresh what other processes may have changed."""
        self._all_open = bool(self._open.all())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rows": None, "_done_rows": None}

    def _bind(self) -> None:
        super()._bind()
        self._rows = self._column.reshape(self.length, self.num_envs)
        self._done_rows = self._done.reshape(self.length, self.num_envs)

    # ------------------------------------------------------------------ writing

    @property
    def arrays(self) -> tuple[Ints, Flags, Ints, Flags, Ints]:
        """What :func:`row_kernels.write_steps` keeps up to date."""
        return self._column, self._done, self._begin, self._open, self._headless_end

    def write(self, env_ids: Ints | None, done: Flags, init: Flags | None) -> None:
        """Record steps about to be stored; call before the positions move.

        Args:
            env_ids: whose steps, ``[M]``; None for all, evenly placed.
            done: whether a step ends its episode, ``[T, M]``.
            init: whether a step begins one even if the one before did not end, ``[T, M]``.
        """
        if env_ids is None and len(done) == 1 and self._all_open and (init is None or not init.any()):
            self._write_row(done[0])
        else:
            self._write_many(np.arange(self.num_envs) if env_ids is None else env_ids, done, init)
            self._all_open = bool(self._open.all())

    def _write_row(self, done: Flags) -> None:
        position = int(self._positions[0])
        if compiled(write_row)(self._rows, self._done_rows, self._begin, self._headless_end, done, position):
            self._close(np.flatnonzero(done), position)

    def _close(self, env: Ints, position: int) -> None:
        begin = self._begin[env]
        headless = begin <= position - self.length
        self._headless_end[env[headless]] = position
        kept = env[~headless]
        self._column[self._cell(kept, self._begin[kept])] = position
        self._open[env] = False
        self._all_open = False

    def _write_many(self, env: Ints, done: Flags, init: Flags | None) -> None:
        steps, start = len(done), self._positions[env]
        starts = np.empty_like(done)
        starts[0] = ~self._open[env]
        starts[1:] = done[:-1]
        if init is not None:
            self.cut(env[init[0] & self._open[env]])
            starts |= init
        oldest = np.maximum(start + steps - self.length, self._floor[env])
        self.keep_headless_end(env, start, oldest)

        position = start + np.arange(steps)[:, None]
        begin = np.where(starts, position, -1)
        begin[0] = np.where(starts[0], start, self._begin[env])
        np.maximum.accumulate(begin, axis=0, out=begin)
        kept = slice(max(0, steps - self.length), None)
        cells = self._cell(env, position[kept])
        self._column[cells] = begin[kept]
        self._done[cells] = done[kept]

        ends = np.empty_like(done)  # what begins after a step, ends it
        ends[:-1], ends[-1] = starts[1:], done[-1]
        row, who = np.nonzero(ends)
        self._note_ends(env[who], begin[row, who], position[row, who], oldest[who])
        self._begin[env], self._open[env] = begin[-1], ~done[-1]

    def _note_ends(self, env: Ints, begin: Ints, end: Ints, oldest: Ints) -> None:
        kept = begin >= oldest
        self._column[self._cell(env[kept], begin[kept])] = end[kept]
        headless = ~kept & (end >= oldest)
        self._headless_end[env[headless]] = end[headless]

    def keep_headless_end(self, env: Ints, start: Ints, oldest: Ints) -> None:
        """Remember where episodes end whose first step, which knows it, is about to go.

        Args:
            env: whose, ``[M]``.
            start: their next positions, ``[M]``.
            oldest: what will be the oldest steps, ``[M]``.
        """
        survives = (oldest < start) & (oldest > np.maximum(start - self.length, self._floor[env]))
        env, oldest = env[survives], oldest[survives]
        begin, end = self._bounds(env, oldest)
        lost = begin < oldest
        self._headless_end[env[lost]] = end[lost]

    def cut(self, env_ids: Ints | None = None) -> None:
        """End the running episodes at their newest step, unfinished: what comes next does not continue them."""
        env = np.arange(self.num_envs) if env_ids is None else env_ids
        env = env[self._open[env]]
        if env.size:
            newest = self._positions[env] - 1
            oldest = np.maximum(self._positions[env] - self.length, self._floor[env])
            self._note_ends(env, self._begin[env], newest, oldest)
            self._open[env] = False
            self._all_open = False

    def clear(self) -> None:
        """Forget everything."""
        self._open[:], self._begin[:], self._headless_end[:], self._all_open = False, 0, -1, False

    # ------------------------------------------------------------------ reading

    def _cell(self, env: Ints, position: Ints) -> Ints:
        return position % self.length * self.num_envs + env

    @property
    def followed(self) -> tuple[Ints, Ints]:
        """What it takes to follow an episode from step to step.

        Of all cells where a step's episode began (a first step notes its own position or a later one), and of all
        environments the next position; both live.
        """
        return self._column, self._positions

    def steps_of(self, cells: Ints) -> tuple[Ints, Ints]:
        """Return environments and positions of the steps in cells."""
        slot, env = np.divmod(cells, self.num_envs)
        newest = self._positions[env] - 1
        return env, newest - (newest - slot) % self.length

    def cells_of(self, env: Ints, position: Ints) -> Ints:
        """Return the cells of steps."""
        return self._cell(env, position)

    def _oldest(self, env: Ints) -> Ints:
        return np.maximum(self._positions[env] - self.length, self._floor[env])

    def _bounds(self, env: Ints, position: Ints) -> tuple[Ints, Ints]:
        noted = self._column[self._cell(env, position)]
        begin = np.where(noted >= position, position, noted)
        end = self._column[self._cell(env, begin)]
        end = np.where(begin >= self._oldest(env), end, self._headless_end[env])
        running = self._open[env] & (begin == self._begin[env])
        return begin, np.where(running, self._positions[env] - 1, end)

    def bounds(self, env_ids: Tensor, positions: Tensor, *, clip: bool = True) -> tuple[Tensor, Tensor]:
        """Return first and last position of the episodes of stored steps; fast, and unchecked.

        Args:
            env_ids: environments, any shape.
            positions: stored positions, same shape.
            clip: let headless episodes begin at their oldest stored step instead of where they really began.
        """
        env, position = _array(env_ids), _array(positions)
        begin, end = self._bounds(env, position)
        if clip:
            begin = np.maximum(begin, self._oldest(env))
        return torch.from_numpy(begin), torch.from_numpy(end)

    def covers(self, cells: Ints, positions: Ints) -> Flags:
        """Return whether the episodes of ``cells`` already ran at earlier stored ``positions``; one look-up each."""
        # A first step notes its own position or a later one.
        noted: Flags = self._column.take(cells) <= positions
        return noted

    def begin(self, env_ids: Tensor, positions: Tensor, *, clip: bool = True) -> Tensor:
        """Return the first position of the episodes of stored steps; without ``clip`` it may be before the oldest step.

        Raises:
            IndexError: a step is not stored.
        """
        self._check(env_ids, positions)
        return self.bounds(env_ids, positions, clip=clip)[0]

    def end(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last position of the episodes of stored steps; the newest one if the episode is not finished.

        Raises:
            IndexError: a step is not stored.
        """
        self._check(env_ids, positions)
        return self.bounds(env_ids, positions)[1]

    def steps_to_end(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return ``end - position``.

        Raises:
            IndexError: a step is not stored.
        """
        return self.end(env_ids, positions) - positions

    def finished(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return whether the episodes of stored steps ended with a done flag.

        Raises:
            IndexError: a step is not stored.
        """
        end = self.end(env_ids, positions)
        return torch.from_numpy(self._done[self._cell(_array(env_ids), _array(end))])

    def _check(self, env_ids: Tensor, positions: Tensor) -> None:
        env, position = np.atleast_1d(_array(env_ids)), np.atleast_1d(_array(positions))
        if env.size and (env.min() < 0 or env.max() >= self.num_envs):
            raise IndexError(f"Environment ids must lie in [0, {self.num_envs}), got {env.min()} to {env.max()}.")
        env, position = np.broadcast_arrays(env, position)
        wrong = (position < self._oldest(env)) | (position >= self._positions[env])
        if wrong.any():
            e, p = int(env[wrong][0]), int(position[wrong][0])
            raise IndexError(
                f"Step {p} of environment {e} is not stored; it holds steps "
                f"[{int(self._oldest(env)[wrong][0])}, {int(self._positions[e])})."
            )

    # ------------------------------------------------------------------ state

    def state_dict(self, cells: Tensor) -> dict[str, Any]:
        """Copy of what is known about ``cells`` (the filled ones)."""
        where = cells.numpy()
        return {
            "column": torch.from_numpy(self._column[where]),
            "done": torch.from_numpy(self._done[where]),
            "begin": torch.from_numpy(self._begin.copy()),
            "open": torch.from_numpy(self._open.copy()),
            "headless_end": torch.from_numpy(self._headless_end.copy()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], cells: Tensor) -> None:
        """Restore what :meth:`state_dict` gave for the same cells."""
        where = cells.numpy()
        self._column[where] = state_dict["column"].numpy()
        self._done[where] = state_dict["done"].numpy()
        self._begin[:] = state_dict["begin"].numpy()
        self._open[:] = state_dict["open"].numpy()
        self._headless_end[:] = state_dict["headless_end"].numpy()
        self._all_open = bool(self._open.all())


def _array(value: Tensor) -> Ints:
    return torch.as_tensor(value, dtype=torch.int64).cpu().numpy()


def flag_of(value: Tensor, steps: int) -> Flags:
    """Reduce a flag of time-major rows, whatever its trailing shape, to ``[T, M]``."""
    flag = value.detach() if value.requires_grad else value
    flag = flag if flag.is_cpu else flag.cpu()
    array: Flags = flag.numpy() if flag.dtype == torch.bool else (flag != 0).numpy()
    if array.size > len(array):
        array = np.any(array.reshape(len(array), -1), axis=1)
    return array.reshape(steps, -1)
