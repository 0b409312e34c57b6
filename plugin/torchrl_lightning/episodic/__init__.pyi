"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .batch_info import BatchInfo as BatchInfo
from .episodic_buffer import EpisodicReplayBuffer as EpisodicReplayBuffer
from .episodic_return import EpisodicReturn as EpisodicReturn
from .frame_storage import FrameStorage as FrameStorage
from .hindsight import HindsightRelabel as HindsightRelabel
from .recent import RecentSampler as RecentSampler
from .stack_frames import FrameStackTransform as FrameStackTransform
from .time_steps import StepLayout as StepLayout
