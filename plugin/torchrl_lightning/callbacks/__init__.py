"""Lightning callbacks: checkpoints, progress over environment frames, videos, reports and early stopping.

Only optional parts of a run belong here. DataModules train and evaluate without any callback.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
