"""Environments: how to build, wrap, check and step them, and which policies act in them.

Code belongs here if it knows environments or the actions that they receive. Collectors, which store the steps, are in
``collectors``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
