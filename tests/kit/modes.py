"""Modules with dropout, so that training and evaluation mode give different results."""

from __future__ import annotations

from typing import Any

from torch import nn


def dropping(module: Any) -> Any:
    """Put dropout after each hidden activation."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Tanh | nn.ReLU):
                setattr(part, name, nn.Sequential(child, nn.Dropout(0.5)))
    return module.train()
