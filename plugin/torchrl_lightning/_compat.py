"""The underscored TorchRL and tensordict names that our subclasses must touch, and nothing else.

TorchRL's component classes are extended through a handful of private hooks (``_empty``, ``_init``, ``_len``, ...). They
are gathered here, behind public names, so that an upgrade which moves one of them breaks this file and its contract
tests instead of silently changing behaviour somewhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.sharedctypes import Value
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.storages import LazyTensorStorage, Storage
from torchrl.data.replay_buffers.storages.utils import _collate_id
from torchrl.data.replay_buffers.utils import pin_memory_output
from torchrl.data.replay_buffers.writers import Writer

from torchrl_lightning.files import OwnFiles, StateFiles
from torchrl_lightning.parts import OwnGenerator, OwnSignature, is_spawning

T = TypeVar("T")
C = TypeVar("C", bound=TensorClass)
Drawn = tuple[Any, dict[Any, Any]]
"""A batch, and the entries that the sampler adds to it."""


def new_tensordict(
    source: dict[str, Any],
    batch_size: torch.Size,
    names: Sequence[str | None] | None = None,
    device: torch.device | None = None,
) -> TensorDict:
    """Build a TensorDict without checking its entries, several times faster than the constructor.

    The keys of ``source`` are strings; every value is a tensor or TensorDict (no dict) that starts with ``batch_size``,
    and lies on ``device`` if the TensorDict is to record it.
    """
    # What ``TensorDict._new_unsafe`` does, without looking at each entry.
    data = TensorDict.__new__(TensorDict)
    data._tensordict = dict(source)
    data._batch_size, data._device, data._td_dim_names = batch_size, device, names
    return data


def new_tensorclass(cls: type[C], source: TensorDictBase, others: dict[str, Any]) -> C:
    """Build a TensorClass over the entries of ``source`` without checking them; ``others`` are all other attributes."""
    found = object.__new__(cls)
    found.__dict__.update(_tensordict=source, _non_tensordict=others, _is_initialized=True)
    return found


def entries_of(data: TensorDictBase) -> dict[str, Any]:
    """Return the entries of one level of any TensorDict, for reading only: no checks, no copy of a plain one."""
    return data._tensordict if type(data) is TensorDict else dict(data.items())


def put_entry(data: TensorDictBase, name: str, value: Tensor) -> None:
    """Put a tensor that fits under a plain name, into a plain TensorDict without the checks of ``set``."""
    if type(data) is TensorDict and not data.is_locked:
        data._tensordict[name] = value
    else:
        data.set(name, value)


def attached(storage: Storage) -> Iterator[Any]:
    """Iterate over what is attached to a storage, and told which cells are written."""
    return iter(storage._attached_entities_iter())


class _NoLock:
    """Stands for the lock of a number in shared memory, which a process that dies would leave locked.

    Whoever changes the number holds the buffer's lock.
    """

    def acquire(self) -> None:
        """Do nothing."""

    release = __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class StorageBase(OwnFiles, LazyTensorStorage):
    """``LazyTensorStorage`` with its private hooks under public names."""

    _own_length = 0
    _shared = _is_packing = False

    @property
    def checkpointer(self) -> Any:
        """TorchRL's way to files, which is not ours."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        if value is not None:
            self.register_save_hook(value)
        self._checkpointer = self._default_checkpointer()

    @property
    def data(self) -> TensorDictBase | None:
        """Everything allocated, filled or not."""
        return self._storage

    @data.setter
    def data(self, value: TensorDictBase | None) -> None:
        self._storage = value
        self.initialized = value is not None
        self.__dict__.pop("_total_shape_value", None)

    # TorchRL's length lies in shared memory from the start, while positions and cells do not.
    @property
    def _len(self) -> Any:
        return LazyTensorStorage._len.fget(self) if self._shared else self._own_length

    @_len.setter
    def _len(self, length: Any) -> None:
        if self._shared:
            LazyTensorStorage._len.fset(self, length)
        else:
            self._own_length = length

    def share_counters(self) -> None:
        """Move length, revision and cursor into memory that both forked and spawned processes share."""
        length, revision, cursor = len(self), self._mutation_revision, self.cursor
        self._shared = True
        unlocked: Any = _NoLock()
        self._len_value = Value("i", length, lock=unlocked)
        self._mutation_revision_value = Value("q", revision, lock=unlocked)
        self._last_cursor_index_value = Value("q", cursor, lock=unlocked)

    def __getstate__(self) -> dict[str, Any]:
        if is_spawning():
            return dict(super().__getstate__())
        if not self._shared:
            LazyTensorStorage._len.fset(self, self._own_length)
        self._is_packing = True
        try:
            return {**super().__getstate__(), "_shared": False, "_own_length": len(self), "_is_packing": False}
        finally:
            self._is_packing = False

    def set_length(self, length: int) -> None:
        """Declare how many cells are filled, and that the content changed."""
        if len(self) != length:
            self._len = length
        self._bump_mutation_revision()

    def touch(self) -> None:
        """Declare that the content changed, without the lock between processes: any change of the number will do."""
        self._mutation_revision_value.get_obj().value += 1

    @property
    def generator(self) -> torch.Generator | None:
        """The buffer's random generator."""
        return self._rng

    def draw(self, count: int) -> Tensor:
        """Draw cells uniformly."""
        return super()._rand_given_ndim(count)

    def _rand_given_ndim(self, batch_size: int) -> Tensor:
        return self.draw(batch_size)

    def check_seam(self) -> None:
        """Refuse, where it must, to tell which cell was written last; called before TorchRL reads it."""

    @property
    def _last_cursor_index(self) -> int | Tensor | None:
        if not self._is_packing:
            self.check_seam()
        return super()._last_cursor_index

    def record_cursor(self, row: int) -> None:
        """Tell TorchRL which row was written last."""
        self._set_last_cursor(row)

    @property
    def cursor(self) -> int:
        """The row that was written last; -1 if there is none."""
        row = LazyTensorStorage._last_cursor_index.fget(self)
        return -1 if row is None else int(row)

    def clear(self) -> None:
        """Forget the stored data; called by ``ReplayBuffer.empty``."""
        self.set_length(0)

    def _empty(self) -> None:
        self.clear()


class WriterBase(StateFiles, Writer):
    """``Writer`` with its private hooks under public names."""

    def __init__(self) -> None:
        super().__init__()
        self.write_count = 0  # rows written since the buffer was emptied

    @property
    def storage(self) -> Storage | None:
        """The storage that this writer fills, once registered."""
        return self._storage

    @property
    def _write_count(self) -> int:
        return self.write_count

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        self.write_count = value

    def notify(self, index: Tensor) -> None:
        """Tell every entity attached to the storage which cells were written."""
        for entity in attached(self._storage):
            entity.mark_update(index)

    def clear(self, empty_write_count: bool = True) -> None:
        """Move back to the start; called by ``ReplayBuffer.empty``."""
        if empty_write_count:
            self.write_count = 0

    def _empty(self, empty_write_count: bool = True) -> None:
        self.clear(empty_write_count)


class SamplerMeta(type(Sampler)):  # type: ignore[misc]
    """TorchRL's metaclass of samplers, which would take the argument ``replacement`` away before any constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a sampler; a TypeError if it is given ``replacement``."""
        if "replacement" in kwargs:
            value = kwargs["replacement"]
            remedy = f"Write with_replacement={value!r}."
            if "with_replacement" not in inspect.signature(cls).parameters:
                remedy = "Leave it out; UniformSampler and RecentSampler have with_replacement."
            raise TypeError(f"{cls.__name__} takes no argument replacement, got replacement={value!r}. {remedy}")
        return super().__call__(*args, **kwargs)


class SamplerHooks(StateFiles, OwnSignature, OwnGenerator, metaclass=SamplerMeta):
    """A sampler's private hooks under public names, with a generator of its own."""

    HANDED_OVER: ClassVar[tuple[str, ...]] = ("generator",)

    # A TorchRL buffer without a generator assigns None here; the sampler then keeps its own.
    @property
    def _rng(self) -> torch.Generator:
        return self.generator

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        if value is not None:
            self.generator = value

    def clear(self) -> None:
        """Forget what belongs to the stored data; called by ``ReplayBuffer.empty``."""

    def _empty(self) -> None:
        self.clear()

    def _init(self) -> None:  # TorchRL's prioritized sampler would build its compiled trees here
        self.clear()


class SamplerBase(SamplerHooks, SamplerWithoutReplacement):
    """``SamplerWithoutReplacement`` with its private hooks under public names."""

    drop_last: bool
    shuffle: bool
    len_storage: int

    @property
    def remaining(self) -> Tensor | None:
        """Indices that this epoch has not delivered yet."""
        return self._sample_list

    @remaining.setter
    def remaining(self, value: Tensor | None) -> None:
        self._sample_list = value

    def set_remaining_batches(self, count: int) -> None:
        """Tell TorchRL's prefetcher how many batches this epoch still holds."""
        self._remaining_batches = count

    def clear(self) -> None:
        """Forget the epoch; called by ``ReplayBuffer.empty``."""
        SamplerWithoutReplacement._empty(self)


class BufferBase(OwnSignature, OwnFiles, TensorDictReplayBuffer):
    """``TensorDictReplayBuffer`` with its private parts under public names."""

    sample_options: Mapping[str, Any] = {}
    """What the sampler is asked for by ``sample``, beside a number."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._order_prefetch()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rng": None, "own_rng": self._rng}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = state.pop("own_rng")
        super().__setstate__(state)
        if generator is not None:
            self.set_rng(generator)
        self._order_prefetch()

    def _order_prefetch(self) -> None:
        # With several threads, which batch is drawn first would be a matter of luck; samplers are locked anyway.
        if self._prefetch_cap > 1:
            several: ThreadPoolExecutor = self._prefetch_executor
            several.shutdown(wait=False)
            self._prefetch_executor: ThreadPoolExecutor = ThreadPoolExecutor(max_workers=1)

    def is_plain(self, batch_size: int | None) -> bool:
        """Return whether cells and transforms are all that a sample needs, so that TorchRL's long path is not taken."""
        own = self._batch_size
        return not (
            self._prefetch
            or self._pin_memory
            or self._sample_unit is not None
            or self._sample_dependency is not None
            or self._service_shutdown
            or self._collate_fn is not _collate_id
            or (own is None and batch_size is None)
            or not (own is None or batch_size is None or own == batch_size or self._warned_batch_size_conflict)
        )

    @property
    def transforms(self) -> Collection[Any]:
        """The transforms."""
        found: dict[str, Any] = self._transform._modules["transforms"]._modules  # ten times faster than by attribute
        return found.values()

    def read(self, batch_size: int | None, fetch: Callable[[Any, dict[Any, Any]], T], **options: Any) -> T:
        """Let the sampler draw, by these options, and ``fetch(index, info)`` read, under TorchRL's locks."""
        size = self._batch_size if batch_size is None else batch_size
        with self._replay_lock:
            if not self.shared:
                return fetch(*self._sampler.sample(self._storage, size, **options))
            with self._write_lock:
                return fetch(*self._sampler.sample(self._storage, size, **options))

    def write(self, data: TensorDictBase, *args: Any) -> Any:
        """Write under TorchRL's locks, without transforms; further arguments go to the writer."""
        return self.write_by(self._writer.extend, data, *args)

    def write_by(self, write: Callable[..., T], *args: Any) -> T:
        """Let ``write(*args)`` write under TorchRL's locks, and tell the sampler which cells it returned."""
        with self._replay_lock, self._write_lock:
            index = write(*args)
            self._sampler.extend(index)
        return index

    @property
    def prefetches(self) -> bool:
        """Whether batches are drawn ahead."""
        return bool(self._prefetch)

    def clear_sampler(self) -> None:
        """Let the sampler forget what belongs to the stored data."""
        self._sampler._empty()

    def set_write_lock(self, lock: AbstractContextManager[None]) -> None:
        """Use another lock, beside the one between threads."""
        self._write_lock = lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold TorchRL's locks, so that nothing is written, sampled or given another priority."""
        with self._replay_lock, self._write_lock:
            yield

    def look_up(self, index: Any, info: dict[Any, Any]) -> TensorDictBase:
        """Read cells on TorchRL's long path, taken where :meth:`read` is not; ``info`` are the sampler's entries."""
        raise NotImplementedError

    @pin_memory_output
    def _sample(self, batch_size: int) -> Drawn:
        # What TorchRL's does, but that the cells are looked up by a method, and transforms see them undisturbed.
        with self.locked():
            index, info = self._sampler.sample(self._storage, batch_size, **self.sample_options)
            if self._sample_unit is not None:
                index, info = self._sample_unit.expand(index, info, self._storage)
            info["index"] = index
            data = self._collate_fn(self.look_up(index, info))
            if self.transforms:
                with data.unlock_(), _set_dispatch_td_nn_modules(True):
                    data = self._transform(data)
        return data, info

    def give_priority(self, index: Tensor, priority: Tensor, **kwargs: Any) -> None:
        """Hand flat priorities to the sampler under TorchRL's locks, without preparing them again."""
        with self._replay_lock, self._write_lock:
            self._sampler.update_priority(index, priority, storage=self._storage, **kwargs)

    @property
    def generator(self) -> torch.Generator:
        """The random generator."""
        return self._rng

    def restore_generator(self, state: Mapping[str, Any]) -> None:
        """Set the generator to a state; the object stays the same, unless the state is of another device."""
        if str(self._rng.device) != state["device"]:
            self.set_rng(torch.Generator(state["device"]))
        self._rng.set_state(state["state"])

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler and hand it the generator, which TorchRL forgets; returns the old one."""
        previous = super().set_sampler(sampler)
        sampler._rng = self._rng
        return previous

    @contextmanager
    def at_rest(self) -> Iterator[list[tuple[TensorDictBase, dict[Any, Any]]]]:
        """Hold the locks, and yield the batches that were prefetched and not yet delivered."""
        with self._capture_prefetch_state(clone_queue=False) as state, self._write_lock:
            yield list(state["queue"])

    def put_prefetched(self, batches: list[tuple[TensorDictBase, dict[Any, Any]]]) -> None:
        """Replace the prefetched batches; a ValueError if there are more than ``prefetch`` allows."""
        held, cap = len(batches), self._prefetch_cap
        if held > cap:
            raise ValueError(f"The state holds {held} prefetched batches, this buffer has prefetch={cap}; raise it.")
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            state = {"version": 1, "capacity": self._prefetch_cap, "queue": batches}
            self._restore_prefetch_queue_locked(state, clone_queue=False)

    def drop_prefetched(self) -> None:
        """Wait for prefetched batches and forget them."""
        with self._futures_lock:
            self._synchronize_futures_locked()
            self._clear_prefetch_queue_locked()


def logger_connector(trainer: Any) -> Any:
    """Return what writes the rows of a Lightning trainer, by its ``log_metrics(metrics, step=None)``."""
    return trainer._logger_connector


has_global_hooks = _has_any_global_hook
"""Return whether hooks are registered that run with every torch module."""
