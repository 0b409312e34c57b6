"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .buffer import ExperienceBuffer as ExperienceBuffer
from .episode_index import EpisodeIndex as EpisodeIndex
from .prioritized import PrioritizedSampler as PrioritizedSampler
from .sequences import SequenceSampler as SequenceSampler
from .storage import RingStorage as RingStorage
from .uniform import UniformSampler as UniformSampler
from .writer import RingWriter as RingWriter
