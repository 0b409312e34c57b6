"""The steps of several environments in one flat array of cells."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.rows import write_steps
from torchrl_lightning.ranges import optional
from torchrl_lightning.replay import processes
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.steps import Flags, Ints, StepsMissing, steps_between
from torchrl_lightning.replay.successors import SuccessorCheck
from torchrl_lightning.state import (
    LARGEST,
    Attribute,
    Child,
    InPlace,
    Stated,
    check_state,
    flag,
    mapping,
    tensor,
    whole,
)

EVERYTHING = np.iinfo(np.int64).max
_FIRST_VERSIONS = itertools.count(1)  # no two rings of a process ever have the same version
NO_INDEX = (*(np.empty(0, kind) for kind in (np.int64, np.bool_, np.int64, np.bool_, np.int64)),)


class Rings(processes.Owned, Stated):
    """One ring per environment: ``cell = (position % length) * num_envs + env``.

    Args:
        num_envs: number of rings.
        length: number of cells of each.

    Examples:
        >>> rings = Rings(2, 4)
        >>> rings.cell(torch.tensor([0, 1]), torch.tensor([5, 5])).tolist()
        [2, 3]
    """

    OWNER, VERSION = "writer", 5
    STATE = {
        "num_envs": Attribute(),
        "length": Attribute(),
        "positions": InPlace(at="_positions", low=0, high=LARGEST),
        "oldest": Attribute(of=lambda rings: tensor(torch.int64, rings.num_envs, low=0, high=LARGEST)),
        "era": Attribute(whole()),
        "write_count": Attribute(whole()),
        "index": Attribute(optional(mapping), "_episodes"),
        "successors": Child(),
    }

    def __init__(self, num_envs: int, length: int = 0) -> None:
        self.own()
        self.num_envs, self.length = num_envs, length
        self.index: EpisodeIndex | None = None
        """Which steps belong to one episode, if that is known."""
        self.count = 0
        """How many steps are stored."""
        self._positions: Ints = np.zeros(num_envs, np.int64)
        self._floor: Ints = np.zeros(num_envs, np.int64)  # nothing is stored below
        # Rows written; an era, which grows when the rings start again, so that stamps never repeat; and the version.
        self._counters: Ints = np.zeros(3, np.int64)
        self._counters[2] = next(_FIRST_VERSIONS) << 40
        self.successors = SuccessorCheck()
        """Which entries of the rows tell where a trajectory was cut without a flag."""
        self.reloaded: Flags | None = None
        """Environments that were loaded and not written since, ``[num_envs]``; None if there are none."""
        self._aligned = self._even = True  # whether all positions are the same; whether the first cells are the filled
        self._ids: Ints = np.arange(num_envs)

    @classmethod
    def at(cls, length: int, positions: Tensor, oldest: Tensor | None = None) -> Rings:
        """Build rings whose next positions are ``positions``, ``[num_envs]``."""
        rings = cls(len(positions), length)
        rings._positions[:] = positions.cpu().numpy()
        if oldest is not None:
            rings._floor[:] = oldest.cpu().numpy()
        rings._refresh()
        return rings

    # ------------------------------------------------------------------ reading

    @property
    def ids(self) -> Ints:
        """All environments."""
        return self._ids

    @property
    def positions(self) -> Tensor:
        """Next position of every environment, ``[num_envs]`` int64; a live view that must not be written to."""
        return torch.from_numpy(self._positions)

    @property
    def oldest(self) -> Tensor:
        """Position of the oldest stored step of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._oldest())

    @oldest.setter
    def oldest(self, positions: Tensor) -> None:
        self._floor[:] = positions.numpy()

    @property
    def arrays(self) -> tuple[Ints, Ints]:
        """Next position of every environment, and below which one nothing is stored, each ``[num_envs]``; live."""
        return self._positions, self._floor

    @property
    def filled(self) -> Tensor:
        """Number of stored steps of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._positions - self._oldest())

    @property
    def is_even(self) -> bool:
        """Whether all rings are equally filled, so that the first ``count`` cells are the filled ones."""
        return self._even

    @property
    def is_aligned(self) -> bool:
        """Whether all environments are at the same position."""
        return self._aligned

    @property
    def era(self) -> int:
        """What the positions of earlier starts add to stamps."""
        return self._counters.item(1)

    @era.setter
    def era(self, value: int) -> None:
        self._counters[1] = value

    @property
    def write_count(self) -> int:
        """Rows written since the rings were emptied."""
        return self._counters.item(0)

    @write_count.setter
    def write_count(self, value: int) -> None:
        self._counters[0] = value

    @property
    def version(self) -> int:
        """Number that increases with every change that may move the border of an episode or remove a cell.

        Such changes are writes, removals, cuts, loads, and flags that are replaced in stored steps. A cached set of
        cells or steps is valid as long as the version stays the same.
        """
        return self._counters.item(2)

    def _oldest(self) -> Ints:
        return np.maximum(self._positions - self.length, self._floor)

    def cell(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the cells of steps: ``(position % length) * num_envs + env``."""
        return positions % self.length * self.num_envs + env_ids

    def env_of(self, index: Tensor) -> Tensor:
        """Return the environments that cells belong to."""
        return index % self.num_envs

    def position_of(self, index: Tensor) -> Tensor:
        """Return the positions of the steps in cells; below ``oldest`` (or negative) where a cell holds nothing."""
        slot = torch.div(index, self.num_envs, rounding_mode="floor")
        newest = int(self._positions[0]) - 1 if self._aligned else self.positions[index % self.num_envs] - 1
        return newest - (newest - slot) % self.length

    def is_filled(self, index: Tensor) -> Tensor:
        """Return whether cells hold a step."""
        index = index.cpu()
        inside = (index >= 0) & (index < self.length * self.num_envs)
        index = index.clamp(0, self.length * self.num_envs - 1)
        return inside & (self.position_of(index) >= self.oldest[index % self.num_envs])

    def filled_cells(self) -> Tensor:
        """Return all cells that hold a step, in ascending order."""
        if self.is_even:
            return torch.arange(self.count)
        cells = torch.arange(self.length * self.num_envs)
        return cells[self.is_filled(cells)]

    def has_room(self, env: Ints, steps: int) -> Flags:
        """Return for which environments so many steps can be written without overwriting any."""
        return self._positions[env] + steps - self._oldest()[env] <= self.length

    def cells_of_next(self, env: Ints, steps: int) -> Tensor:
        """Return the cells that the next steps of environments go to, time-major ``[steps * M]``."""
        position = self._positions[env] + np.arange(steps)[:, None]
        return torch.from_numpy(position % self.length * self.num_envs + env).reshape(-1)

    # ------------------------------------------------------------------ stamps

    def stamp(self, index: Tensor) -> Tensor:
        """Return how far the ring of each cell is written, over all restarts; of the shape of ``index``."""
        if not self._aligned:
            return self.snapshot()[index.cpu() % self.num_envs]
        stamps = np.empty(tuple(index.shape), np.int64)
        stamps.fill(self._positions.item(0) + self._counters.item(1))
        return torch.from_numpy(stamps)

    def snapshot(self) -> Tensor:
        """Return how far every ring is written, over all restarts, ``[num_envs]``; a copy."""
        return self.positions + self.era

    def is_unchanged(self, index: Tensor, stamp: Tensor) -> Tensor:
        """Return whether cells still hold what they held when they were stamped."""
        return self.is_filled(index) & (self.position_of(index) + self.era < stamp)

    # ------------------------------------------------------------------ writing

    def before(self, env: Any, below: Any = EVERYTHING) -> None:
        """Get ready to change environments; called before anything changes.

        Args:
            env: the environments.
            below: only steps before these positions are changed.

        Raises:
            RuntimeError: another process made the rings.
        """
        if self._process != processes.current:
            self.check_owner()

    def after(self) -> None:
        """Take note that something has changed."""

    def write(self, leaves: tuple[Ints, Ints], ids: Ints | None, steps: int, done: Flags, init: Flags) -> Ints:
        """Write steps, move the positions past them, and record their episodes: all of it or nothing.

        Args:
            leaves: where rows and cells lie (:meth:`Cells.match`); empty for rows that are in their cells already.
            ids: the environments, or None for all.
            steps: how many of each.
            done: whether a step ends its episode, ``[steps, M]``; empty where there is no episode index.
            init: whether a step begins one, ``[steps, M]``; may be empty.

        Returns:
            The cells, ``[steps * M]``.
        """
        env, together = (self._ids, self._aligned) if ids is None else (ids, False)
        self.before(env)
        cells = np.empty(steps * len(env), np.int64)
        jitted(write_steps)(
            *leaves, cells, env, together, steps, self.length, self._positions, self._floor, self._counters,
            NO_INDEX if self.index is None else self.index.arrays, done, init,
        )  # fmt: skip
        if together and self._even:
            self.count = min(self._positions.item(0), self.length) * self.num_envs
        else:
            self._refresh()
        self.after()
        return cells

    def claim(self, env: Ints, steps: int) -> None:
        """Let the cells that the next steps go to leave the rings, so that nobody reads a row while it is written."""
        self.before(env)
        positions = self._positions[env]
        oldest = np.clip(positions + steps - self.length, self._floor[env], positions)
        if self.index is not None:
            self.index.keep_headless_end(env, oldest)
        self._floor[env] = oldest
        self._counters[2] += 1
        self._refresh()

    def drop(self, env: Ints, count: int | None) -> Tensor:
        """Take the oldest steps of environments out, or all; return their cells, one environment after the other."""
        oldest = self._oldest()[env]
        held = self._positions[env] - oldest
        if count is not None and int(held.min()) < count:
            few = int(env[held.argmin()])
            raise StepsMissing(f"Cannot take out {count} steps of each environment: {few} holds {int(held.min())}.")
        end = oldest + (held if count is None else count)
        run, position, _ = steps_between(oldest, end - 1)
        self.before(env, end)
        if self.index is not None:
            self.index.keep_headless_end(env, end)
        self._floor[env] = end
        self._counters[2] += 1
        self._refresh()
        self.after()
        return torch.from_numpy(position % self.length * self.num_envs + env[run])

    def cut(self, env: Ints) -> None:
        """End the running episodes of environments: the next steps do not continue them."""
        if self.index is not None:
            self.before(env)
            self.index.cut(env)
            self._counters[2] += 1

    def set_flags(self, cells: Ints, done: Flags, begins: Flags, joined: Callable[[Ints], tuple[Flags, Flags]]) -> None:
        """Let the episodes follow flags that were replaced in stored steps; see :meth:`EpisodeIndex.set_flags`."""
        if self.index is not None:
            env = cells % self.num_envs
            self.before(env)
            self.index.set_flags(cells, done, begins, joined)
            self._counters[2] += 1
            self.after()

    def clear(self) -> None:
        """Start again."""
        self.before(self._ids)
        self.reloaded = None
        self._counters[1] += self._positions.max()
        self._counters[2] += 1
        self._positions[:] = self._floor[:] = 0
        self._refresh()
        if self.index is not None:
            self.index.clear()
        self.after()

    def make_index(self) -> None:
        """Keep an index of episodes from now on."""
        self.check_maker()
        self.index = EpisodeIndex(self.length, self._positions, self._floor)

    def drop_index(self) -> None:
        """Keep no index of episodes any more, because nothing tells where they end."""
        self.check_owner()
        if self.is_shared:
            raise RuntimeError("Episodes of a buffer that other processes share are tracked until it ends.")
        self.index = None
        self._counters[2] += 1

    def go_on_from(self, other: Rings) -> None:
        """Give the steps to come the numbers of those that other rings hold, from the oldest on."""
        oldest = other._oldest()
        first = oldest.min()
        self._positions[:] = self._floor[:] = oldest - first
        self._counters[1] = other.era + first
        self._counters[2] += 1
        self.successors = other.successors
        self._refresh()

    def _refresh(self) -> None:
        first, oldest = self._positions[0], self._oldest()
        filled = self._positions - oldest
        self.count = int(filled.sum())
        self._aligned = bool((self._positions == first).all())
        self._even = self.count == self.length * self.num_envs or (self._aligned and not oldest.any())

    # ------------------------------------------------------------------ state

    def read_state(self, state_dict: Any) -> dict[str, Any]:
        """Check a state, unless other processes are using the rings."""
        self.check_loadable()
        return super().read_state(state_dict)

    @property
    def _episodes(self) -> dict[str, Any] | None:
        where = slice(self.count) if self.is_even else self.filled_cells().numpy()
        return None if self.index is None else self.index.known_of(where)

    @_episodes.setter
    def _episodes(self, known: Mapping[str, Any] | None) -> None:
        self._refresh()
        self.index = None
        if known is not None:
            self.make_index()
            assert self.index is not None
            self.index.learn(known, self.filled_cells().numpy())

    def _check_together(self, values: Mapping[str, Any]) -> None:
        """Refuse an index by which an episode holds steps that are not its own."""
        positions, oldest, index = (values[entry] for entry in ("positions", "oldest", "index"))
        rings = Rings.at(self.length, positions, oldest)
        if not rings.oldest.equal(oldest) or bool((rings.filled < 0).any()):
            raise ValueError("The writer state is foreign: its oldest steps cannot be stored.")
        if index is None:
            return
        cells, envs, newest = rings.filled_cells(), rings.num_envs, rings.positions - 1
        env = rings.env_of(cells)
        schema = {
            "column": tensor(torch.int64, len(cells), low=0, high=newest[env]),
            "done": tensor(torch.bool, len(cells)),
            "begin": tensor(torch.int64, envs, low=0, high=newest.clamp(min=0)),
            "open": tensor(torch.bool, envs),
            "headless_end": tensor(torch.int64, envs, low=-1, high=newest.clamp(min=-1)),
            "has_cuts": flag,
        }
        known = check_state(index, schema, "episode index")
        column, position = known["column"], rings.position_of(cells)
        begin = torch.where(column >= position, position, column)
        at_begin = torch.searchsorted(cells, rings.cell(env, begin)).clamp(max=max(len(cells) - 1, 0))
        end = torch.where(begin >= rings.oldest[env], column[at_begin], known["headless_end"][env])
        running = known["open"][env] & (begin == known["begin"][env])
        end = torch.where(running, newest[env], end)
        if not (end >= position).all():
            raise ValueError("The episode index state is foreign: it holds steps behind the end of their episode.")

    def _loaded(self) -> None:
        self._counters[2] += 1
        self.reloaded = np.ones(self.num_envs, np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        self.check_travel()
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.own()
        if self.index is not None:
            self.index.attach(self._positions, self._floor)


class HasRings(Protocol):
    """What fills the rings in a storage: a :class:`RingWriter`."""

    rings: Rings

    def plan_rewrite(self, changes: Mapping[tuple[str, ...], Tensor], cells: Tensor) -> Callable[[], None]:
        """Check entries that are about to be replaced; return what lets the episodes follow them afterwards."""
        ...


class Dependent(Protocol):
    """A part that derives a stored entry from others."""

    def refresh(self, cells: Ints) -> None:
        """Derive it again for stored steps: all those of the episodes in which an entry was replaced."""
        ...


class _Link:
    """A weak reference that a copy of its owner does not take along."""

    def __init__(self, writer: HasRings | None = None) -> None:
        self.writer = (lambda: None) if writer is None else weakref.ref(writer)

    def __reduce__(self) -> Any:
        return _Link, ()


def lay_rings(storage: Storage, writer: HasRings) -> None:
    """Let it be known whose rings lie in a storage, ours or one of TorchRL's, which does not keep them alive."""
    storage.rings_link = _Link(writer)


def filler_of(storage: Storage) -> HasRings | None:
    """Return what fills the rings in a storage, if there are any."""
    link = getattr(storage, "rings_link", None)
    return None if link is None else link.writer()


def rings_in(storage: Storage) -> Rings | None:
    """Return the rings that lie in a storage, if there are any."""
    writer = filler_of(storage)
    return None if writer is None else writer.rings


def uneven_rings(storage: Storage) -> Rings | None:
    """Return the rings in a storage, unless its filled cells are simply the first ``len(storage)`` ones."""
    writer = filler_of(storage)
    return None if writer is None or writer.rings.is_even else writer.rings


def stored_cells(storage: Storage) -> Tensor:
    """Return all cells that hold something, in ascending order: ``O(capacity)``."""
    rings = uneven_rings(storage)
    return torch.arange(len(storage)) if rings is None else rings.filled_cells()


def check_single(rings: Rings | None) -> None:
    """Validate that neighbouring cells are successive steps; raise RuntimeError if there are several rings."""
    if rings is not None and rings.num_envs > 1:
        raise RuntimeError(
            f"The cells of {rings.num_envs} environments are interleaved, so that TorchRL's slice samplers "
            "and sequences would mix them; use SequenceSampler of torchrl_lightning."
        )


def refuse_uneven(rings: Rings | None, reader: str) -> None:
    """Raise RuntimeError for a reader that cannot read these unevenly filled rings, if there are any."""
    if rings is not None:
        raise RuntimeError(
            f"{reader} cannot read unevenly filled rings ({rings.filled.tolist()} steps of {rings.num_envs} "
            "environments); use UniformSampler, PrioritizedSampler or SequenceSampler of torchrl_lightning."
        )
