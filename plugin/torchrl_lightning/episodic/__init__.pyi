"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .batch_info import BatchInfo as BatchInfo
from .buffer import EpisodicReplayBuffer as EpisodicReplayBuffer
from .frame_stack import FrameStackTransform as FrameStackTransform
from .frame_storage import FrameStorage as FrameStorage
from .hindsight import HindsightRelabel as HindsightRelabel
from .recent import RecentSampler as RecentSampler
from .returns import EpisodicReturn as EpisodicReturn
from .steps import StepLayout as StepLayout
