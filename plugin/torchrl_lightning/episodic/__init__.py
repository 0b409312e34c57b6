"""ALF's replay buffer of several environments, with episodes, returns, relabelled goals and stacked frames.

The rings, their index, and the samplers that do not need episodes are in ``replay``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
