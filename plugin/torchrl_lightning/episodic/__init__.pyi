"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.episodic.batch_info import BatchInfo as BatchInfo
from torchrl_lightning.episodic.buffer import EpisodicReplayBuffer as EpisodicReplayBuffer
from torchrl_lightning.episodic.frame_stack import FrameStackTransform as FrameStackTransform
from torchrl_lightning.episodic.frame_storage import FrameStorage as FrameStorage
from torchrl_lightning.episodic.hindsight import HindsightRelabel as HindsightRelabel
from torchrl_lightning.episodic.recent import RecentSampler as RecentSampler
from torchrl_lightning.episodic.returns import EpisodicReturn as EpisodicReturn
from torchrl_lightning.episodic.steps import StepLayout as StepLayout
