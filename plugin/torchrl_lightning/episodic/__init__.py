"""Episodic replay after ALF: ring buffers of several environments, their episodes, and samplers."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
