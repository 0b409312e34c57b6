"""Buffer of model-based training: transitions, training and validation parts, prediction targets and scalers.

The networks that learn from this buffer are in ``agents/model_based``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
