"""Replay: rings of cells, their writer and episode index, samplers, and the buffers over them."""

from torchrl_lightning.replay.buffer import ExperienceBuffer
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.experience import BatchExperience
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.recurrent import RecurrentReplayBuffer
from torchrl_lightning.replay.sequences import SequenceSampler
from torchrl_lightning.replay.simple import SimpleReplayBuffer
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.uniform import UniformSampler
from torchrl_lightning.replay.velora_base import BufferBase
from torchrl_lightning.replay.writer import RingWriter

__all__ = [
    "BatchExperience",
    "BufferBase",
    "EpisodeIndex",
    "ExperienceBuffer",
    "PrioritizedSampler",
    "RecurrentReplayBuffer",
    "RingStorage",
    "RingWriter",
    "SequenceSampler",
    "SimpleReplayBuffer",
    "UniformSampler",
]
