"""Summarise the contents of a buffer, find likely mistakes, and print or plot the result.

This package never changes a buffer, and reads large buffers in pieces.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
