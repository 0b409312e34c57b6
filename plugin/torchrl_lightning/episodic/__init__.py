"""ALF's replay buffer of several environments, with episodes, returns, relabelled goals and stacked frames.

The rings, the episode index and the samplers of steps and windows are in ``replay``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
