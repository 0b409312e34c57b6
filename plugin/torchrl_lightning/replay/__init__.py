"""Replay buffers: ring storage, ring writer, episode index and samplers.

Every off-policy buffer is built from these parts. On-policy rollouts are in ``rollout``, and ALF's buffer is in
``episodic``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
