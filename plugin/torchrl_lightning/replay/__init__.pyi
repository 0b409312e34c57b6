"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.replay.buffer import ExperienceBuffer as ExperienceBuffer
from torchrl_lightning.replay.episode_index import EpisodeIndex as EpisodeIndex
from torchrl_lightning.replay.prioritized import PrioritizedSampler as PrioritizedSampler
from torchrl_lightning.replay.sequences import SequenceSampler as SequenceSampler
from torchrl_lightning.replay.storage import RingStorage as RingStorage
from torchrl_lightning.replay.uniform import UniformSampler as UniformSampler
from torchrl_lightning.replay.writer import RingWriter as RingWriter
