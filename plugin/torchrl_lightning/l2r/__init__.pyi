"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.l2r.ppo import PPOBuffer as PPOBuffer
from torchrl_lightning.l2r.simple import SimpleReplayBuffer as SimpleReplayBuffer
