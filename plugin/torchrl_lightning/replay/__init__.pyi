"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .episode_index import EpisodeIndex as EpisodeIndex
from .prioritized import PrioritizedSampler as PrioritizedSampler
from .replay_buffer import ExperienceBuffer as ExperienceBuffer
from .ring_storage import RingStorage as RingStorage
from .ring_writer import RingWriter as RingWriter
from .sequences import SequenceSampler as SequenceSampler
from .uniform import UniformSampler as UniformSampler
