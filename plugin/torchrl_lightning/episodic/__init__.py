"""Episodic replay after ALF: samplers over the rings of several environments."""

from torchrl_lightning.episodic.recent import RecentSampler

__all__ = ["RecentSampler"]
