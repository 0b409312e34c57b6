"""Use a trained policy outside of training: load, publish and export it.

This package does not train. It reads checkpoints, and builds agents only from the configs in them.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
