"""The writer of every replay buffer: one ring per environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import WriterBase, entries_of
from torchrl_lightning.replay.episode_index import EpisodeIndex, Flags, Ints
from torchrl_lightning.replay.storage import RingStorage

STATE_VERSION = 1


class RingWriter(WriterBase):
    """Writes one ring per environment into one flat storage.

    Every environment has its own cursor and an ever-increasing position; ``cell = (position % length) * num_envs + env``.
    So one step of all environments is one slice copy, an even write at most two, and a write for some environments one
    indexed copy. While the rings are evenly filled, TorchRL's samplers see an ordinary storage.

    Args:
        num_envs: number of rings; must divide the storage's ``max_size``.
        track_episodes: keep an :class:`EpisodeIndex`; None does so if the first data hold ``done_key``.
        done_key: the flag that ends an episode.
        init_key: the flag that begins one, used where the data hold it: an episode that was cut without being done
            (a restart) does not continue in the next one.

    Raises:
        ValueError: ``num_envs`` is not positive.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(8), num_envs=2)
        >>> buffer.extend(TensorDict({"a": torch.arange(2)}, [2])).tolist()
        [0, 1]
        >>> buffer.extend(TensorDict({"a": torch.arange(1)}, [1]), env_ids=torch.tensor([1])).tolist()
        [3]
        >>> buffer.writer.positions.tolist()
        [1, 2]
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        track_episodes: bool | None = None,
        done_key: NestedKey = ("next", "done"),
        init_key: NestedKey = "is_init",
    ) -> None:
        super().__init__()
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}.")
        self.num_envs = num_envs
        self.length = 0
        self.track_episodes = track_episodes
        self.done_key = unravel_key(done_key if isinstance(done_key, str) else tuple(done_key))
        self.init_key = unravel_key(init_key if isinstance(init_key, str) else tuple(init_key))
        self.index: EpisodeIndex | None = None
        self._positions: Ints = np.zeros(num_envs, np.int64)
        self._floor: Ints = np.zeros(num_envs, np.int64)
        self._common: int | None = 0  # the position of all environments, while it is one
        self._even = True
        self._ids = np.arange(num_envs)

    def register_storage(self, storage: Storage) -> None:
        """Take the storage to fill; called by TorchRL's buffers.

        Raises:
            ValueError: its ``max_size`` is not a multiple of ``num_envs``, or it has several dimensions.
        """
        if getattr(storage, "ndim", 1) != 1:
            raise ValueError(f"RingWriter fills one-dimensional storages, got ndim={storage.ndim}; use RingStorage.")
        if storage.max_size % self.num_envs:
            below = storage.max_size // self.num_envs * self.num_envs
            raise ValueError(
                f"max_size={storage.max_size} is not a multiple of num_envs={self.num_envs}, so that the rings cannot "
                f"be equally long; use max_size={below or self.num_envs} or {below + self.num_envs}."
            )
        super().register_storage(storage)
        self.length = storage.max_size // self.num_envs
        if isinstance(storage, RingStorage):
            storage.set_writer(self)

    # ------------------------------------------------------------------ where things are

    @property
    def positions(self) -> Tensor:
        """Next position of every environment, ``[num_envs]`` int64; a live view, do not write to it."""
        return torch.from_numpy(self._positions)

    @property
    def oldest(self) -> Tensor:
        """Position of the oldest stored step of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._oldest())

    @property
    def filled(self) -> Tensor:
        """Stored steps of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._positions - self._oldest())

    @property
    def is_even(self) -> bool:
        """Whether all rings are equally filled, so that the first ``len(storage)`` cells are the filled ones."""
        return self._even

    def _oldest(self) -> Ints:
        return np.maximum(self._positions - self.length, self._floor)

    def cell(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Cells of steps: ``(position % length) * num_envs + env``."""
        return positions % self.length * self.num_envs + env_ids

    def env_of(self, index: Tensor) -> Tensor:
        """Environments that cells belong to."""
        return index % self.num_envs

    def position_of(self, index: Tensor) -> Tensor:
        """Positions of what cells hold now; below ``oldest`` (or negative) where a cell holds nothing."""
        slot = torch.div(index, self.num_envs, rounding_mode="floor")
        newest = (self._common - 1) if self._common is not None else self.positions[index % self.num_envs] - 1
        return newest - (newest - slot) % self.length

    def is_filled(self, index: Tensor) -> Tensor:
        """Whether cells hold a step."""
        index = index.cpu()
        inside = (index >= 0) & (index < self.length * self.num_envs)
        index = index.clamp(0, self.length * self.num_envs - 1)
        return inside & (self.position_of(index) >= self.oldest[index % self.num_envs])

    def filled_cells(self) -> Tensor:
        """All cells that hold a step, in ascending order."""
        if self._even:
            return torch.arange(int((self._positions - self._oldest()).sum()))
        cells = torch.arange(self.length * self.num_envs)
        return cells[self.is_filled(cells)]

    # ------------------------------------------------------------------ writing

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one row; with several environments, one step of all of them (``[num_envs]``)."""
        if data.ndim:
            return self.extend(data)
        return int(self.extend(data.unsqueeze(0)))

    def extend(self, data: TensorDictBase, env_ids: Tensor | None = None) -> Tensor:
        """Write steps.

        Args:
            data: one step of every environment ``[num_envs]``, or several, time-major: ``[T * num_envs]``. With one
                environment: ``[T]``.
            env_ids: whose steps these are, each at most once; ``data`` is ``[len(env_ids)]`` or
                ``[T * len(env_ids)]``.

        Returns:
            The cells, ``[n]``. Rows that more than ``length`` later ones overwrote at once are not written; their cell
            is that of the row which replaced them.

        Raises:
            ValueError: another schema than what is stored, or a number of rows that does not fit the environments.
        """
        ids = None if env_ids is None else self._check_ids(env_ids)
        width = self.num_envs if ids is None else len(ids)
        rows = data.shape[0] if data.ndim == 1 else -1
        if rows < 1 or rows % width:
            raise ValueError(
                f"Got data of batch size {list(data.shape)} for {width} environments; expected [{width}] (one step of "
                f"each) or a multiple of it, time-major ([T * {width}])."
            )
        storage = self.storage
        leaves = storage.check(data, rows) if isinstance(storage, RingStorage) else None
        flags = self._flags(data, rows // width)
        if ids is None and self._common is not None:
            index = self._write_even(data, leaves, rows // width, flags)
        else:
            index = self._write_uneven(data, leaves, ids, rows // width, flags)
        self.write_count += rows
        self.notify(index)
        return index

    def _write_even(
        self, data: TensorDictBase, leaves: list[Tensor] | None, steps: int, flags: tuple[Flags, Flags | None] | None
    ) -> Tensor:
        start, width, length = self._common or 0, self.num_envs, self.length
        skipped = max(0, steps - length)
        slot, count = (start + skipped) % length, steps - skipped
        first = min(count, length - slot)
        rows = steps * width
        index = torch.arange(start % length * width, start % length * width + rows)
        if skipped or first < count:
            index %= length * width
        if flags is not None:
            self.index.write(None, *flags)
        storage = self.storage
        if leaves is None:
            storage.set(index[skipped * width :], data[skipped * width :] if skipped else data)
        else:
            runs = [(skipped * width, slot * width, first * width)]
            if first < count:
                runs.append(((skipped + first) * width, 0, (count - first) * width))
            storage.write_runs(leaves, runs)
            if width == 1:
                storage.record_cursor((start + steps - 1) % length)
            if self._even and start >= length:
                storage.touch()
            else:
                storage.set_length(min(start + steps, length) * width if self._even else self._filled_after(None, steps))
        self._common = start + steps
        self._positions += steps
        if not self._even:
            self._refresh()
        return index

    def _write_uneven(
        self,
        data: TensorDictBase,
        leaves: list[Tensor] | None,
        ids: Ints | None,
        steps: int,
        flags: tuple[Flags, Flags | None] | None,
    ) -> Tensor:
        env = self._ids if ids is None else ids
        if leaves is None and self.num_envs > 1:
            raise ValueError(
                f"{type(self.storage).__name__} cannot hold unevenly filled rings; use RingStorage as the storage."
            )
        position = self._positions[env] + np.arange(steps)[:, None]
        index = torch.from_numpy(position % self.length * self.num_envs + env).reshape(-1)
        skipped = max(0, steps - self.length) * len(env)
        if flags is not None:
            self.index.write(env, *flags)
        storage = self.storage
        if leaves is None:
            storage.set(index[skipped:], data[skipped:] if skipped else data)
        else:
            storage.write_cells([leaf[skipped:] for leaf in leaves] if skipped else leaves, index[skipped:])
            storage.set_length(self._filled_after(env, steps))
        self._positions[env] += steps
        self._refresh()
        return index

    def _filled_after(self, env: Ints | None, steps: int) -> int:
        after = self._positions.copy()
        after[self._ids if env is None else env] += steps
        return int((after - np.maximum(after - self.length, self._floor)).sum())

    def _refresh(self) -> None:
        first, oldest = int(self._positions[0]), self._oldest()
        aligned = bool((self._positions == first).all())
        self._common = first if aligned else None
        full = bool((self._positions - oldest == self.length).all())
        self._even = full or (aligned and not oldest.any())

    def _check_ids(self, env_ids: Tensor) -> Ints:
        ids = torch.as_tensor(env_ids, dtype=torch.int64).cpu().numpy().reshape(-1)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.num_envs or len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"env_ids must be different numbers in [0, {self.num_envs}), got {ids.tolist()}; "
                "write several steps of an environment time-major, or one after the other."
            )
        return ids

    def _flags(self, data: TensorDictBase, steps: int) -> tuple[Flags, Flags | None] | None:
        if self.index is None and (self.track_episodes is False or self.write_count):
            return None
        done = _entry(data, self.done_key)
        if self.index is None:
            if done is None:
                if self.track_episodes:
                    raise KeyError(f"track_episodes=True needs the entry {self.done_key!r} in the data.")
                return None
            self._make_index()
        if done is None:
            raise KeyError(f"The entry {self.done_key!r}, which the episode index needs, is not in the data.")
        init = _entry(data, self.init_key)
        return _flag(done, steps), None if init is None else _flag(init, steps)

    def _make_index(self) -> None:
        if self.storage.max_size > 1 << 40:
            self.track_episodes = False
            return
        self.index = EpisodeIndex(self.length, self._positions, self._floor)

    def cut(self, env_ids: Tensor | None = None) -> None:
        """Say that the next steps do not continue the running episodes, as after a restart of the environments."""
        if self.index is not None:
            self.index.cut(None if env_ids is None else self._check_ids(env_ids))

    def clear(self, empty_write_count: bool = True) -> None:
        """Move back to the start; called by ``ReplayBuffer.empty``."""
        super().clear(empty_write_count)
        self._positions[:], self._floor[:] = 0, 0
        self._refresh()
        if self.index is not None:
            self.index.clear()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Copy of positions, episode index and counters: tensors and scalars only."""
        return {
            "schema_version": STATE_VERSION,
            "num_envs": self.num_envs,
            "length": self.length,
            "positions": self.positions.clone(),
            "floor": torch.from_numpy(self._floor.copy()),
            "write_count": self.write_count,
            "index": None if self.index is None else self.index.state_dict(self.filled_cells()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly.

        Raises:
            ValueError: another version, number of environments or length of the rings.
        """
        self.check_state(state_dict)
        self._positions[:] = state_dict["positions"].numpy()
        self._floor[:] = state_dict["floor"].numpy()
        self.write_count = state_dict["write_count"]
        self._refresh()
        self.index = None
        if state_dict["index"] is not None:
            self._make_index()
            assert self.index is not None
            self.index.load_state_dict(state_dict["index"], self.filled_cells())

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit; nothing is changed.

        Raises:
            ValueError: another version, number of environments or length of the rings.
        """
        version = state_dict.get("schema_version")
        if version != STATE_VERSION:
            raise ValueError(f"The ring state has schema version {version!r}, this release reads {STATE_VERSION}.")
        for name in ("num_envs", "length"):
            here, there = getattr(self, name), state_dict[name]
            if here != there:
                raise ValueError(f"The state has {name}={there}, this writer has {name}={here}; build it the same way.")

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder."""
        from torchrl_lightning.replay.files import write_state

        write_state(Path(path), self.state_dict())

    def loads(self, path: str | Path) -> None:
        """Read the state from a folder."""
        from torchrl_lightning.replay.files import read_state

        self.load_state_dict(read_state(Path(path)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, length={self.length}, positions={self._positions})"


def _entry(data: TensorDictBase, key: NestedKey) -> Tensor | None:
    node: Any = data
    for part in (key,) if isinstance(key, str) else key:
        node = entries_of(node).get(part) if isinstance(node, TensorDictBase) else None
    return node


def _flag(value: Tensor, steps: int) -> Flags:
    flag = value.detach() if value.requires_grad else value
    flag = flag if flag.is_cpu else flag.cpu()
    array = flag.numpy() if flag.dtype == torch.bool else (flag != 0).numpy()
    if array.size > len(array):
        array = array.reshape(len(array), -1).any(1)
    return array.reshape(steps, -1)
