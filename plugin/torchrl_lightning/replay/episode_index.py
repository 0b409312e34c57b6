"""An index of the episode boundaries of all stored steps, updated in O(1) per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.kernels import episode_kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.positions import Flags, Ints, check_steps, steps_between, steps_of

NO_INTS: Ints = np.empty(0, np.int64)


class EpisodeIndex:
    """The first and last position of the episode of every stored step.

    A column stores one position per step. The first step of a finished episode stores the position of the last step.
    Every other step stores the position of the first step (after ALF's ``keep_episodic_info``). For each environment,
    one number stores the first position of the running episode. A second number stores the last position of the episode
    that has lost its first step.

    An episode ends at a step with a done flag, or before a step that begins a new episode. An unfinished episode ends
    at its newest step. If the first step of an episode was overwritten, the episode is headless and begins at its
    oldest stored step. Queries for steps that are not stored raise an ``IndexError``.

    Args:
        length: number of cells per ring.
        positions: next position of every environment, ``[num_envs]``, shared with the writer.
        valid_from: lowest valid position of every environment, ``[num_envs]``, shared with the writer.

    Examples:
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

    def __init__(self, length: int, positions: Ints, valid_from: Ints) -> None:
        self.length = length
        self.num_envs = len(positions)
        self.has_cuts = False
        """Whether some episodes may begin at a step without a flag."""
        self.attach(positions, valid_from)
        cells = length * self.num_envs
        self._column: Ints = np.zeros(cells, np.int64)  # untouched pages cost nothing
        self._done: Flags = np.zeros(cells, np.bool_)
        self._begin: Ints = np.zeros(self.num_envs, np.int64)  # of the running or, if none runs, the newest episode
        self._open: Flags = np.zeros(self.num_envs, np.bool_)
        self._headless_end: Ints = np.full(self.num_envs, -1, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return self.compact_state(self.__dict__)

    def compact_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes for a copy, reduced to the stored steps."""
        run, position, _ = steps_between(self._oldest(np.arange(self.num_envs)), self._positions - 1)
        cells = self.cells_of(run, position)
        return {**state, "_column": self._column[cells], "_done": self._done[cells], "packed_cells": cells}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cells = state.pop("packed_cells")
        self.__dict__.update(state)
        size = self.length * self.num_envs
        self._column, self._done = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        self._column[cells], self._done[cells] = state["_column"], state["_done"]

    def attach(self, positions: Ints, valid_from: Ints) -> None:
        """Set the arrays of the writer after they moved in memory."""
        self._positions, self._valid_from = positions, valid_from

    @property
    def arrays(self) -> tuple[Ints, Flags, Ints, Flags, Ints]:
        """The arrays that :func:`row_copies.write_steps` updates."""
        return self._column, self._done, self._begin, self._open, self._headless_end

    def keep_headless_end(self, env: Ints, oldest: Ints) -> None:
        """Store the ends of episodes that lose their first step; ``oldest`` are the first steps that remain."""
        is_affected = (oldest < self._positions[env]) & (oldest > self._oldest(env))
        env, oldest = env[is_affected], oldest[is_affected]
        begin, end = self._bounds(env, oldest)
        is_headless = begin < oldest
        self._headless_end[env[is_headless]] = end[is_headless]

    def cut(self, env_ids: Ints | None = None) -> None:
        """End the running episodes at their newest step, without a done flag; the next steps begin new episodes."""
        env = np.arange(self.num_envs) if env_ids is None else env_ids
        env = env[self._open[env]]
        self.has_cuts = self.has_cuts or bool(env.size)
        begin, newest = self._begin[env], self._positions[env] - 1
        has_begin = begin >= self._oldest(env)
        self._column[self.cells_of(env[has_begin], begin[has_begin])] = newest[has_begin]
        self._headless_end[env[~has_begin]] = newest[~has_begin]
        self._open[env] = False

    def set_flags(
        self, cells: Ints, done: Flags, had_begin_flag: Flags, begin_masks: Callable[[Ints], tuple[Flags, Flags]]
    ) -> None:
        """Update episodes after flags of stored steps changed.

        A cut (an episode border without a flag) stays. The cost for an environment grows with the number of steps in
        the episodes from the first to the last changed step, including the episode before and the episode after.

        Args:
            cells: cells of the steps, ``[n]``, without duplicates.
            done: mask of steps that now end an episode.
            had_begin_flag: mask of steps at which a flag began an episode before the change.
            begin_masks: a function of cells that returns two masks: steps at which a flag now begins an episode, and
                steps with another trajectory id than the step before.
        """
        self.has_cuts = True  # an episode border stays as a cut if the flag at its step is cleared
        env, position = self.steps_of(cells)
        for env_id in np.unique(env):
            selected = env == env_id
            self._set_flags(int(env_id), position[selected], done[selected], had_begin_flag[selected], begin_masks)

    def affected_cells(self, cells: Ints) -> Ints:
        """Return the cells of all episodes that may change if the flags of ``cells`` are replaced."""
        env, position = self.steps_of(cells)
        cells_of_envs = [NO_INTS]
        for env_id in np.unique(env):
            steps = np.arange(*self._affected_range(int(env_id), position[env == env_id]))
            cells_of_envs.append(self.cells_of(np.full_like(steps, env_id), steps))
        return np.concatenate(cells_of_envs)

    def _affected_range(self, env: int, position: Ints) -> tuple[int, int]:
        """Return the range ``[begin, end)`` of these steps' episodes with the episode before and the episode after."""
        oldest, newest = int(self._oldest(np.array([env]))[0]), int(self._positions[env]) - 1
        ends = np.array([max(int(position.min()) - 1, oldest), min(int(position.max()) + 1, newest)])
        begin, end = self._bounds(np.array([env, env]), ends, clip=True)
        return int(begin[0]), int(end[1]) + 1

    def _set_flags(
        self,
        env: int,
        position: Ints,
        done: Flags,
        had_begin_flag: Flags,
        begin_masks: Callable[[Ints], tuple[Flags, Flags]],
    ) -> None:
        low, high = self._affected_range(env, position)
        steps = np.arange(low, high)
        envs, newest = np.full_like(steps, env), int(self._positions[env]) - 1
        cells, (begin, _) = self.cells_of(envs, steps), self._bounds(envs, steps)
        has_begin_flag, has_new_id = begin_masks(cells)
        ended_before, began_before = self._done[cells], has_begin_flag.copy()
        ended = ended_before.copy()
        ended[position - low], began_before[position - low] = done, had_begin_flag
        after_end, after_end_before = np.r_[False, ended[:-1]], np.r_[False, ended_before[:-1]]
        was_cut = (begin == steps) & ~after_end_before & ~began_before
        border = after_end | has_begin_flag | has_new_id | was_cut
        first_begin = int(begin[0])  # may be before the oldest stored step; a new flag at the oldest step replaces it
        border[0] = True
        if has_begin_flag[0]:
            first_begin = low
        first = np.flatnonzero(border)
        last = np.r_[first[1:], len(steps)] - 1
        is_running = high - 1 == newest and not ended[-1] and bool(self._open[env] or ended_before[-1])
        number = np.cumsum(border) - 1  # the episode number of each step
        self._column[cells] = np.where(number == 0, first_begin, steps[first][number])
        self._done[cells] = ended
        is_closed = np.ones(len(first), np.bool_)
        is_closed[-1] = not is_running
        if first_begin < low:
            if is_closed[0]:
                self._headless_end[env] = steps[last[0]]
            is_closed[0] = False
        self._column[cells[first[is_closed]]] = steps[last[is_closed]]
        if high - 1 == newest:
            self._open[env] = is_running
            self._begin[env] = first_begin if len(first) == 1 else steps[first[-1]]

    def is_running(self, env: Ints) -> Flags:
        """Return a mask of the environments at which the next step continues an unfinished episode."""
        running: Flags = self._open[env]
        return running

    def invalidate(self, env: Ints) -> None:
        """Remove the episodes of environments without stored steps."""
        self._open[env], self._headless_end[env] = False, -1

    def clear(self) -> None:
        """Remove all episodes."""
        self._open[:], self._begin[:], self._headless_end[:] = False, 0, -1

    def cells_of(self, env: Ints, position: Ints) -> Ints:
        """Return the cells of steps."""
        return position % self.length * self.num_envs + env

    @property
    def rings(self) -> tuple[int, Ints, Ints]:
        """The rings as kernel argument."""
        return self.length, self._positions, self._valid_from

    def steps_of(self, cells: Ints) -> tuple[Ints, Ints]:
        """Return environments and positions of the steps in cells."""
        return steps_of(cells, self.length, self._positions)

    def _oldest(self, env: Ints) -> Ints:
        return np.maximum(self._positions[env] - self.length, self._valid_from[env])

    def _bounds(self, env: Ints, position: Ints, clip: bool = False) -> tuple[Ints, Ints]:
        begin, end = np.empty(env.shape, np.int64), np.empty(env.shape, np.int64)
        self._query(env, position, clip, False, begin.reshape(-1), end.reshape(-1))
        return begin, end

    def _query(self, env: Ints, position: Ints, clip: bool, to_end: bool, begin: Ints, end: Ints) -> None:
        flat = env.ravel(), position.ravel()
        if not jitted(episode_kernels.checked_episode_bounds)(*flat, self.rings, self.arrays, clip, to_end, begin, end):
            check_steps(*flat, self._oldest(np.arange(self.num_envs)), self._positions)

    @staticmethod
    def _broadcast_arrays(env_ids: Tensor, positions: Tensor) -> tuple[Ints, Ints]:
        env, position = _to_array(env_ids), _to_array(positions)
        if env.shape != position.shape:
            env, position = np.broadcast_arrays(env, position)
            return env.copy(), position.copy()
        return env, position

    def bounds(self, env_ids: Tensor, positions: Tensor, *, clip: bool = True) -> tuple[Tensor, Tensor]:
        """Return first and last position of the episodes of stored steps, in the broadcast shape.

        With ``clip``, a headless episode begins at its oldest stored step instead of its true first position.

        Raises:
            IndexError: a step is not stored, or the environment does not exist.
        """
        begin, end = self._bounds(*self._broadcast_arrays(env_ids, positions), clip)
        return torch.from_numpy(begin), torch.from_numpy(end)

    def begin(self, env_ids: Tensor, positions: Tensor, *, clip: bool = True) -> Tensor:
        """Return the first position of the episodes of stored steps; without ``clip``, it may be overwritten."""
        return self.bounds(env_ids, positions, clip=clip)[0]

    def end(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last position of the episodes of stored steps; the newest position for an unfinished episode."""
        return self.bounds(env_ids, positions)[1]

    def steps_to_end(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return ``end - position``."""
        env, position = self._broadcast_arrays(env_ids, positions)
        remaining = np.empty(env.shape, np.int64)
        self._query(env, position, False, True, NO_INTS, remaining.reshape(-1))
        return torch.from_numpy(remaining)

    def finished(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return a mask of stored steps in episodes that ended with a done flag."""
        end = self.end(env_ids, positions)
        return torch.from_numpy(self._done[self.cells_of(_to_array(env_ids), _to_array(end))])

    def are_first(self, cells: Tensor) -> Tensor:
        """Return a mask, on the CPU, of the filled cells that contain the first step of an episode."""
        env, position = self.steps_of(cells.cpu().numpy())
        return torch.from_numpy(self._bounds(env, position)[0] == position)

    def with_begins(self, is_init: Tensor, cells: Tensor) -> Tensor:
        """Return stored init flags, ``[*cells.shape, ...]``, and set them to true at the first step after a cut."""
        firsts = self.are_first(cells).to(is_init.device)
        return is_init.masked_fill(firsts.view(*firsts.shape, *[1] * (is_init.ndim - firsts.ndim)), 1)

    def state_of(self, cells: Ints | slice) -> dict[str, Any]:
        """Return the state of the index for the filled cells."""
        return {
            "column": self._column[cells],
            "done": self._done[cells],
            "begin": self._begin,
            "open": self._open,
            "headless_end": self._headless_end,
            "has_cuts": self.has_cuts,
        }

    def load_state(self, state: Mapping[str, Any], cells: Ints) -> None:
        """Restore a state that :meth:`state_of` returned for the same cells."""
        self.has_cuts = state["has_cuts"]
        self._column[cells], self._done[cells] = state["column"], state["done"]
        self._begin[:], self._open[:], self._headless_end[:] = state["begin"], state["open"], state["headless_end"]


def _to_array(value: Tensor) -> Ints:
    # Skip a needless conversion, because it costs more than the whole query.
    if not (isinstance(value, Tensor) and value.is_cpu and value.dtype is torch.int64):
        value = torch.as_tensor(value, dtype=torch.int64).cpu()
    return value.numpy()


class FlagsDifferError(ValueError):
    """Raised if one row has different flags, e.g. of several agents, and ``done_reduce`` is None."""


DONE_REDUCTIONS = ("any", "all", None)
NO_INDEX_HINT = (
    "If the rows have different flags of several agents, set done_reduce='any' or 'all' (of the buffer or of its "
    "RingWriter) before anything is written."
)


def reduce_flags(value: Tensor, steps: int, reduce: str | None = None) -> Flags:
    """Reduce the flags of time-major rows, with any trailing shape, to ``[T, M]``.

    Args:
        value: the flags, ``[T * M, ...]``.
        steps: ``T``.
        reduce: ``"any"`` or ``"all"``: how to reduce the flags of a row. None requires equal flags.

    Raises:
        FlagsDifferError: the flags of a row differ, and ``reduce`` is None.
    """
    flag = value.detach() if value.requires_grad else value
    flag = flag if flag.dtype is torch.bool else flag != 0
    array: Flags = (flag if flag.is_cpu else flag.cpu()).contiguous().numpy()
    if array.size > len(array):
        flags = array.reshape(len(array), -1)
        array = np.all(flags, axis=1) if reduce == "all" else np.any(flags, axis=1)
        if reduce is None and (differs := array != np.all(flags, axis=1)).any():
            row = int(differs.argmax())
            raise FlagsDifferError(
                f"done_reduce must be 'any' or 'all' if the flags of a row differ, got None and the flags "
                f"{flags[row].tolist()} in row {row}; nothing was written. Set done_reduce='any' if an episode ends "
                "when the first agent is done, or 'all' if it ends when the last one is (an argument of RingWriter, "
                "ExperienceBuffer and EpisodicReplayBuffer)."
            )
    return array.reshape(steps, -1)
