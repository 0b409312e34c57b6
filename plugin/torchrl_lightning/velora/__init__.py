"""Buffers with Velora's interface: transitions with recurrent states, documented columns, and files."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
