"""Demonstrations: stored and ranked trajectories, replayed in place of an environment's own episodes."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
