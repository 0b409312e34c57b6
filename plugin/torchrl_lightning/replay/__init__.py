"""Replay: rings of cells, their writer and episode index, samplers, and the buffers over them."""

from torchrl_lightning.replay.buffer import ExperienceBuffer
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.sequences import SequenceSampler
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.uniform import UniformSampler
from torchrl_lightning.replay.writer import RingWriter

__all__ = [
    "EpisodeIndex",
    "ExperienceBuffer",
    "PrioritizedSampler",
    "RingStorage",
    "RingWriter",
    "SequenceSampler",
    "UniformSampler",
]
