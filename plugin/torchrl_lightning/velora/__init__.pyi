"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.velora.base import BufferBase as BufferBase
from torchrl_lightning.velora.experience import BatchExperience as BatchExperience
from torchrl_lightning.velora.recurrent import RecurrentReplayBuffer as RecurrentReplayBuffer
