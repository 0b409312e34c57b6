"""Lightning callbacks that count in environment frames."""

from torchrl_lightning.callbacks.best_checkpoint import BestCheckpoint
from torchrl_lightning.callbacks.experience_log import ExperienceLog
from torchrl_lightning.callbacks.frames_bar import FramesProgressBar
from torchrl_lightning.callbacks.last_checkpoint import LastCheckpoint

__all__ = ["BestCheckpoint", "ExperienceLog", "FramesProgressBar", "LastCheckpoint"]
