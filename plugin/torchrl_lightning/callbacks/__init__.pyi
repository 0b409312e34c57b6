"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .buffer_report import BufferReport as BufferReport
from .checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
from .checkpoints import BestCheckpoint as BestCheckpoint
from .checkpoints import LastCheckpoint as LastCheckpoint
from .episode_video import EpisodeVideo as EpisodeVideo
from .frames_bar import FramesProgressBar as FramesProgressBar
from .rollout_metrics import RolloutMetricsLogger as RolloutMetricsLogger
from .stop_at_score import StopAtScore as StopAtScore
from .trial_report import TrialReport as TrialReport
