"""Shared helpers for torch modules: device, unregistered attributes, method owner and evaluation mode."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn


def device_of(module: Any) -> torch.device | None:
    """Return the device of a module's first parameter or buffer, or None if the module has neither."""
    tensors = chain(module.parameters(), module.buffers()) if isinstance(module, nn.Module) else ()
    return next((tensor.device for tensor in tensors), None)


def set_unregistered(module: nn.Module, **parts: Any) -> None:
    """Set attributes without registering submodules: another module owns their weights and their mode."""
    module.__dict__.update(parts)


def owner_of(instance: object, name: str) -> type | None:
    """Return the class that defines a method of an object; return None for a missing or instance attribute."""
    if name in vars(instance):
        return None
    return next((cls for cls in type(instance).__mro__ if name in vars(cls)), None)


class EvaluationMode:
    """Context manager that sets modules to evaluation mode and restores the mode of each submodule.

    The constructor lists the submodules, so reuse the object if the block is entered often. The attribute ``borrowed``
    of a module lists modules that it uses but does not own. Arguments that are not modules are ignored.
    """

    def __init__(self, *modules: object) -> None:
        owned = [submodule for module in modules if isinstance(module, nn.Module) for submodule in module.modules()]
        borrowed = [
            submodule for owner in owned for module in getattr(owner, "borrowed", ()) for submodule in module.modules()
        ]
        self._modules = owned + borrowed
        self._switched: list[list[nn.Module]] = []

    def __enter__(self) -> None:
        """Set all modules in training mode to evaluation mode."""
        switched: list[nn.Module] = []
        self._switched.append(switched)
        # `train()` would visit the children again; setattr would cost a microsecond per module.
        for module in self._modules:
            if module.training:
                module.__dict__.update(training=False)
                switched.append(module)

    def __exit__(self, *error: object) -> None:
        """Set the modules that ``__enter__`` changed back to training mode."""
        for module in self._switched.pop():
            module.__dict__.update(training=True)
