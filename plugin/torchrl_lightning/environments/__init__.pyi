"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .backends.torchrl_env import make_environment as make_environment
from .backends.vector_env import make_vector_env as make_vector_env
from .goals import GoalReward as GoalReward
from .masks import ActionMaskFromInfo as ActionMaskFromInfo
from .recipe import EnvironmentRecipe as EnvironmentRecipe
from .recipe import SelectObservation as SelectObservation
from .replay_source import ReplayedRows as ReplayedRows
from .replay_source import ReplaySource as ReplaySource
from .replay_source import SyncedReplaySource as SyncedReplaySource
from .seeds import spawn_seed as spawn_seed
from .specs import EnvironmentSpecs as EnvironmentSpecs
from .specs import environment_specs as environment_specs
from .workers.threads import close_environment as close_environment
from .wrappers.frame_stack import FrameStack as FrameStack
