"""A ring over a storage that TorchRL's round-robin writers fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import last_written
from torchrl_lightning.replay.checks import check_flat_state
from torchrl_lightning.replay.episode_index import EpisodeIndex, Flags, flag_of
from torchrl_lightning.replay.rings import Rings

COLLECTOR_KEY = ("collector", "traj_ids")


class WriteOrder:
    """Whether cells are written one after the other, before anything else is known of the storage.

    Example:
        >>> order = WriteOrder()
        >>> order.note(torch.arange(3))
        >>> order.note(1)
        >>> order.check()
        Traceback (most recent call last):
        ValueError: The cells were not written one after the other, ...
    """

    def __init__(self) -> None:
        self._next: int | None = None
        self._scattered = False

    def note(self, index: int | Tensor) -> None:
        """Record which cells were written."""
        cells = torch.as_tensor(index).reshape(-1)
        if len(cells):
            first, last = int(cells[0]), int(cells[-1])
            self._scattered |= self._next is not None and first not in (self._next, 0)
            self._scattered |= last - first > len(cells) - 1
            self._next = last + 1

    def check(self) -> None:
        """Refuse cells in another order.

        Raises:
            ValueError: cells were written in between.
        """
        if self._scattered:
            raise _scattered()


def _scattered() -> ValueError:
    return ValueError(
        "The cells were not written one after the other, so that neighbours are not successive steps; "
        "use a round-robin writer or RingWriter."
    )


class FlatRing(Rings):
    """One ring over a flat storage, which follows its writer: only new cells are read.

    Args:
        length: cells of the storage.
        end_key: flag that ends an episode.
        traj_key: number of the trajectory; where it changes, one ends. Without it, the storage must hold one
            environment.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> storage = LazyTensorStorage(4)
        >>> done = torch.tensor([0, 1, 0], dtype=torch.bool).unsqueeze(-1)
        >>> storage.set(range(3), TensorDict({"next": {"done": done}}, [3]))
        >>> ring = FlatRing(4, ("next", "done"), None)
        >>> ring.follow(storage)
        >>> ring.index.steps_to_end(torch.zeros(3, dtype=torch.long), torch.arange(3)).tolist()
        [1, 0, 0]
    """

    index: EpisodeIndex

    def __init__(self, length: int, end_key: NestedKey, traj_key: NestedKey | None) -> None:
        super().__init__(1, length)
        self.end_key, self.traj_key = end_key, traj_key
        self.index = EpisodeIndex(length, self._positions, self._floor)
        self.clear()

    def clear(self) -> None:
        """Forget everything, as the emptied storage has."""
        self._restart(0)
        self._pending = 0  # cells written, but not read yet
        self._scattered = False

    def _restart(self, position: int) -> None:
        self._positions[:] = self._floor[:] = position
        self.index.clear()
        self._last_id: int | None = None
        self._last_done = True
        self._refresh()

    def note(self, index: int | Tensor) -> None:
        """Record which cells were written."""
        cells = torch.as_tensor(index).reshape(-1)
        written = int(self._positions[0]) + self._pending
        if not len(cells) or not written:  # nothing followed yet: the storage is looked through anyway
            return
        first, last = int(cells[0]), int(cells[-1])
        self._scattered |= first != written % self.length or last != (first + len(cells) - 1) % self.length
        self._pending += len(cells)

    def follow(self, storage: Storage) -> None:
        """Read what was written since the last call; everything, the first time.

        Raises:
            ValueError: the cells were not written one after the other, it is unknown which is the oldest, or there are
                several environments and no ``traj_key``.
            KeyError: the ``end_key`` is not in the data.
            TypeError: the storage holds no TensorDict.
        """
        stored, position = len(storage), int(self._positions[0])
        if self._scattered:
            raise _scattered()
        if min(position + self._pending - int(self._floor[0]), self.length) != stored:
            newest = last_written(storage)
            if newest not in (None, stored - 1) and stored < self.length:
                raise _scattered()
            if stored == self.length and newest is None:
                raise ValueError(
                    "The storage is full, and does not know which cell was written last (TorchRL's do not save it), so "
                    "that windows could join the newest to the oldest steps. Restore the sampler with its storage, "
                    "fill the buffer anew, or use RingStorage and RingWriter."
                )
            oldest = (int(newest or 0) + 1) % self.length if stored == self.length else 0
            self._restart(oldest)
            self._pending = stored
        elif self._pending > self.length:
            self._restart(position + self._pending - self.length)
            self._pending = self.length
        position, pending = int(self._positions[0]), self._pending
        while pending:
            slot = position % self.length
            count = min(pending, self.length - slot)
            self._take(storage.get(slice(slot, slot + count)), count)
            position, pending = position + count, pending - count
        self._pending = 0

    def _take(self, rows: Any, count: int) -> None:
        if not isinstance(rows, TensorDictBase):
            raise TypeError(f"Sequences are read from storages of TensorDicts, this one holds a {type(rows).__name__}.")
        done, init = rows.get(self.end_key, None), rows.get("is_init", None)
        ids = self._ids_of(rows)
        if done is None and ids is None:
            raise KeyError(f"The data has no entry {self.end_key!r}; name the flag that ends an episode by end_key=.")
        ends: Flags = np.zeros((count, 1), np.bool_) if done is None else flag_of(done, count)
        starts: Flags | None = None if init is None else flag_of(init, count)
        if ids is not None:
            changes = np.empty((count, 1), np.bool_)
            changes[1:, 0] = ids[1:] != ids[:-1]
            changes[0, 0] = self._last_id is not None and ids[0] != self._last_id
            if self.traj_key is None:
                self._check_single(changes, ends, starts)
            else:
                starts = changes if starts is None else starts | changes
            self._last_id = int(ids[-1])
        self._last_done = bool(ends[-1, 0])
        self.index.write(None, ends, starts)
        self._positions += count
        self._refresh()

    def _ids_of(self, rows: TensorDictBase) -> Any:
        ids = rows.get(COLLECTOR_KEY if self.traj_key is None else self.traj_key, None)
        if ids is None:
            if self.traj_key is not None:
                raise KeyError(f"The data has no entry {self.traj_key!r}; name the trajectory's number by traj_key=.")
            return None
        return ids.detach().cpu().numpy().reshape(len(rows), -1)[:, 0]

    def _check_single(self, changes: Flags, ends: Flags, starts: Flags | None) -> None:
        expected = np.empty_like(ends)
        expected[1:] = ends[:-1]
        expected[0] = self._last_done
        if (changes & ~(expected if starts is None else expected | starts)).any():
            raise ValueError(
                "The storage holds steps of several environments: trajectory numbers change where no episode ended. "
                f"Give traj_key={COLLECTOR_KEY!r}, or keep a ring per environment (RingStorage, "
                "RingWriter(num_envs=...))."
            )

    def state_dict(self) -> dict[str, Any]:
        """Copy of what is known: tensors and scalars."""
        return {
            "length": self.length,
            "positions": self.positions.clone(),
            "floor": torch.from_numpy(self._floor.copy()),
            "pending": self._pending,
            "last_id": self._last_id,
            "last_done": self._last_done,
            "index": self.index.state_dict(self.filled_cells()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: of a storage with another number of cells.
        """
        check_flat_state(state_dict)
        if state_dict["length"] != self.length:
            raise ValueError(f"The state is of {state_dict['length']} cells, the storage has {self.length}.")
        self.clear()
        self._positions[:] = state_dict["positions"].numpy()
        self._floor[:] = state_dict["floor"].numpy()
        self._refresh()
        self._pending, self._last_id = int(state_dict["pending"]), state_dict["last_id"]
        self._last_done = bool(state_dict["last_done"])
        self.index.load_state_dict(state_dict["index"], self.filled_cells())
