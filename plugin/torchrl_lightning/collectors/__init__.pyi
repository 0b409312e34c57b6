"""The names of the room and the modules that they come from."""

from torchrl_lightning.collectors.asynchronous import AsynchronousCollector as AsynchronousCollector
from torchrl_lightning.collectors.episodes import play_episodes as play_episodes
from torchrl_lightning.collectors.frame_stack import FrameStack as FrameStack
from torchrl_lightning.collectors.goal_reward import GoalReward as GoalReward
from torchrl_lightning.collectors.gymnasium import GymnasiumCollector as GymnasiumCollector
from torchrl_lightning.collectors.recipe import EnvironmentRecipe as EnvironmentRecipe
from torchrl_lightning.collectors.recipe import SelectObservation as SelectObservation
from torchrl_lightning.collectors.replayed import FollowedReplaySource as FollowedReplaySource
from torchrl_lightning.collectors.replayed import ReplayedRows as ReplayedRows
from torchrl_lightning.collectors.replayed import ReplaySource as ReplaySource
from torchrl_lightning.collectors.seeds import spawn_seed as spawn_seed
from torchrl_lightning.collectors.specs import EnvironmentSpecs as EnvironmentSpecs
from torchrl_lightning.collectors.specs import environment_specs as environment_specs
from torchrl_lightning.collectors.threads import close_environment as close_environment
from torchrl_lightning.collectors.torchrl_collector import TorchRLCollector as TorchRLCollector
from torchrl_lightning.collectors.torchrl_env import make_environment as make_environment
from torchrl_lightning.collectors.vector_env import make_vector_env as make_vector_env
