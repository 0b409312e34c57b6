"""l2r-lab's buffers: steps go in one by one, batches come out at random; their typed configs."""

from torchrl_lightning.l2r.ppo import PPOBuffer
from torchrl_lightning.l2r.simple import SimpleReplayBuffer

__all__ = ["PPOBuffer", "SimpleReplayBuffer"]
