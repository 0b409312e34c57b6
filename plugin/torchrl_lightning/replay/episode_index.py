"""Begin and end of the episode of every stored step, kept up to date in O(1) per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.kernels import episodes as episode_kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.steps import Flags, Ints, check_steps, steps_between, steps_of

NOTHING: Ints = np.empty(0, np.int64)


class EpisodeIndex:
    """Begin and end position of the episode of every stored step.

    One column holds, for the first step of a finished episode, the position of its last step, and for every other step
    the position of the first one (after ALF's ``keep_episodic_info``). What cannot be written there is kept once per
    environment: the begin of the running episode, and the end of the one episode whose first step was overwritten.

    An episode ends at a step whose done flag is set, or before a step that begins a new one. An unfinished episode ends
    at its newest step; one whose first step was overwritten (headless) begins at the oldest stored step. To ask for a
    step that is not stored is an ``IndexError``.

    Args:
        length: cells of each ring.
        positions: next position of every environment, ``[num_envs]``, shared with the writer.
        floor: positions below are not stored, ``[num_envs]``, shared with the writer.

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

    def __init__(self, length: int, positions: Ints, floor: Ints) -> None:
        self.length = length
        self.num_envs = len(positions)
        self.has_cuts = False
        """Whether episodes may begin where no stored flag tells so."""
        self.attach(positions, floor)
        cells = length * self.num_envs
        self._column: Ints = np.zeros(cells, np.int64)  # untouched pages cost nothing
        self._done: Flags = np.zeros(cells, np.bool_)
        self._begin: Ints = np.zeros(self.num_envs, np.int64)  # of the running (or, if not open, the last) episode
        self._open: Flags = np.zeros(self.num_envs, np.bool_)
        self._headless_end: Ints = np.full(self.num_envs, -1, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return self.packed(self.__dict__)

    def packed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes for a copy, with what is known of the stored steps only."""
        run, position, _ = steps_between(self._oldest(np.arange(self.num_envs)), self._positions - 1)
        cells = self.cells_of(run, position)
        return {**state, "_column": self._column[cells], "_done": self._done[cells], "packed_cells": cells}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cells = state.pop("packed_cells")
        self.__dict__.update(state)
        size = self.length * self.num_envs
        self._column, self._done = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        self._column[cells], self._done[cells] = state["_column"], state["_done"]

    def attach(self, positions: Ints, floor: Ints) -> None:
        """Use the arrays of the writer after they moved."""
        self._positions, self._floor = positions, floor

    @property
    def arrays(self) -> tuple[Ints, Flags, Ints, Flags, Ints]:
        """What :func:`row_kernels.write_steps` keeps up to date."""
        return self._column, self._done, self._begin, self._open, self._headless_end

    def keep_headless_end(self, env: Ints, oldest: Ints) -> None:
        """Remember where episodes end whose first step, which knows it, is about to go; then these are the oldest."""
        survives = (oldest < self._positions[env]) & (oldest > self._oldest(env))
        env, oldest = env[survives], oldest[survives]
        begin, end = self._bounds(env, oldest)
        lost = begin < oldest
        self._headless_end[env[lost]] = end[lost]

    def cut(self, env_ids: Ints | None = None) -> None:
        """End the running episodes at their newest step, unfinished: what comes next does not continue them."""
        env = np.arange(self.num_envs) if env_ids is None else env_ids
        env = env[self._open[env]]
        self.has_cuts = self.has_cuts or bool(env.size)
        begin, newest = self._begin[env], self._positions[env] - 1
        kept = begin >= self._oldest(env)
        self._column[self.cells_of(env[kept], begin[kept])] = newest[kept]
        self._headless_end[env[~kept]] = newest[~kept]
        self._open[env] = False

    def set_flags(self, cells: Ints, done: Flags, begins: Flags, joined: Callable[[Ints], tuple[Flags, Flags]]) -> None:
        """Let episodes follow flags that were replaced in stored steps.

        A border that no flag explains (a cut) stays. Costs as much as there are steps in the episodes around the first
        and the last of the changed steps of an environment.

        Args:
            cells: the steps, ``[n]``, each once.
            done: whether each ends its episode now.
            begins: whether each began one by a flag before.
            joined: returns of cells whether the steps in them begin episodes now, by a flag and by another trajectory
                than that of the step before.
        """
        self.has_cuts = True  # a cut stays where a flag is cleared
        env, position = self.steps_of(cells)
        for e in np.unique(env):
            chosen = env == e
            self._set_flags(int(e), position[chosen], done[chosen], begins[chosen], joined)

    def around(self, cells: Ints) -> Ints:
        """Return the cells of all steps whose episodes may change if flags of stored steps are replaced."""
        env, position = self.steps_of(cells)
        found = [NOTHING]
        for e in np.unique(env):
            steps = np.arange(*self._span(int(e), position[env == e]))
            found.append(self.cells_of(np.full_like(steps, e), steps))
        return np.concatenate(found)

    def _span(self, env: int, position: Ints) -> tuple[int, int]:
        """Return where the episodes of these steps and of their neighbours begin, and the position behind them."""
        oldest, newest = int(self._oldest(np.array([env]))[0]), int(self._positions[env]) - 1
        ends = np.array([max(int(position.min()) - 1, oldest), min(int(position.max()) + 1, newest)])
        begin, end = self._bounds(np.array([env, env]), ends, clip=True)
        return int(begin[0]), int(end[1]) + 1

    def _set_flags(
        self, env: int, position: Ints, done: Flags, begins: Flags, joined: Callable[[Ints], tuple[Flags, Flags]]
    ) -> None:
        low, high = self._span(env, position)
        steps = np.arange(low, high)
        owner, newest = np.full_like(steps, env), int(self._positions[env]) - 1
        cells, (begin, _) = self.cells_of(owner, steps), self._bounds(owner, steps)
        flagged, changed = joined(cells)
        ended_before, began_before = self._done[cells], flagged.copy()
        ended = ended_before.copy()
        ended[position - low], began_before[position - low] = done, begins
        after_end, after_end_before = np.r_[False, ended[:-1]], np.r_[False, ended_before[:-1]]
        was_cut = (begin == steps) & ~after_end_before & ~began_before
        border = after_end | flagged | changed | was_cut
        head = int(begin[0])  # a first step before the stored ones, which a new flag at the oldest replaces
        border[0] = True
        if flagged[0]:
            head = low
        first = np.flatnonzero(border)
        last = np.r_[first[1:], len(steps)] - 1
        running = high - 1 == newest and not ended[-1] and bool(self._open[env] or ended_before[-1])
        number = np.cumsum(border) - 1  # of the episode of each step
        self._column[cells] = np.where(number == 0, head, steps[first][number])
        self._done[cells] = ended
        closed = np.ones(len(first), np.bool_)
        closed[-1] = not running
        if head < low:
            if closed[0]:
                self._headless_end[env] = steps[last[0]]
            closed[0] = False
        self._column[cells[first[closed]]] = steps[last[closed]]
        if high - 1 == newest:
            self._open[env] = running
            self._begin[env] = head if len(first) == 1 else steps[first[-1]]

    def is_running(self, env: Ints) -> Flags:
        """Return whether the next steps of environments continue an episode."""
        found: Flags = self._open[env]
        return found

    def forget(self, env: Ints) -> None:
        """Forget the episodes of environments of which nothing is stored any more."""
        self._open[env], self._headless_end[env] = False, -1

    def clear(self) -> None:
        """Forget everything."""
        self._open[:], self._begin[:], self._headless_end[:] = False, 0, -1

    def cells_of(self, env: Ints, position: Ints) -> Ints:
        """Return the cells of steps."""
        return position % self.length * self.num_envs + env

    @property
    def rings(self) -> tuple[int, Ints, Ints]:
        """The rings as kernels get them."""
        return self.length, self._positions, self._floor

    def steps_of(self, cells: Ints) -> tuple[Ints, Ints]:
        """Return environments and positions of the steps in cells."""
        return steps_of(cells, self.length, self._positions)

    def _oldest(self, env: Ints) -> Ints:
        return np.maximum(self._positions[env] - self.length, self._floor[env])

    def _bounds(self, env: Ints, position: Ints, clip: bool = False) -> tuple[Ints, Ints]:
        begin, end = np.empty(env.shape, np.int64), np.empty(env.shape, np.int64)
        self._look(env, position, clip, False, begin.reshape(-1), end.reshape(-1))
        return begin, end

    def _look(self, env: Ints, position: Ints, clip: bool, relative: bool, begin: Ints, end: Ints) -> None:
        flat = env.ravel(), position.ravel()
        if not jitted(episode_kernels.bounds)(*flat, self.rings, self.arrays, clip, relative, begin, end):
            check_steps(*flat, self._oldest(np.arange(self.num_envs)), self._positions)

    @staticmethod
    def _arrays(env_ids: Tensor, positions: Tensor) -> tuple[Ints, Ints]:
        env, position = _array(env_ids), _array(positions)
        if env.shape != position.shape:
            env, position = np.broadcast_arrays(env, position)
            return env.copy(), position.copy()
        return env, position

    def bounds(self, env_ids: Tensor, positions: Tensor, *, clip: bool = True) -> tuple[Tensor, Tensor]:
        """Return first and last position of the episodes of stored steps, of the broadcast shape.

        With ``clip``, headless episodes begin at their oldest stored step instead of where they really began.

        Raises:
            IndexError: A step is not stored, or there is no such environment.
        """
        begin, end = self._bounds(*self._arrays(env_ids, positions), clip)
        return torch.from_numpy(begin), torch.from_numpy(end)

    def begin(self, env_ids: Tensor, positions: Tensor, *, clip: bool = True) -> Tensor:
        """Return the first position of the episodes of stored steps; without ``clip``, be it before the oldest step."""
        return self.bounds(env_ids, positions, clip=clip)[0]

    def end(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last position of the episodes of stored steps; the newest one if the episode is not finished."""
        return self.bounds(env_ids, positions)[1]

    def steps_to_end(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return ``end - position``."""
        env, position = self._arrays(env_ids, positions)
        left = np.empty(env.shape, np.int64)
        self._look(env, position, False, True, NOTHING, left.reshape(-1))
        return torch.from_numpy(left)

    def finished(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return whether the episodes of stored steps ended with a done flag."""
        end = self.end(env_ids, positions)
        return torch.from_numpy(self._done[self.cells_of(_array(env_ids), _array(end))])

    def are_first(self, cells: Tensor) -> Tensor:
        """Return whether the steps in filled cells are the first ones of their episodes, on the CPU."""
        env, position = self.steps_of(cells.cpu().numpy())
        return torch.from_numpy(self._bounds(env, position)[0] == position)

    def with_begins(self, is_init: Tensor, cells: Tensor) -> Tensor:
        """Return stored flags of beginnings, ``[*cells.shape, ...]``, set also where a cut began an episode."""
        firsts = self.are_first(cells).to(is_init.device)
        return is_init.masked_fill(firsts.view(*firsts.shape, *[1] * (is_init.ndim - firsts.ndim)), 1)

    def known_of(self, where: Ints | slice) -> dict[str, Any]:
        """Return what is known about cells, the filled ones, for a state."""
        return {
            "column": self._column[where],
            "done": self._done[where],
            "begin": self._begin,
            "open": self._open,
            "headless_end": self._headless_end,
            "has_cuts": self.has_cuts,
        }

    def learn(self, known: Mapping[str, Any], where: Ints) -> None:
        """Take over what :meth:`known_of` returned for the same cells."""
        self.has_cuts = known["has_cuts"]
        self._column[where], self._done[where] = known["column"], known["done"]
        self._begin[:], self._open[:], self._headless_end[:] = known["begin"], known["open"], known["headless_end"]


def _array(value: Tensor) -> Ints:
    # Where there is nothing to convert, converting costs more than the answer.
    if not (isinstance(value, Tensor) and value.is_cpu and value.dtype is torch.int64):
        value = torch.as_tensor(value, dtype=torch.int64).cpu()
    return value.numpy()


class FlagsDifferError(ValueError):
    """The flags of a row, such as those of several agents, differ, and ``done_reduce`` is None."""


DONE_REDUCTIONS = ("any", "all", None)
NO_INDEX_HINT = (
    "If the rows have different flags of several agents, set done_reduce='any' or 'all' (of the buffer or of its "
    "RingWriter) before anything is written."
)


def flag_of(value: Tensor, steps: int, reduce: str | None = None) -> Flags:
    """Reduce a flag of time-major rows, whatever its trailing shape, to ``[T, M]``.

    Args:
        value: the flags, ``[T * M, ...]``.
        steps: ``T``.
        reduce: ``"any"`` or ``"all"`` of the flags of a row; None if they must not differ.

    Raises:
        FlagsDifferError: the flags of a row differ, and it is not said how to reduce them.
    """
    flag = value.detach() if value.requires_grad else value
    flag = flag if flag.dtype is torch.bool else flag != 0
    array: Flags = (flag if flag.is_cpu else flag.cpu()).contiguous().numpy()
    if array.size > len(array):
        flags = array.reshape(len(array), -1)
        array = np.all(flags, axis=1) if reduce == "all" else np.any(flags, axis=1)
        if reduce is None and (wrong := array != np.all(flags, axis=1)).any():
            row = int(wrong.argmax())
            raise FlagsDifferError(
                f"done_reduce must be 'any' or 'all' if the flags of a row differ, got None and the flags "
                f"{flags[row].tolist()} in row {row}; nothing was written. Set done_reduce='any' if an episode ends "
                "when the first agent is done, or 'all' if it ends when the last one is (an argument of RingWriter, "
                "ExperienceBuffer and EpisodicReplayBuffer)."
            )
    return array.reshape(steps, -1)
