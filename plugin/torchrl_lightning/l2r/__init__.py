"""Buffers with l2r-lab's interface: store single steps, sample random batches, and read typed configs."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
