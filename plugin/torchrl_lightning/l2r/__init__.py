"""The buffers of l2r-lab: PPO and simple replay, with checks of their config files.

This package contains only the documented interface, which is built on ``rollout`` and ``replay``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
