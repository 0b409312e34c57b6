"""A buffer that holds TorchRL's locks in its methods and samples batches in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.files import NoCheckpointerMixin
from torchrl_lightning._core.mixins import SignatureDescriptor
from torchrl_lightning._core.torchrl_compat import BufferBase, SampledBatch, set_module_dispatch
from torchrl_lightning._core.tree_checks import TorchRLState
from torchrl_lightning.replay.state_checks import pack_batch, sampler_state


class LockedBuffer(NoCheckpointerMixin, BufferBase):
    """A buffer that reads, writes and sets priorities under TorchRL's locks, without TorchRL's longer paths."""

    __signature__ = SignatureDescriptor()
    shared: bool
    sample_options: Mapping[str, Any] = {}
    """Further arguments that ``sample`` passes to the sampler."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._order_prefetch()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rng": None, "generator": self.generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = state.pop("generator")
        super().__setstate__(state)
        if generator is not None:
            self.set_rng(generator)
        self._order_prefetch()

    def _order_prefetch(self) -> None:
        # Use one thread. With several threads, the order of batches is random, and the locks let only one thread work.
        if self.prefetch_cap > 1:
            self.prefetch_threads.shutdown(wait=False)
            self.prefetch_threads = ThreadPoolExecutor(max_workers=1)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold TorchRL's locks, which block writes, samples and changes of priorities."""
        with self.thread_lock, self.write_lock:
            yield

    def set_priority(self, index: Tensor, priority: Tensor, **kwargs: Any) -> None:
        """Pass flat priorities to the sampler under TorchRL's locks, without the conversions of TorchRL's method."""
        with self.thread_lock, self.write_lock:
            self._sampler.update_priority(index, priority, storage=self._storage, **kwargs)

    def look_up(self, index: Any, info: dict[Any, Any]) -> TensorDictBase:
        """Read cells for a sample on TorchRL's longer path; ``info`` contains the entries that the sampler returned."""
        raise NotImplementedError

    def draw_batch(self, batch_size: int) -> SampledBatch:
        """Sample a batch as TorchRL does, but read cells by :meth:`look_up` and run transforms under the locks."""
        with self.locked():
            index, info = self._sampler.sample(self._storage, batch_size, **self.sample_options)
            if self.unit is not None:
                index, info = self.unit.expand(index, info, self._storage)
            info["index"] = index
            data = self.collate(self.look_up(index, info))
            if len(self._transform):
                with data.unlock_(), set_module_dispatch(True):
                    data = self._transform(data)
        return data, info

    @contextmanager
    def paused(self) -> Iterator[list[tuple[TensorDictBase, dict[Any, Any]]]]:
        """Hold the locks, and yield the prefetched batches that were not yet returned."""
        with self.paused_prefetch() as batches, self.write_lock:
            yield batches

    # ---- state of TorchRL's components ------------------------------------------------------------------------------

    @property
    def _sampler_kind(self) -> str:
        return type(self._sampler).__name__

    @property
    def _sampler_state(self) -> Any:
        return sampler_state(self._sampler, self.storage)

    @property
    def _transform_state(self) -> TorchRLState:
        return TorchRLState("transforms", self.transform, self.storage)

    @property
    def _generator_state(self) -> dict[str, Any]:
        return {"device": str(self.generator.device), "state": self.generator.get_state()}

    @_generator_state.setter
    def _generator_state(self, state: Mapping[str, Any]) -> None:
        if str(self.generator.device) != state["device"]:
            self.set_rng(torch.Generator(state["device"]))
        self.generator.set_state(state["state"])  # keeps the generator object if the device is the same

    @property
    def _prefetched_batches(self) -> list[dict[str, Any]]:
        with self.paused() as prefetched:
            return [pack_batch(batch, info) for batch, info in prefetched]

    @_prefetched_batches.setter
    def _prefetched_batches(self, batches: list[tuple[TensorDictBase, dict[Any, Any]]]) -> None:
        if len(batches) > self.prefetch_cap:
            count, prefetch = len(batches), self.prefetch_cap
            raise ValueError(f"prefetch must be at least {count}, the prefetched batches of the state, got {prefetch}.")
        self.set_prefetched(batches)
