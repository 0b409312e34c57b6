"""The base of all replay buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import ConsumingSampler, Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter, Writer
from torchrl.envs.transforms import Transform

from torchrl_lightning._compat import BufferBase, Drawn, new_tensordict
from torchrl_lightning.entries import check_tensordict, entry_of, moved, nested_key
from torchrl_lightning.files import read_state, write_state
from torchrl_lightning.replay.buffer_state import gather_state, restore_state
from torchrl_lightning.replay.n_step import NStepReturns
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.rings import integers
from torchrl_lightning.replay.sequence_reading import read_windows
from torchrl_lightning.replay.sequences import SequenceSampler
from torchrl_lightning.replay.sharing import SHARE_FIRST, SharedLock, is_spawning
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.write_back import write_back
from torchrl_lightning.replay.writer import RingWriter


class ExperienceBuffer(BufferBase):
    """``TensorDictReplayBuffer`` over rings, with a short path when none of TorchRL's extras is used.

    Everything that TorchRL's buffer does (transforms, prefetch, pinned memory, sample units, remote backends) works
    through it; without them, a sample costs little more than the reading of its cells.

    Args:
        storage: where the cells lie; a :class:`RingStorage` of 1000 cells by default.
        writer: a :class:`RingWriter` for ``num_envs`` environments by default.
        sampler: any sampler; TorchRL's ``RandomSampler`` by default.
        num_envs: number of environments of the default writer.
        n_steps: length of the returns that batches hold (see :class:`NStepReturns`), with any sampler; they are made
            when cells are read, so that what is stored are single steps.
        gamma: their discount.
        generator: the only source of randomness; seeded from torch's global one by default.
        batch_size: rows (or windows) that ``sample()`` draws, here and below as in TorchRL's
            ``TensorDictReplayBuffer``.
        priority_key: the entry of a batch that ``update_tensordict_priority`` takes.
        sample_unit: what a sample is a number of.
        collate_fn: what makes a batch of the cells that were read.
        pin_memory: pin sampled batches in page-locked memory.
        prefetch: batches drawn ahead by a thread.
        transform: a transform that written data and samples pass through.
        transform_factory: a callable that makes the transform.
        dim_extend: the dimension along which data are written.
        checkpointer: what writes and reads the storage in ``dumps`` and ``loads``.
        consume_after_n_samples: samples after which a cell is given up.
        shared: let other processes write and read.
        compilable: support ``torch.compile``.
        delayed_init: build storage, sampler and writer at first use.
        transport: how data reach a buffer in another process.
        transport_options: settings of the transport.

    Raises:
        ValueError: ``num_envs`` differs from that of a given writer, another buffer fills the storage, or ``n_steps``
            or ``gamma`` are out of range, or need rings (:class:`RingStorage`, :class:`RingWriter`).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> buffer = ExperienceBuffer(storage=RingStorage(100), batch_size=4)
        >>> _ = buffer.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> batch = buffer.sample()
        >>> batch["observation"].shape, batch["index"].shape
        (torch.Size([4, 3]), torch.Size([4]))
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        num_envs: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        priority_key: NestedKey = "td_error",
        sample_unit: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform] | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        consume_after_n_samples: int | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        transport: Literal["auto", "direct", "ray", "distributed"] = "auto",
        transport_options: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(storage, RingStorage):
            _check_free(storage, writer)
        if isinstance(writer, RingWriter) and num_envs not in (None, writer.num_envs):
            raise ValueError(f"num_envs={num_envs}, but the writer has num_envs={writer.num_envs}; give one of them.")
        returns = NStepReturns(n_steps, gamma)
        self._n_step = returns if n_steps > 1 else None
        self.n_steps, self.gamma = n_steps, gamma
        if writer is None:
            writer = _writer(num_envs, sampler, consume_after_n_samples, n_steps > 1 or None)
        if n_steps > 1:
            _check_rings(n_steps, storage, writer)
        super().__init__(
            storage=RingStorage(1000) if storage is None else storage,
            writer=writer,
            sampler=sampler,
            generator=_fresh_generator() if generator is None else generator,
            batch_size=batch_size,
            priority_key=nested_key(priority_key),
            sample_unit=sample_unit,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            consume_after_n_samples=consume_after_n_samples,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            transport=transport,
            transport_options=transport_options,
        )
        if self.shared:
            self.share()

    # ------------------------------------------------------------------ sharing

    def share(self, shared: bool = True) -> Self:
        """Move what is stored into memory that other processes share, forked or spawned; call before they start.

        Whoever writes or samples holds a lock between the processes and sees what the others wrote. Samplers,
        priorities among them, transforms and generators stay each process's own: sample in one process, or seed every
        generator differently. Write some data first, or let this process be the first to write.

        Args:
            shared: False does nothing to a buffer that is not shared.

        Returns:
            The buffer itself.

        Raises:
            ValueError: the cells are memory-mapped files, batches are prefetched, the writer or the storage is not a
                ring while the other one is, or the buffer is shared and shall not be any more.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> buffer = ExperienceBuffer(storage=RingStorage(4))
            >>> _ = buffer.extend(TensorDict({"a": torch.zeros(1)}, [1]))
            >>> buffer.share().storage.is_shared
            True
        """
        if not getattr(self, "_initialized", False):  # TorchRL's constructor calls this before there is any part
            return super().share(shared)
        storage, _, writer = self.parts
        rings = isinstance(storage, RingStorage), isinstance(writer, RingWriter)
        if not shared:
            if rings[0] and storage.is_shared:
                raise ValueError("A shared buffer stays shared; copy.deepcopy(buffer) gives one that is not.")
            return super().share(False)
        if self.prefetches:
            raise ValueError("A buffer that prefetches batches cannot be shared; build it with prefetch=0.")
        if rings[1] and not rings[0]:
            raise ValueError(f"RingWriter cannot share a {type(storage).__name__}; use RingStorage as the storage.")
        if rings[0]:
            storage.share()
        if rings[1]:
            writer.share()
        super().share(True)
        self.set_write_lock(SharedLock(self.follow))
        return self

    def follow(self) -> None:
        """Take note of what other processes wrote; done on entering the lock between them."""
        writer = self.parts[2]
        if isinstance(writer, RingWriter) and writer.is_shared:
            if writer.was_emptied:
                self.clear_sampler()
            writer.follow()

    def __getstate__(self) -> dict[str, Any]:
        if is_spawning() and not self.shared:
            raise RuntimeError(f"A {type(self).__name__} was handed to another process unshared; {SHARE_FIRST}.")
        state: dict[str, Any] = super().__getstate__()
        return state if is_spawning() else {**state, "shared": False, "_write_lock": nullcontext()}

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
            data: ``[n]`` with one environment; ``[num_envs]`` (one step of all) with several; a rollout ``[N, T]`` with
                a dimension named ``"time"``, or with ``time_dim``.
            env_ids: whose steps these are, if not of all environments in order.
            time_dim: the dimension that is time.
            update_priority: whether priorities in the data are used; yes by default.

        Returns:
            The cells, ``[n]``; time-major for a rollout; none if the data has no rows.

        Raises:
            TypeError: the data is not a TensorDict, an entry is not a tensor, or ``env_ids`` are not integers.
            ValueError: a batch size, schema or priority that does not fit; nothing is written.
        """
        check_tensordict(data)
        writer = self.parts[2]
        if not isinstance(writer, RingWriter) and not (env_ids is None and time_dim is None):
            raise TypeError(f"env_ids and time_dim need a RingWriter, this buffer has a {type(writer).__name__}.")
        if 0 in data.shape:
            return torch.zeros(0, dtype=torch.int64)
        env_ids = None if env_ids is None else integers(env_ids, "env_ids").reshape(-1)
        if self.has_transform:
            data = self.transform.inv(data)
            if data is None:
                return torch.zeros(0, dtype=torch.int64)
        return self._write(data, env_ids, time_dim, update_priority)

    def _write(
        self, data: TensorDictBase, env_ids: Tensor | None, time_dim: int | None, update_priority: bool | None
    ) -> Tensor:
        storage, sampler, writer = self.parts
        if isinstance(writer, RingWriter):
            data = _flat(data, writer.num_envs if env_ids is None else len(env_ids), time_dim)
        priority = None
        if update_priority is not False and _is_prioritized(sampler):
            priority = data.get(self.priority_key, None)
        if isinstance(sampler, PrioritizedSampler):
            sampler.check_write(storage, data.shape[0], priority)
        index = self.write(data) if env_ids is None else self.write(data, env_ids)
        if priority is not None:
            self.update_priority(index, priority)
        return index

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one step: a row without batch dimension, or ``[num_envs]`` for all environments."""
        check_tensordict(data)
        if data.ndim:
            return self.extend(data)
        return int(self.extend(data.unsqueeze(0)))

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget everything stored, and batches that were prefetched from it."""
        self.drop_prefetched()
        with self.locked():
            super().empty(empty_write_count)

    # ------------------------------------------------------------------ reading

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Sample a batch; its ``index`` entry holds the cells.

        ``write_position``, of the same shape, says how far each cell's ring was written (see :meth:`write_back`).

        Raises:
            RuntimeError: nothing is stored, or no batch size is known.
        """
        storage, _, _ = self.parts
        if (
            return_info
            or include_info is not None
            or not isinstance(storage, RingStorage)
            or not self.is_plain
            or self.conflicts(batch_size)
        ):
            return super().sample(batch_size, return_info, include_info)
        if self._n_step is None:
            return self.read(batch_size, self._fetch)
        return self._folded(self.read, batch_size, self._fetch)

    def _fetch(self, index: Any, info: dict[Any, Any]) -> TensorDictBase:
        storage, sampler, writer = self.parts
        own = getattr(sampler, "reads_rings", False)
        if not own:
            storage.check_even(type(sampler).__name__)
        if isinstance(index, tuple):  # coordinates of a storage with one dimension, as slice samplers give them
            (index,) = index
        if not isinstance(index, Tensor) or index.dtype is not torch.int64:
            index = integers(index, "Cells")
        device = storage.device
        index = moved(index, device)
        if isinstance(writer, RingWriter):
            info["write_position"] = writer.stamp(index)
        if isinstance(sampler, SequenceSampler):
            return read_windows(storage, index, info)
        if self._n_step is not None and not own:
            storage.check_filled(index)
        entries = storage.gather(index)
        entries["index"] = index
        # A fifth of the time that setting them one by one takes.
        for key in [key for key in info if isinstance(key, str)] if own else ("write_position",):
            if key in info:
                entries[key] = moved(info.pop(key), device)
        batch = new_tensordict(entries, index.shape, None, device)
        for key, value in info.items():
            batch.set(key, value)
        return batch

    def read_long(self, sample: Callable[[int], Drawn], batch_size: int) -> Drawn:
        """Draw a batch on TorchRL's long path; ``write_position`` is at the latest what held when it was read."""
        writer = self.parts[2]
        before = writer.snapshot() if isinstance(writer, RingWriter) else None
        data, info = sample(batch_size) if self._n_step is None else self._folded(sample, batch_size)
        index = info["index"]
        if before is not None and not (isinstance(index, tuple) and len(index) > 1):
            where = index[0] if isinstance(index, tuple) else torch.as_tensor(index)
            info["write_position"] = before[where.cpu() % len(before)]
        return data, info

    def _folded(self, read: Callable[..., Any], *args: Any) -> Any:
        storage, _, writer = self.parts
        _check_rings(self.n_steps, storage, writer)
        with self.locked():
            storage.n_step = self._n_step
            try:
                return read(*args)
            finally:
                storage.n_step = None

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> Tensor:
        """Write rewritten entries of a sampled batch, e.g. recurrent states, back into the cells that they came from.

        Cells that were overwritten or forgotten since the batch was drawn are left alone, and so are steps that a
        ``mask`` leaves out. Where a cell comes twice, the last one stays.

        Args:
            batch: what :meth:`sample` gave: flat ``[B]``, or windows ``[B, T]``.
            keys: the entries; of nested ones, everything below.

        Returns:
            The cells written.

        Raises:
            KeyError: an entry is missing in the batch or the storage, or the batch lacks ``index`` or
                ``write_position``; nothing is written.
            TypeError: the storage is none of ours.
            ValueError: a shape or dtype differs from what is stored; nothing is written.

        Example:
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
            return write_back(self, batch, keys)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Copy of everything that decides what is sampled next: tensors and scalars only."""
        return gather_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly: the next samples are those of the original.

        Raises:
            ValueError: another version, capacity, number of environments, sampler, or other keys, shapes or dtypes;
                nothing is changed.
        """
        restore_state(self, state_dict)

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder: streamed, atomic, without pickle.

        Memory-mapped cells are copied too, so that nothing written later touches the state.

        Args:
            path: the folder.

        Raises:
            OSError: the disk is full or not writable; an earlier state stays whole.
        """
        with self.at_rest():
            write_state(Path(path), gather_state(self, copy=False))

    def loads(self, path: str | Path) -> None:
        """Read a state from a folder.

        Args:
            path: the folder.

        Raises:
            FileNotFoundError: there is no state.
            ValueError: the state is damaged, foreign, or does not fit; nothing is changed.
        """
        restore_state(self, read_state(Path(path)))

    # ------------------------------------------------------------------ priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Take the priorities that a loss wrote into a sampled batch (entry ``priority_key``).

        Does nothing if the sampler knows no priorities. With our sampler, cells that were overwritten since the batch
        was drawn (its ``write_generation``) keep the priority of what they hold now.

        Raises:
            KeyError: the batch has no priorities or no ``index``.
        """
        check_tensordict(data)
        _, sampler, _ = self.parts
        if not _is_prioritized(sampler):
            return
        priority, index = entry_of(data, self.priority_key), entry_of(data, "index")
        if priority is None or index is None:
            missing = self.priority_key if priority is None else "index"
            raise KeyError(f"The batch has no entry {missing!r}; it has {sorted(map(str, data.keys()))}.")
        if index.ndim != 1 or priority.ndim != 1:
            if priority.ndim > index.ndim:
                priority = priority.reshape(index.shape)
            index, priority = index.reshape(-1), priority.reshape(-1)
        if isinstance(sampler, PrioritizedSampler):
            self.give_priority(index, priority, generation=entry_of(data, "write_generation"))
        else:
            self.give_priority(index, priority.detach())


def _flat(data: TensorDictBase, width: int, time_dim: int | None) -> TensorDictBase:
    if data.ndim == 1 and time_dim is None:
        if width == 1 or data.shape[0] == width:
            return data
        raise ValueError(
            f"Got {data.shape[0]} rows for {width} environments; expected one step of each ([{width}]), or a rollout "
            f'with a dimension named "time" or with time_dim= ([T, {width}] or [{width}, T]).'
        )
    names = data.names
    axis = time_dim if time_dim is not None else names.index("time") if "time" in names else None
    if axis is None or data.ndim not in (1, 2) or not -data.ndim <= axis < data.ndim:
        raise ValueError(
            f"Cannot tell which dimension of batch size {list(data.shape)} is time (names {names}); name it, "
            'e.g. data.names = [None, "time"], or pass time_dim=.'
        )
    if data.ndim == 1:
        return _flat(data, width, None)
    data = data if axis % 2 == 0 else data.transpose(0, 1)
    if data.shape[1] != width:
        raise ValueError(f"Got a rollout of {data.shape[1]} environments, the writer has {width}.")
    return data.reshape(-1)


def _writer(num_envs: int | None, sampler: Any, consume_after: int | None, track: bool | None) -> Writer:
    if consume_after is None and not isinstance(sampler, ConsumingSampler):
        return RingWriter(1 if num_envs is None else num_envs, track_episodes=track)
    # A ring is overwritten in order; what was consumed leaves single cells to fill.
    if num_envs not in (None, 1):
        raise ValueError(f"consume_after_n_samples takes steps out of their order, so num_envs={num_envs} must be 1.")
    return TensorDictRoundRobinWriter()


def _check_rings(n_steps: int, storage: Any, writer: Any) -> None:
    for part, base, ring in ((storage, Storage, RingStorage), (writer, Writer, RingWriter)):
        if isinstance(part, base) and not isinstance(part, ring):
            raise ValueError(
                f"n_steps={n_steps} follows episodes through rings, but this buffer has a {type(part).__name__}; use "
                f"{ring.__name__}, or append TorchRL's MultiStepTransform."
            )


def _check_free(storage: RingStorage, writer: Any) -> None:
    if storage.writer not in (None, writer):
        gc.collect()  # the other buffer may be gone, though not yet collected
    if storage.writer not in (None, writer):
        raise ValueError(
            "Another buffer already fills this RingStorage, as when functools.partial(ExperienceBuffer, "
            "storage=RingStorage(...)) is called twice; give every buffer a storage and a sampler of its own, e.g. by "
            "lambda num_envs: ExperienceBuffer(storage=RingStorage(...), num_envs=num_envs), or pass the same writer."
        )


def _is_prioritized(sampler: Sampler) -> bool:
    return type(sampler).update_priority is not Sampler.update_priority


def _fresh_generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))
