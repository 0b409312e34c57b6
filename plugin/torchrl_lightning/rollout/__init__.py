"""On-policy buffers: store one rollout, estimate its advantages, and split it into mini-batches.

PyTorchRL's vanilla, GAE and V-trace buffers are here. PPO with demonstrations is in ``demonstrations``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
