"""Training data for dynamics models: inputs and targets, a holdout split, and a replay buffer of transitions."""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
