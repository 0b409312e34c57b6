"""Demonstrations: trajectories that are kept, ranked, and replayed in place of an environment's own episodes."""

from torchrl_lightning.demonstrations.trajectory import Demonstration

__all__ = ["Demonstration"]
