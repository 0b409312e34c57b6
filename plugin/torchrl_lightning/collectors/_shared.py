"""Weights in one block of shared memory: the learner publishes them, acting processes fetch them."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 16
_PATIENCE = 30.0  # seconds; a copy takes milliseconds, so a process that holds the lock longer has died


class SharedWeights:
    """A copy of a module's parameters and buffers in shared memory, with a version number.

    Pass it to a process as an argument when the process is started.

    Args:
        module: The module whose weights are published.
        context: The multiprocessing context of the processes.
    """

    def __init__(self, module: nn.Module | None, context: BaseContext) -> None:
        self._layout: list[tuple[str, torch.Size, torch.dtype, int, int]] = []
        size = 0
        for name, value in _tensors(module).items():
            length = value.numel() * value.element_size()
            self._layout.append((name, value.shape, value.dtype, size, length))
            size += -(length // -_ALIGNMENT) * _ALIGNMENT
        self._bytes = torch.zeros(max(size, 1), dtype=torch.uint8).share_memory_()
        self._version = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._lock: Any = context.Lock()
        if module is not None:
            self.publish(module, 0)

    def publish(self, module: nn.Module | None, version: int) -> None:
        """Copy a module's weights into shared memory as a new version."""
        source = _tensors(module)
        with self._locked():
            for name, view in self._views():
                view.copy_(source[name])
            self._version.fill_(version)

    def fetch(self, module: nn.Module | None, known: int) -> int:
        """Copy the published weights into a module unless it already has them, and return their version."""
        with self._locked():
            version = int(self._version.item())
            if version != known:
                target = _tensors(module)
                for name, view in self._views():
                    target[name].copy_(view)
        return version

    def _views(self) -> list[tuple[str, Tensor]]:
        return [
            (name, self._bytes[start : start + length].view(dtype).view(shape))
            for name, shape, dtype, start, length in self._layout
        ]

    def _locked(self) -> _Held:
        return _Held(self._lock)


class _Held:
    """A lock with a timeout, because a process that was killed never releases it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_PATIENCE):
            raise RuntimeError("A process died while it copied the policy's weights; start the collector anew.")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _tensors(module: nn.Module | None) -> dict[str, Tensor]:
    if module is None:
        return {}
    return {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
