"""Compiled loops over arrays: scans, segment trees, priorities, windows and copies of rows.

Kernels know arrays only. Code that knows TensorDicts or buffers belongs in the packages above.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
