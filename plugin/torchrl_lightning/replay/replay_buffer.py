"""The base class of all replay buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.keys import NEXT
from torchrl_lightning._core.mixins import make_generator
from torchrl_lightning._core.protocols import SamplerApi
from torchrl_lightning._core.state import Attribute, Child, Stateful, list_of
from torchrl_lightning._core.torchrl_compat import entries_of, identity_collate, new_tensordict
from torchrl_lightning._core.tree import check_tensordict, entry_of, nested_key, to_device
from torchrl_lightning._core.validators import Checked, integer, optional
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.replay.builders import (
    check_parts,
    default_storage,
    drop_next_entries,
    find_prioritized,
    init_priorities,
    plan_write_back,
    ring_writer,
    uses_priorities,
)
from torchrl_lightning.replay.episode_transform import EpisodeTransform, bind_transforms, iter_transforms
from torchrl_lightning.replay.n_step import NStepMixin, NStepReturns
from torchrl_lightning.replay.priorities import reduce_priorities
from torchrl_lightning.replay.replaceable_parts import ReplaceableParts
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.ring_writer import RingWriter
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.replay.row_order import count_envs, may_be_one_env, time_major
from torchrl_lightning.replay.sharing import T
from torchrl_lightning.replay.state_checks import device_and_state, unpack_batch
from torchrl_lightning.replay.uniform import UniformSampler


class ExperienceBuffer(Stateful, NStepMixin, ReplaceableParts):
    """A ``TensorDictReplayBuffer`` that uses a :class:`RingStorage`, a :class:`RingWriter` and any sampler.

    TorchRL handles transforms, prefetching, pinned memory and sample units. Without them, a sample costs little more
    than reading its cells. Use TorchRL's own ``TensorDictReplayBuffer`` for other storages and writers.

    Args:
        storage: stores the rows; 1000 cells by default.
        writer: a writer for ``num_envs`` environments by default.
        sampler: any sampler; a :class:`UniformSampler` by default. The samplers of this package set
            ``supports_uneven_rings``, so they can read unevenly filled rings. With other samplers, e.g. TorchRL's, such
            rings raise an error.
        num_envs: number of environments of the default writer.
        n_steps: length of the returns in a batch (see :class:`NStepReturns`), with any sampler. The buffer stores
            single steps and computes the returns when it reads cells.
        gamma: discount of these returns; 0.99 if None, unless a DataModule passes the discount of its learner.
        generator: the only source of randomness; seeded from torch's global generator by default.
        batch_size: rows (or windows) that ``sample()`` draws. This and the following arguments work as in TorchRL's
            ``TensorDictReplayBuffer``.
        priority_key: the entry of a batch that ``update_tensordict_priority`` reads.
        sample_unit: the unit that ``batch_size`` counts.
        collate_fn: converts the cells into a batch.
        pin_memory: pin sampled batches in page-locked memory.
        prefetch: number of batches that a thread samples in advance.
        transform: a transform of written data and of samples; samples contain the entry ``index`` for it.
        shared: let other processes write and read (:meth:`share`), after this process has written the first rows.
        done_reduce: argument of the default :class:`RingWriter`.
        check_successors: argument of the default :class:`RingWriter`: compare successors to find trajectories that
            were cut without a flag.
        time_dim: the time dimension of written rollouts without a dimension named ``"time"``. Set -1 for a TorchRL
            collector with ``replay_buffer=``, because it writes unnamed rollouts ``[*env.batch_size, T]``. If workers
            of a multi-collector write, pass the sum of their environments as ``num_envs``: each process then fills
            rings of its own. With fewer rings, several processes write to the same rings, and the trajectories are cut
            at each change of the process. None rejects unnamed rollouts.

    Raises:
        TypeError: the storage is not a RingStorage, the writer is not a RingWriter, or the sampler removes cells.
        ValueError: ``num_envs`` differs from the ``num_envs`` of the writer, another buffer fills the storage, or
            ``n_steps`` or ``gamma`` are out of range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> buffer = ExperienceBuffer(storage=RingStorage(100), batch_size=4)
        >>> _ = buffer.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> batch = buffer.sample()
        >>> batch["observation"].shape, batch["index"].shape
        (torch.Size([4, 3]), torch.Size([4]))
    """

    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("batch_size", "collate_fn", "generator", "num_envs", "shared")

    OWNER, VERSION = "buffer", 3
    priority_key = Checked(lambda value, name: nested_key(value))
    time_dim = Checked(optional(partial(integer, minimum=-16)))
    STATE = {
        "prefetched": Attribute(list_of(unpack_batch), "_prefetched_batches"),  # the setter checks their number
        "sampler_kind": Attribute(attribute="_sampler_kind", argument="sampler"),
        "storage": Child(),
        "writer": Child(attribute="writer.rings"),
        "sampler": Child(attribute="_sampler_state"),
        "transform": Child(attribute="_transform_state"),
        "generator": Attribute(device_and_state, "_generator_state"),
    }

    def __init__(
        self,
        *,
        storage: RingStorage | None = None,
        writer: RingWriter | None = None,
        sampler: Sampler | None = None,
        num_envs: int | None = None,
        n_steps: int = 1,
        gamma: float | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        priority_key: NestedKey = "td_error",
        sample_unit: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        shared: bool = False,
        done_reduce: str | None = None,
        check_successors: bool = True,
        time_dim: int | None = None,
    ) -> None:
        self.time_dim = time_dim
        self.set_returns(NStepReturns(n_steps, 0.99 if gamma is None else gamma))
        storage = default_storage() if storage is None else storage
        writer = ring_writer(
            writer, num_envs, n_steps > 1 or None, done_reduce=done_reduce, check_successors=check_successors
        )
        check_parts(storage, writer, sampler)
        init_priorities(sampler, storage.max_size)
        if num_envs not in (None, writer.num_envs):
            raise ValueError(f"num_envs must be {writer.num_envs}, as in the writer, got num_envs={num_envs}. Omit it.")
        super().__init__(
            storage=storage,
            writer=writer,
            sampler=UniformSampler() if sampler is None else sampler,
            generator=make_generator() if generator is None else generator,
            batch_size=batch_size,
            priority_key=nested_key(priority_key),
            sample_unit=sample_unit,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )
        bind_transforms(self.transform, self.storage)
        if shared:
            self.share_before_first_write()

    @property
    def parts(self) -> tuple[RingStorage, Sampler, RingWriter]:
        """The storage, the sampler and the writer."""
        return self._storage, self._sampler, self._writer

    @property
    def accepts_shared_rows(self) -> bool:
        """Whether ``extend`` accepts rows in memory that the caller reuses; a subclass may override this."""
        return type(self).extend is ExperienceBuffer.extend and not self.transforms

    # ------------------------------------------------------------------ writing

    def extend(
        self,
        data: TensorDictBase,
        env_ids: Tensor | None = None,
        *,
        time_dim: int | None = None,
        update_priority: bool | None = None,
    ) -> Tensor:
        """Write steps.

        Args:
            data: ``[n]`` for one environment; ``[num_envs]`` with one step of each environment; or a rollout ``[N, T]``
                with a dimension named ``"time"`` or with ``time_dim``.
            env_ids: the environments of these steps; all environments in order by default.
            time_dim: the time dimension; the dimension named ``"time"``, or else the buffer's ``time_dim``, by default.
            update_priority: use the priorities in the data; True by default.

        Returns:
            The cells, ``[n]``; time-major for a rollout; empty for data without rows.

        Raises:
            TypeError: the data is not a TensorDict, an entry is not a tensor, or ``env_ids`` are not integers.
            ValueError: a batch size, schema or priority does not match; nothing is written.
        """
        check_tensordict(data)
        if 0 in data.shape:
            return torch.zeros(0, dtype=torch.int64)
        env_ids = None if env_ids is None else as_integers(env_ids, "env_ids").reshape(-1)
        if self.transforms:
            data = self.transform.inv(data)
            if data is None:
                return torch.zeros(0, dtype=torch.int64)
        storage, sampler, writer = self.parts
        num_envs = ring_count = writer.num_envs if env_ids is None else len(env_ids)
        if env_ids is None and self.time_dim is not None:
            num_envs = self._count_envs(data, time_dim)
        data = time_major(data, num_envs, time_dim, self.time_dim)
        priority = None
        if uses_priorities(sampler):
            if update_priority is not False:
                priority = data.get(self.priority_key, None)
            if (prioritized := find_prioritized(sampler)) is not None:
                prioritized.check_write(storage, data.shape[0], priority)
        if num_envs < ring_count:
            index = self.write_with(writer.extend_own, data, num_envs)
        else:
            index = self.write(data) if env_ids is None else self.write(data, env_ids)
        if priority is not None:
            self.update_priority(index, priority)
        return index

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one step: a row without batch dimension, or ``[num_envs]`` for all environments."""
        check_tensordict(data)
        if data.ndim:
            return self.extend(data) if self.time_dim is None else self.extend(data.unsqueeze(-1), time_dim=-1)
        row = data.unsqueeze(0)
        return int(self.extend(row) if self.time_dim is None else self.extend(row.unsqueeze(0), time_dim=0))

    def _count_envs(self, data: TensorDictBase, time_dim: int | None) -> int:
        """Return the number of environments in the data, which may be fewer than the buffer has."""
        writer = self.writer
        if data.ndim > 1:
            num_envs, steps = count_envs(data, time_dim, self.time_dim)
        elif may_be_one_env(data, writer.done_key) and (len(data) == 1 or writer.owned_rings != len(data)):
            num_envs, steps = 1, len(data)
        else:
            return writer.num_envs
        # A multi-collector of TorchRL writes one step of one worker to an empty buffer, to reserve memory.
        may_be_fewer = self.shared or (steps == 1 and not writer.write_count)
        return min(num_envs, writer.num_envs) if may_be_fewer else writer.num_envs

    def __setitem__(self, index: Any, value: Any) -> None:
        """Overwrite filled cells, or one entry of all filled cells (see :meth:`RingStorage.write_entry`).

        Raises:
            TypeError: the index has several parts; the buffer cannot track writes into the resulting view.
        """
        if isinstance(index, tuple) and len(index) > 1 and not all(isinstance(part, str) for part in index):
            raise TypeError(
                f"The index must be cells or a key, got {index!r}. Use storage.write_entry(key, cells, ...)."
            )
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            with self.locked():
                self.storage.write_entry(index, torch.arange(len(self)), torch.as_tensor(value))
        else:
            super().__setitem__(index, value)

    @property
    def uses_episodes(self) -> bool:
        """Whether samples depend on episode boundaries."""
        follows_episodes = SamplerApi.of(self._sampler).follows_episodes or self._n_step is not None
        return follows_episodes or any(isinstance(part, EpisodeTransform) for part in iter_transforms(self.transform))

    def invalidate_cells(self, cells: Tensor) -> None:
        """Exclude removed cells from sampling."""
        if (prioritized := find_prioritized(self._sampler)) is not None:
            prioritized.invalidate(cells)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all stored steps and all prefetched batches."""
        self.set_prefetched([])
        with self.locked():
            super().empty(empty_write_count)

    def write(self, data: TensorDictBase, *args: Any) -> Any:
        """Write under TorchRL's locks, without transforms; pass further arguments to the writer."""
        return self.write_with(self._writer.extend, data, *args)

    def write_with(self, write: Callable[..., T], *args: Any) -> T:
        """Call ``write(*args)`` under TorchRL's locks, and pass the cells that it returns to the sampler."""
        with self.thread_lock, self.write_lock:
            index = write(*args)
            self._sampler.extend(index)
        return index

    # ------------------------------------------------------------------ reading

    @overload
    def sample(self, batch_size: int | None = None) -> TensorDictBase: ...
    @overload
    def sample(self, batch_size: int | None = ..., return_info: bool = ..., include_info: bool | None = ...) -> Any: ...
    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Sample a batch; its ``index`` entry contains the cells.

        ``write_position``, of the same shape, contains the write position of each cell's ring, for :meth:`write_back`.

        Raises:
            RuntimeError: the buffer is empty, or the batch size is unknown.
        """
        if return_info or include_info is not None or not self.can_skip_torchrl_path(batch_size):
            return super().sample(batch_size, return_info, include_info)
        transforms = self.transforms
        if not transforms:
            return self.read(batch_size, self._fetch, **self.sample_options)
        if not all(isinstance(transform, EpisodeTransform) for transform in transforms):
            return super().sample(batch_size, return_info, include_info)
        with self.locked():  # transforms may read further cells
            batch = self.read(batch_size, self._fetch, **self.sample_options)
            for transform in transforms:
                batch = transform(batch)
        return batch

    @property
    def transforms(self) -> Collection[Any]:
        """The transforms."""
        modules: dict[str, Any] = self._transform._modules["transforms"]._modules  # ten times faster than attributes
        return modules.values()

    def can_skip_torchrl_path(self, batch_size: int | None) -> bool:
        """Return whether a sample needs only cells and transforms, so that it can skip TorchRL's longer path."""
        prefetches, pins, is_over, unit, dependency = self.sample_path_settings
        default_size, has_warned = self.batch_sizes
        if prefetches or pins or is_over or unit is not None or dependency is not None:
            return False
        if self.collate is not identity_collate or (default_size is None and batch_size is None):
            return False
        return bool(default_size is None or batch_size is None or default_size == batch_size or has_warned)

    def read(self, batch_size: int | None, fetch: Callable[[Any, dict[Any, Any]], T], **options: Any) -> T:
        """Sample with these options, and read the cells by ``fetch(index, info)``, under TorchRL's locks."""
        size = self.batch_sizes[0] if batch_size is None else batch_size
        with self.thread_lock:
            if not self.shared:
                return fetch(*self._sampler.sample(self._storage, size, **options))
            with self.write_lock:
                return fetch(*self._sampler.sample(self._storage, size, **options))

    def draw(self, batch_size: int | None = None) -> TensorDictBase:
        """Sample a batch as a TensorDict, even if the ``sample`` of a subclass returns another type.

        Args:
            batch_size: rows or windows; the buffer's batch size by default.
        """
        return self.sample(batch_size)

    def _fetch(self, index: Any, info: dict[Any, Any]) -> TensorDictBase:
        storage, sampler, writer = self.parts
        if isinstance(index, tuple):  # slice samplers return coordinates
            (index,) = index
        supports_uneven = getattr(sampler, "supports_uneven_rings", False)
        if not supports_uneven:
            storage.check_uniformly_filled(type(sampler).__name__)
            index = as_integers(index, "Cells")
            storage.check_filled(index)
        write_versions, cells = writer.rings.write_version(index), storage.cells
        assert cells is not None
        device = cells.device
        on_cpu = index.is_cpu and cells.on_cpu
        if not on_cpu:
            index, write_versions = index.to(device), write_versions.to(device)
        if self._n_step is not None and info:
            drop_next_entries(info)
        # Do not read entries that the sampler returns.
        names = (None, "time") if supports_uneven and index.ndim == 2 else None
        entries = storage.gather(index, names, info if supports_uneven else (), self._n_step)
        entries["index"], entries["write_position"] = index, write_versions
        episodes = writer.rings.index
        if names is not None and episodes is not None and episodes.has_cuts and "is_init" in entries:
            entries["is_init"] = episodes.with_begins(entries["is_init"], index)
        others = {}
        for key, value in info.items():
            if supports_uneven and isinstance(key, str):  # five times faster than batch.set below
                entries[key] = value if on_cpu else to_device(value, device)
            else:
                others[key] = value
        batch = new_tensordict(entries, index.shape, names, device)
        for key, value in others.items():
            batch.set(key, value)
        return batch

    def look_up(self, index: Any, info: dict[Any, Any]) -> TensorDictBase:
        """Read cells for TorchRL's sampling path; see :meth:`sample`."""
        storage, _, writer = self.parts
        if isinstance(index, tuple):
            (index,) = index
        index = torch.as_tensor(index)
        info["write_position"] = writer.rings.write_version(index)
        if self._n_step is not None:
            drop_next_entries(info)
        data = storage.get(index, self._n_step)
        return data.set("index", index.to(storage.device)) if self.transforms else data

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> Tensor:
        """Write changed entries of a sampled batch, e.g. recurrent states, back into their cells.

        The buffer skips cells that were overwritten or removed after sampling, and steps that a ``mask`` excludes. If
        a cell occurs twice, the last value is written.

        Args:
            batch: a batch of :meth:`sample`, flat ``[B]`` or windows ``[B, T]``.
            keys: the entries to write; a nested key includes all entries below it.

        Returns:
            The written cells.

        Raises:
            KeyError: an entry is missing in the batch or the storage, or the batch lacks ``index`` or
                ``write_position``; nothing is written.
            TypeError: the batch is not a TensorDict.
            ValueError: a shape or dtype differs from the storage, or the writer rejects flags; nothing is written.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> buffer = ExperienceBuffer(storage=RingStorage(4), batch_size=8)
            >>> _ = buffer.extend(TensorDict({"state": torch.zeros(1)}, [1]))
            >>> batch = buffer.sample()
            >>> batch["state"] += 3
            >>> buffer.write_back(batch, ["state"]).tolist(), buffer[:]["state"].tolist()
            ([0], [3.0])
        """
        with self.locked():
            return self.plan_write_back(batch, keys)()

    def plan_write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> Callable[[], Tensor]:
        """Validate a :meth:`write_back`; return the function that writes, to be called under the same locks."""
        storage, _, writer = self.parts
        return plan_write_back(storage, writer.rings, batch, keys, self.n_steps)

    # ------------------------------------------------------------------ state

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return everything that determines the next samples: tensors and scalars only."""
        with self.paused():
            return super().state_dict(copy=copy)

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        stored, writer = values["storage"], values["writer"]
        rings = Rings.at(self.writer.length, writer["positions"], writer["oldest"])
        filled, listed = rings.filled_cells(), stored["cells"]
        is_listed = listed is None if rings.is_uniformly_filled else listed is not None and listed.equal(filled)
        if stored["count"] != len(filled) or not is_listed:
            raise ValueError(
                f"The state is foreign: its storage has {stored['count']} cells, its writer {len(filled)}."
            )
        if (prioritized := find_prioritized(self._sampler)) is not None:
            sampler = values["sampler"] if prioritized is self._sampler else values["sampler"]["prioritized"]
            with_priority = (sampler["priorities"] >= 0).nonzero().squeeze(1).cpu()
            if not torch.isin(with_priority, filled).all():
                raise ValueError("The state is foreign: it has priorities of empty cells.")

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Restore the stored steps and everything else that determines the next samples."""
        with self.paused():
            super().apply_state(values)
            self.storage.watched |= {(NEXT, *path) for path in self.writer.rings.successors.matched}

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder: streamed, atomic and without pickle; memory-mapped cells are copied.

        Raises:
            OSError: the disk is full or not writable; an earlier state in the folder stays intact.
        """
        with self.paused():
            super().dumps(path)

    # ------------------------------------------------------------------ priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Update priorities from the entry ``priority_key`` that a loss wrote into a sampled batch.

        This does nothing if the sampler does not use priorities. :class:`PrioritizedSampler` skips cells that were
        overwritten after sampling, which it detects by ``write_generation``. Its ``reduction`` combines the errors
        ``[B, C]`` of several critics, or the steps of a window, into one priority.

        Raises:
            KeyError: the batch lacks priorities or ``index``.
        """
        check_tensordict(data)
        _, sampler, _ = self.parts
        if not uses_priorities(sampler):
            return
        entries = entries_of(data)
        priority, index = entry_of(data, self.priority_key), entries.get("index")
        if priority is None or index is None:
            missing = self.priority_key if priority is None else "index"
            raise KeyError(f"The batch has no entry {missing!r}; it has {sorted(map(str, data.keys()))}.")
        if find_prioritized(sampler) is not None:
            self.set_priority(index, priority, generation=entries.get("write_generation"))
            return
        priority = priority.detach()
        has_more = priority.ndim > index.ndim and priority.shape[: index.ndim] == index.shape
        if has_more and isinstance(sampler, TorchRLPrioritizedSampler):
            priority = reduce_priorities(priority, index.numel(), sampler.reduction)
        self.set_priority(index.reshape(-1), priority.reshape(-1))
