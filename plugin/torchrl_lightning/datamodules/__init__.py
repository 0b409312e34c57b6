"""Lightning DataModules: each owns an environment, a collector, a buffer and the count of environment frames."""

from torchrl_lightning.datamodules.base import ExperienceDataModule
from torchrl_lightning.datamodules.branched_replay import BranchedReplay
from torchrl_lightning.datamodules.dynamics import DynamicsDataModule
from torchrl_lightning.datamodules.mixed_replay import MixedReplay
from torchrl_lightning.datamodules.on_policy import OnPolicyDataModule
from torchrl_lightning.datamodules.replay import ReplayDataModule

__all__ = [
    "BranchedReplay",
    "DynamicsDataModule",
    "ExperienceDataModule",
    "MixedReplay",
    "OnPolicyDataModule",
    "ReplayDataModule",
]
