"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .frame_stack import FrameStack as FrameStack
from .goals import GoalReward as GoalReward
from .masks import ActionMaskFromInfo as ActionMaskFromInfo
from .played import FollowedReplaySource as FollowedReplaySource
from .played import ReplayedRows as ReplayedRows
from .played import ReplaySource as ReplaySource
from .recipe import EnvironmentRecipe as EnvironmentRecipe
from .recipe import SelectObservation as SelectObservation
from .seeds import spawn_seed as spawn_seed
from .specs import EnvironmentSpecs as EnvironmentSpecs
from .specs import environment_specs as environment_specs
from .threads import close_environment as close_environment
from .torchrl_env import make_environment as make_environment
from .vector_env import make_vector_env as make_vector_env
