"""Episodic replay after ALF: rings of several environments, what is known of their episodes, and samplers over them."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
