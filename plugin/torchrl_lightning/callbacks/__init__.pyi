"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.callbacks.buffer_page import BufferPage as BufferPage
from torchrl_lightning.callbacks.checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
from torchrl_lightning.callbacks.checkpoints import BestCheckpoint as BestCheckpoint
from torchrl_lightning.callbacks.checkpoints import LastCheckpoint as LastCheckpoint
from torchrl_lightning.callbacks.episode_video import EpisodeVideo as EpisodeVideo
from torchrl_lightning.callbacks.experience_log import ExperienceLog as ExperienceLog
from torchrl_lightning.callbacks.frames_bar import FramesProgressBar as FramesProgressBar
from torchrl_lightning.callbacks.stop_at_score import StopAtScore as StopAtScore
from torchrl_lightning.callbacks.trial_report import TrialReport as TrialReport
