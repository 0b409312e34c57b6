"""Summarize a buffer in pieces, find likely mistakes, and print or draw the result."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
