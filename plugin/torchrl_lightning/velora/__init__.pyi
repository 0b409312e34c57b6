"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .experience import BatchExperience as BatchExperience
from .recurrent import RecurrentReplayBuffer as RecurrentReplayBuffer
from .velora_buffer import BufferBase as BufferBase
