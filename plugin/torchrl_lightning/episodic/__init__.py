"""Episodic replay after ALF: rings of several environments, what is known of their episodes, and samplers over them."""

from torchrl_lightning.episodic.batch_info import BatchInfo
from torchrl_lightning.episodic.buffer import EpisodicReplayBuffer
from torchrl_lightning.episodic.frame_stack import FrameStackTransform
from torchrl_lightning.episodic.frame_storage import FrameStorage
from torchrl_lightning.episodic.hindsight import HindsightRelabel
from torchrl_lightning.episodic.recent import RecentSampler
from torchrl_lightning.episodic.returns import EpisodicReturn
from torchrl_lightning.episodic.steps import StepLayout

__all__ = [
    "BatchInfo",
    "EpisodicReplayBuffer",
    "EpisodicReturn",
    "FrameStackTransform",
    "FrameStorage",
    "HindsightRelabel",
    "RecentSampler",
    "StepLayout",
]
