"""The private names of other libraries that we touch, behind public ones.

TorchRL's component classes are extended through private hooks (``_empty``, ``_init``, ``_len``, ...). They are gathered
here, so that an upgrade which moves one of them breaks this file and its contract tests instead of silently changing
behaviour somewhere else. How the parts use them is written in their packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.storages import LazyTensorStorage, Storage
from torchrl.data.replay_buffers.storages.utils import _collate_id
from torchrl.data.replay_buffers.utils import pin_memory_output
from torchrl.data.replay_buffers.writers import Writer

from torchrl_lightning.files import OwnFiles, StateFiles
from torchrl_lightning.parts import ConstructorSignature, OwnGenerator, is_spawning

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


def alias(name: str, *names: str) -> Any:
    """Show a private attribute, or several as a tuple, under a public name; reading it runs no Python code."""
    return property(attrgetter(name, *names), lambda holder, value: setattr(holder, name, value))


class StorageBase(OwnFiles, LazyTensorStorage):
    """``LazyTensorStorage`` with its private hooks under public names."""

    generator = alias("_rng")
    """The buffer's random generator."""
    record_cursor = alias("_set_last_cursor")
    """Tell TorchRL which row was written last."""
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

    def move_counters(self, make: Callable[[str, int], Any]) -> None:
        """Move length, revision and cursor into what ``make(kind, number)`` builds in memory that processes share."""
        length, revision, cursor = len(self), self._mutation_revision, self.cursor
        self._shared = True
        self._len_value = make("i", length)
        self._mutation_revision_value = make("q", revision)
        self._last_cursor_index_value = make("q", cursor)

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

    storage = alias("_storage")
    """The storage that this writer fills, once registered."""
    _write_count = alias("write_count")

    def __init__(self) -> None:
        super().__init__()
        self.write_count = 0  # rows written since the buffer was emptied

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


class SamplerHooks(StateFiles, OwnGenerator, metaclass=SamplerMeta):
    """A sampler's private hooks under public names, with a generator of its own."""

    __signature__ = ConstructorSignature()
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

    remaining = alias("_sample_list")
    """Indices that this epoch has not delivered yet."""
    remaining_batches = alias("_remaining_batches")
    """How many batches this epoch still holds, for TorchRL's prefetcher."""

    def clear(self) -> None:
        """Forget the epoch; called by ``ReplayBuffer.empty``."""
        SamplerWithoutReplacement._empty(self)


class BufferBase(TensorDictReplayBuffer):
    """``TensorDictReplayBuffer`` with its private parts under public names."""

    generator = alias("_rng")
    """The random generator."""
    thread_lock = alias("_replay_lock")
    """The lock between threads."""
    write_lock = alias("_write_lock")
    """The lock of those who write, also between processes."""
    prefetches = alias("_prefetch")
    """Whether batches are drawn ahead."""
    prefetch_cap = alias("_prefetch_cap")
    """How many batches are drawn ahead at most."""
    prefetch_threads = alias("_prefetch_executor")
    """What draws them."""
    collate = alias("_collate_fn")
    """What TorchRL calls for a batch that was looked up."""
    unit = alias("_sample_unit")
    """What TorchRL makes of sampled cells, such as slices; None for cells."""
    detours = alias("_prefetch", "_pin_memory", "_service_shutdown", "_sample_unit", "_sample_dependency")
    """What TorchRL does in its own way: three switches, and two objects or None."""
    batch_sizes = alias("_batch_size", "_warned_batch_size_conflict")
    """The batch size, and whether TorchRL has warned of another one in ``sample``."""

    def clear_sampler(self) -> None:
        """Let the sampler forget what belongs to the stored data."""
        self._sampler._empty()

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler and hand it the generator, which TorchRL forgets; returns the old one."""
        previous = super().set_sampler(sampler)
        sampler._rng = self._rng
        return previous

    @contextmanager
    def paused_prefetch(self) -> Iterator[list[tuple[TensorDictBase, dict[Any, Any]]]]:
        """Hold the lock between threads, and yield the batches that were prefetched and not yet delivered."""
        with self._capture_prefetch_state(clone_queue=False) as state:
            yield list(state["queue"])

    def set_prefetched(self, batches: Sequence[tuple[TensorDictBase, dict[Any, Any]]]) -> None:
        """Wait for batches that are being prefetched, and put these in their place."""
        with self._futures_lock:
            self._synchronize_futures_locked()
            self._clear_prefetch_queue_locked()
            if batches:
                state = {"version": 1, "capacity": self._prefetch_cap, "queue": list(batches)}
                self._restore_prefetch_queue_locked(state, clone_queue=False)

    def draw_batch(self, batch_size: int) -> Drawn:
        """Draw a batch in TorchRL's way."""
        raise NotImplementedError

    @pin_memory_output
    def _sample(self, batch_size: int) -> Drawn:
        return self.draw_batch(batch_size)


def should_validate(trainer: Any) -> bool:
    """Return whether a Lightning trainer evaluates behind the batch that ends."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


# ---- functions and classes under public names; those of attrgetter run no Python code ------------------------------

logger_connector = attrgetter("_logger_connector")
"""Return what writes the rows of a Lightning trainer, by its ``log_metrics(metrics, step=None)``."""
has_global_hooks = _has_any_global_hook
"""Return whether hooks are registered that run with every torch module."""
forward_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks")
"""Return the hooks that run with a torch module's forward pass: two dicts."""
interpolate_all_ = torch._foreach_lerp_
"""Move tensors towards others by a fraction."""
env_observations = attrgetter("_env_obs")
"""Return the observation of each environment of gymnasium's ``SyncVectorEnv``."""
vector_arrays = attrgetter("_env_obs", "_rewards", "_terminations", "_truncations")
"""Return these observations, and the arrays of rewards and ends."""
info_adder = attrgetter("_add_info")
"""Return the method of a vector environment of gymnasium's that adds an environment's info."""
serial_envs = attrgetter("_envs")
"""Return the environments of TorchRL's ``SerialEnv``."""
dispatches_modules = _set_dispatch_td_nn_modules
"""Let TensorDict modules take plain tensors, or not, for a block."""
collates_nothing = _collate_id
"""What a buffer of TensorDicts does with a batch that was looked up."""


def persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of the buffers of a torch module itself that its state dict holds."""
    return module._buffers.keys() - module._non_persistent_buffers_set


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the buffers of a torch module itself, by name; reading one as an attribute takes ten times as long."""
    return module._buffers
