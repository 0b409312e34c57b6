"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.dynamics.buffer import MBReplayBuffer as MBReplayBuffer
from torchrl_lightning.dynamics.scaler import StandardScaler as StandardScaler
from torchrl_lightning.dynamics.split import HoldoutSplit as HoldoutSplit
from torchrl_lightning.dynamics.targets import DynamicsTargets as DynamicsTargets
