"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .base import BufferBase as BufferBase
from .experience import BatchExperience as BatchExperience
from .recurrent import RecurrentReplayBuffer as RecurrentReplayBuffer
