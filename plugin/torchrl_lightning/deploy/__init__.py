"""Use a trained policy outside of training: load, publish and export it.

Nothing here trains. The folder reads checkpoints and knows agents only by their configs.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
