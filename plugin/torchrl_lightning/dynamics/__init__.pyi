"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .dynamics_buffer import MBReplayBuffer as MBReplayBuffer
from .rewards import QuadraticReward as QuadraticReward
from .scaler import StandardScaler as StandardScaler
from .split import HoldoutSplit as HoldoutSplit
from .targets import DynamicsTargets as DynamicsTargets
