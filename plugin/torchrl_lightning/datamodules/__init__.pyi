"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .base import ExperienceDataModule as ExperienceDataModule
from .branched_replay import BranchedReplay as BranchedReplay
from .dynamics import DynamicsDataModule as DynamicsDataModule
from .mixed_replay import MixedReplay as MixedReplay
from .on_policy import OnPolicyDataModule as OnPolicyDataModule
from .replay import ReplayDataModule as ReplayDataModule
from .updates_per_step import UpdatesDataModule as UpdatesDataModule
