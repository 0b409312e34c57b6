"""On-policy buffers: store one rollout, estimate its advantages, and split it into mini-batches."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
