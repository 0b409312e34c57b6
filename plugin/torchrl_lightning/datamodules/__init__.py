"""Lightning DataModules: each joins environments, a collector, a buffer and a frame counter.

The DataModules themselves are in this folder. Their helpers are in ``_run``, and batches from other sources than one
buffer in ``sources``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
