"""Summarise the contents of a buffer, find likely mistakes, and print or draw the result.

Nothing here changes a buffer, and large buffers are read in pieces.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
