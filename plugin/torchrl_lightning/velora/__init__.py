"""Velora's replay buffer with hidden states.

This package contains only the documented interface and its files. Both are built on ``replay``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
