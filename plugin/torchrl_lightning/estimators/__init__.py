"""Estimators of returns and advantages as plain functions of tensors.

Transforms and buffers that call them are in ``rollout``; the recurrences that they use are in ``kernels``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
