"""Velora's buffers: transitions with recurrent states, their documented columns, and their files."""

from torchrl_lightning.velora.base import BufferBase
from torchrl_lightning.velora.experience import BatchExperience
from torchrl_lightning.velora.recurrent import RecurrentReplayBuffer

__all__ = ["BatchExperience", "BufferBase", "RecurrentReplayBuffer"]
