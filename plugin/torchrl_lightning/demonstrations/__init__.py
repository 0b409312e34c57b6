"""PPO with demonstrations: store and rank trajectories, and replay them in place of an environment's own episodes.

The storage, writer, sampler and buffer of demonstrations are in this folder. Replay in environments is in ``replay``,
and files and recordings are in ``io``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
