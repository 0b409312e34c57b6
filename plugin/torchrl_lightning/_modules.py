"""What every room asks of a torch module: where it computes, and that it acts and estimates in evaluation mode."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn


def device_of(module: Any) -> torch.device | None:
    """Return the device of a module's first parameter or buffer; ``None`` where it has neither."""
    tensors = chain(module.parameters(), module.buffers()) if isinstance(module, nn.Module) else ()
    return next((tensor.device for tensor in tensors), None)


def hold(module: nn.Module, **parts: Any) -> None:
    """Set attributes of a module without registering what is one itself: another owns its weights and its mode."""
    module.__dict__.update(parts)


def owner_of(thing: object, name: str) -> type | None:
    """Return the class whose method of a name a thing has; None if it has none, or one of its own."""
    if name in vars(thing):
        return None
    return next((kind for kind in type(thing).__mro__ if name in vars(kind)), None)


class EvaluationMode:
    """Put modules into evaluation mode for a block, and each submodule back into its own mode afterwards.

    The submodules are listed once, when this is built; keep the object where the block is entered often. A module names
    others that it computes with but does not own in an attribute ``borrowed``. What is no module is ignored.
    """

    def __init__(self, *modules: object) -> None:
        owned = [part for module in modules if isinstance(module, nn.Module) for part in module.modules()]
        borrowed = [part for owner in owned for module in getattr(owner, "borrowed", ()) for part in module.modules()]
        self._modules = owned + borrowed
        self._switched: list[list[nn.Module]] = []

    def __enter__(self) -> None:
        """Switch what is in training mode."""
        switched: list[nn.Module] = []
        self._switched.append(switched)
        # Not by `train()`, which visits the children again, nor by setattr, which costs a microsecond for each module.
        for module in self._modules:
            if module.training:
                module.__dict__.update(training=False)
                switched.append(module)

    def __exit__(self, *error: object) -> None:
        """Switch it back."""
        for module in self._switched.pop():
            module.__dict__.update(training=True)
