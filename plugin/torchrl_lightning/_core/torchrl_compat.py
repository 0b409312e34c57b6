"""Public wrappers for private names of other libraries.

This package extends TorchRL's components through private hooks (``_empty``, ``_init``, ``_len``, ...). They are
collected in this file, so that an incompatible upgrade breaks this file and its contract tests instead of silently
changing other code.
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

from torchrl_lightning._core.files import NoCheckpointerMixin, StateFilesMixin
from torchrl_lightning._core.mixins import GeneratorMixin, SignatureDescriptor, is_spawning

T = TypeVar("T")
C = TypeVar("C", bound=TensorClass)
SampledBatch = tuple[Any, dict[Any, Any]]
"""A batch and the entries added by the sampler."""


def new_tensordict(
    source: dict[str, Any],
    batch_size: torch.Size,
    names: Sequence[str | None] | None = None,
    device: torch.device | None = None,
) -> TensorDict:
    """Build a TensorDict without checking its entries, several times faster than the constructor.

    The keys of ``source`` must be strings and its values tensors or TensorDicts with leading dimensions ``batch_size``.
    If ``device`` is given, all values must be on it.
    """
    # Like ``TensorDict._new_unsafe``, without visiting each entry.
    data = TensorDict.__new__(TensorDict)
    data._tensordict = dict(source)
    data._batch_size, data._device, data._td_dim_names = batch_size, device, names
    return data


def new_tensorclass(cls: type[C], source: TensorDictBase, others: dict[str, Any]) -> C:
    """Build a TensorClass from ``source`` and all non-tensor attributes ``others`` without checking them."""
    instance = object.__new__(cls)
    instance.__dict__.update(_tensordict=source, _non_tensordict=others, _is_initialized=True)
    return instance


def entries_of(data: TensorDictBase) -> dict[str, Any]:
    """Return the entries of one level of a TensorDict; do not change the result, which may be the internal dict."""
    return data._tensordict if type(data) is TensorDict else dict(data.items())


def set_entry(data: TensorDictBase, name: str, value: Tensor) -> None:
    """Set an entry of matching shape and device; skip the checks of ``set`` for an unlocked plain TensorDict."""
    if type(data) is TensorDict and not data.is_locked:
        data._tensordict[name] = value
    else:
        data.set(name, value)


def attached_entities(storage: Storage) -> Iterator[Any]:
    """Iterate over the entities that are attached to a storage and are notified of written cells."""
    return iter(storage._attached_entities_iter())


def alias(name: str, *names: str) -> Any:
    """Return a property for one private attribute, or a read-only property for several; reading runs no Python code."""
    return property(attrgetter(name, *names), None if names else lambda instance, value: setattr(instance, name, value))


class StorageBase(NoCheckpointerMixin, LazyTensorStorage):
    """``LazyTensorStorage`` with public names for its private hooks."""

    generator = alias("_rng")
    """The buffer's random generator."""
    record_cursor = alias("_set_last_cursor")
    """Set TorchRL's index of the last written row."""
    _own_length = 0
    _shared = _is_packing = False

    @property
    def checkpointer(self) -> Any:
        """TorchRL's checkpointer; this package writes files in its own format."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        if value is not None:
            self.register_save_hook(value)
        self._checkpointer = self._default_checkpointer()

    def _make_init_directory(self) -> None:
        # A multi-collector without a policy calls this, so that a worker allocates the cells in files of TorchRL's.
        self.shared_init = False
        for name in ("_init_lock", "_init_event"):  # locks, which copies and states cannot contain
            self.__dict__.pop(name, None)
        raise ValueError(
            f"A {type(self).__name__} must have its memory before a collector starts workers, but this collector has "
            "only a policy_factory, so the entries of a row are unknown. Call buffer.share(example=row) of an "
            "ExperienceBuffer first, or also pass policy=."
        )

    @property
    def data(self) -> TensorDictBase | None:
        """All allocated cells, including empty ones, or None before allocation."""
        return self._storage

    @data.setter
    def data(self, value: TensorDictBase | None) -> None:
        self._storage = value
        self.initialized = value is not None
        self.__dict__.pop("_total_shape_value", None)

    # TorchRL always keeps the length in shared memory. Here the length is private, like positions and cells, until the
    # storage is shared.
    @property
    def _len(self) -> Any:
        return LazyTensorStorage._len.fget(self) if self._shared else self._own_length

    @_len.setter
    def _len(self, length: Any) -> None:
        if self._shared:
            LazyTensorStorage._len.fset(self, length)
        else:
            self._own_length = length

    def move_counters(self, make_counter: Callable[[str, int], Any]) -> None:
        """Move length, revision and cursor into shared memory; ``make_counter(kind, number)`` builds each counter."""
        length, revision, cursor = len(self), self._mutation_revision, self.cursor
        self._shared = True
        self._len_value = make_counter("i", length)
        self._mutation_revision_value = make_counter("q", revision)
        self._last_cursor_index_value = make_counter("q", cursor)

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
        """Set the number of filled cells and increment the revision."""
        if len(self) != length:
            self._len = length
        self._bump_mutation_revision()

    def bump_revision(self) -> None:
        """Increment the revision without its lock, because any change of the number is enough."""
        self._mutation_revision_value.get_obj().value += 1

    def draw(self, count: int) -> Tensor:
        """Sample cells uniformly."""
        return super()._rand_given_ndim(count)

    def _rand_given_ndim(self, batch_size: int) -> Tensor:
        return self.draw(batch_size)

    def check_last_cursor(self) -> None:
        """Raise an error if TorchRL must not read the last written cell; called before each read."""

    @property
    def _last_cursor_index(self) -> int | Tensor | None:
        if not self._is_packing:
            self.check_last_cursor()
        return super()._last_cursor_index

    @property
    def cursor(self) -> int:
        """The last written row, or -1 before the first write."""
        row = LazyTensorStorage._last_cursor_index.fget(self)
        return -1 if row is None else int(row)

    def clear(self) -> None:
        """Delete the stored data; called by ``ReplayBuffer.empty``."""
        self.set_length(0)

    def _empty(self) -> None:
        self.clear()


class WriterBase(StateFilesMixin, Writer):
    """``Writer`` with public names for its private hooks."""

    storage = alias("_storage")
    """The registered storage."""
    _write_count = alias("write_count")

    def __init__(self) -> None:
        super().__init__()
        self.write_count = 0  # rows written since the buffer was last emptied

    def notify(self, index: Tensor) -> None:
        """Mark the written cells as updated in every entity that is attached to the storage."""
        for entity in attached_entities(self._storage):
            entity.mark_update(index)

    def clear(self, empty_write_count: bool = True) -> None:
        """Reset the writer; called by ``ReplayBuffer.empty``."""
        if empty_write_count:
            self.write_count = 0

    def _empty(self, empty_write_count: bool = True) -> None:
        self.clear(empty_write_count)


class SamplerMeta(type(Sampler)):  # type: ignore[misc]
    """Metaclass that rejects ``replacement``, because TorchRL's metaclass hides this argument from the constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a sampler; raise TypeError for the argument ``replacement``."""
        if "replacement" in kwargs:
            value = kwargs["replacement"]
            remedy = f"Write with_replacement={value!r}."
            if "with_replacement" not in inspect.signature(cls).parameters:
                remedy = "Leave it out; UniformSampler and RecentSampler have with_replacement."
            raise TypeError(f"{cls.__name__} takes no argument replacement, got replacement={value!r}. {remedy}")
        return super().__call__(*args, **kwargs)


class SamplerHooks(StateFilesMixin, GeneratorMixin, metaclass=SamplerMeta):
    """Public names for a sampler's private hooks, and the sampler's own generator."""

    __signature__ = SignatureDescriptor()
    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("generator",)

    # A TorchRL buffer without a generator assigns None; the sampler then keeps its own generator.
    @property
    def _rng(self) -> torch.Generator:
        return self.generator

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        if value is not None:
            self.generator = value

    def clear(self) -> None:
        """Delete state that depends on the stored data; called by ``ReplayBuffer.empty``."""

    def _empty(self) -> None:
        self.clear()

    def _init(self) -> None:  # TorchRL's prioritized sampler would build its compiled trees
        self.clear()


class SamplerBase(SamplerHooks, SamplerWithoutReplacement):
    """``SamplerWithoutReplacement`` with public names for its private hooks."""

    drop_last: bool
    shuffle: bool
    len_storage: int

    remaining = alias("_sample_list")
    """Indices not yet sampled in this epoch."""
    remaining_batches = alias("_remaining_batches")
    """Number of batches left in this epoch, for TorchRL's prefetcher."""

    def clear(self) -> None:
        """Reset the epoch; called by ``ReplayBuffer.empty``."""
        SamplerWithoutReplacement._empty(self)


class BufferBase(TensorDictReplayBuffer):
    """``TensorDictReplayBuffer`` with public names for its private attributes."""

    generator = alias("_rng")
    """The random generator."""
    thread_lock = alias("_replay_lock")
    """The lock for threads."""
    write_lock = alias("_write_lock")
    """The lock for writers in all threads and processes."""
    prefetches = alias("_prefetch")
    """Whether batches are prefetched."""
    prefetch_cap = alias("_prefetch_cap")
    """Maximum number of prefetched batches."""
    prefetch_threads = alias("_prefetch_executor")
    """The executor of the prefetch threads."""
    collate = alias("_collate_fn")
    """The collate function for batches read from the storage."""
    unit = alias("_sample_unit")
    """TorchRL's sample unit, for example slices; None for single cells."""
    sample_path_settings = alias("_prefetch", "_pin_memory", "_service_shutdown", "_sample_unit", "_sample_dependency")
    """Attributes that require TorchRL's own sample path if they are set: three flags and two optional objects."""
    batch_sizes = alias("_batch_size", "_warned_batch_size_conflict")
    """The batch size, and whether TorchRL has warned about a different batch size in ``sample``."""

    def clear_sampler(self) -> None:
        """Delete the sampler's state that depends on the stored data."""
        self._sampler._empty()

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler and return the old sampler; also set the new sampler's generator, which TorchRL omits."""
        previous = super().set_sampler(sampler)
        sampler._rng = self._rng
        return previous

    @contextmanager
    def paused_prefetch(self) -> Iterator[list[tuple[TensorDictBase, dict[Any, Any]]]]:
        """Hold the lock for threads, and yield the prefetched batches that are not yet delivered."""
        with self._capture_prefetch_state(clone_queue=False) as state:
            yield list(state["queue"])

    def set_prefetched(self, batches: Sequence[tuple[TensorDictBase, dict[Any, Any]]]) -> None:
        """Wait for running prefetches, and replace the prefetched batches by ``batches``."""
        with self._futures_lock:
            self._synchronize_futures_locked()
            self._clear_prefetch_queue_locked()
            if batches:
                state = {"version": 1, "capacity": self._prefetch_cap, "queue": list(batches)}
                self._restore_prefetch_queue_locked(state, clone_queue=False)

    def draw_batch(self, batch_size: int) -> SampledBatch:
        """Sample a batch for TorchRL's sample path."""
        raise NotImplementedError

    @pin_memory_output
    def _sample(self, batch_size: int) -> SampledBatch:
        return self.draw_batch(batch_size)


def should_validate(trainer: Any) -> bool:
    """Return whether a Lightning trainer runs validation after the current batch."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


# ---- public names for private functions; attrgetter does not run Python code ---------------------------------------

logger_connector = attrgetter("_logger_connector")
"""Return the logger connector of a Lightning trainer, with the method ``log_metrics(metrics, step=None)``."""
has_global_hooks = _has_any_global_hook
"""Return whether global module hooks are registered."""
forward_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks")
"""Return the forward hooks and the forward pre-hooks of a torch module as two dicts."""
foreach_lerp_ = torch._foreach_lerp_
"""Interpolate lists of tensors in place towards other tensors by a weight."""
env_observations = attrgetter("_env_obs")
"""Return the observation of each environment of Gymnasium's ``SyncVectorEnv``."""
vector_arrays = attrgetter("_env_obs", "_rewards", "_terminations", "_truncations")
"""Return the observations, rewards, terminations and truncations of Gymnasium's ``SyncVectorEnv``."""
info_adder = attrgetter("_add_info")
"""Return the method of a Gymnasium vector environment that adds the info of one environment."""
serial_envs = attrgetter("_envs")
"""Return the environments of TorchRL's ``SerialEnv``."""
set_module_dispatch = _set_dispatch_td_nn_modules
"""Enable or disable plain tensor arguments of TensorDict modules in a ``with`` block."""
identity_collate = _collate_id
"""The default collate function of a buffer of TensorDicts, which returns the batch unchanged."""


def persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of a torch module's own buffers that its state dict contains."""
    return module._buffers.keys() - module._non_persistent_buffers_set


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return a torch module's own buffers by name; reading them as attributes would take ten times longer."""
    return module._buffers


def is_transformed() -> bool:
    """Return whether torch compiles the running code, or transforms it by ``torch.func``, for example by ``vmap``."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
