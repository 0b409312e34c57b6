"""Lightning callbacks that count in environment frames."""

from torchrl_lightning.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from torchrl_lightning.callbacks.experience_log import ExperienceLog
from torchrl_lightning.callbacks.frames_bar import FramesProgressBar

__all__ = ["BestCheckpoint", "ExperienceLog", "FramesProgressBar", "LastCheckpoint"]
