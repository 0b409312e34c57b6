"""Collectors and a replay service on a Ray cluster.

Only the modules in this folder import Ray.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
