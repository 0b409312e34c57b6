"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .buffer import MBReplayBuffer as MBReplayBuffer
from .scaler import StandardScaler as StandardScaler
from .split import HoldoutSplit as HoldoutSplit
from .targets import DynamicsTargets as DynamicsTargets
