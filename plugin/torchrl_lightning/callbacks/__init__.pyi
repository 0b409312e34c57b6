"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .buffer_page import BufferPage as BufferPage
from .checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
from .checkpoints import BestCheckpoint as BestCheckpoint
from .checkpoints import LastCheckpoint as LastCheckpoint
from .episode_video import EpisodeVideo as EpisodeVideo
from .experience_log import ExperienceLog as ExperienceLog
from .frames_bar import FramesProgressBar as FramesProgressBar
from .stop_at_score import StopAtScore as StopAtScore
from .trial_report import TrialReport as TrialReport
