"""Lightning callbacks that count in environment frames, and what writes checkpoints."""

from torchrl_lightning.callbacks.checkpoint_io import AtomicCheckpointIO
from torchrl_lightning.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from torchrl_lightning.callbacks.experience_log import ExperienceLog
from torchrl_lightning.callbacks.frames_bar import FramesProgressBar

__all__ = ["AtomicCheckpointIO", "BestCheckpoint", "ExperienceLog", "FramesProgressBar", "LastCheckpoint"]
