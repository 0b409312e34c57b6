"""Compiled kernels, and the segment trees and scans built on them; this package does not depend on buffers."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
