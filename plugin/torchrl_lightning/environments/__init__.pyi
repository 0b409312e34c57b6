"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.environments.frame_stack import FrameStack as FrameStack
from torchrl_lightning.environments.goal_reward import GoalReward as GoalReward
from torchrl_lightning.environments.info_mask import ActionMaskFromInfo as ActionMaskFromInfo
from torchrl_lightning.environments.played import FollowedReplaySource as FollowedReplaySource
from torchrl_lightning.environments.played import ReplayedRows as ReplayedRows
from torchrl_lightning.environments.played import ReplaySource as ReplaySource
from torchrl_lightning.environments.recipe import EnvironmentRecipe as EnvironmentRecipe
from torchrl_lightning.environments.recipe import SelectObservation as SelectObservation
from torchrl_lightning.environments.seeds import spawn_seed as spawn_seed
from torchrl_lightning.environments.specs import EnvironmentSpecs as EnvironmentSpecs
from torchrl_lightning.environments.specs import environment_specs as environment_specs
from torchrl_lightning.environments.threads import close_environment as close_environment
from torchrl_lightning.environments.torchrl_env import make_environment as make_environment
from torchrl_lightning.environments.vector_env import make_vector_env as make_vector_env
