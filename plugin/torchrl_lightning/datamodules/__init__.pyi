"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.datamodules.base import ExperienceDataModule as ExperienceDataModule
from torchrl_lightning.datamodules.branched_replay import BranchedReplay as BranchedReplay
from torchrl_lightning.datamodules.dynamics import DynamicsDataModule as DynamicsDataModule
from torchrl_lightning.datamodules.mixed_replay import MixedReplay as MixedReplay
from torchrl_lightning.datamodules.on_policy import OnPolicyDataModule as OnPolicyDataModule
from torchrl_lightning.datamodules.replay import ReplayDataModule as ReplayDataModule
from torchrl_lightning.datamodules.updates_per_step import UpdatesDataModule as UpdatesDataModule
