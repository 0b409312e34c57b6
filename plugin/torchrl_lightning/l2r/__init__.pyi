"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .ppo import PPOBuffer as PPOBuffer
from .simple import SimpleReplayBuffer as SimpleReplayBuffer
