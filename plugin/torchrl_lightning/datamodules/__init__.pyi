"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .base import ExperienceDataModule as ExperienceDataModule
from .dynamics import DynamicsDataModule as DynamicsDataModule
from .on_policy import OnPolicyDataModule as OnPolicyDataModule
from .replay import ReplayDataModule as ReplayDataModule
from .sources.branched_replay import BranchedReplay as BranchedReplay
from .sources.mixed_replay import MixedReplay as MixedReplay
from .updates_per_step import UpdatesDataModule as UpdatesDataModule
