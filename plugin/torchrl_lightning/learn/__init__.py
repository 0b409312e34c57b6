"""LightningModules, the losses that they minimise, and the builders of actors and critics."""

from torchrl_lightning.learn.actors import Actor, Critic, build_actor, build_critic
from torchrl_lightning.learn.base import ActorCriticModule
from torchrl_lightning.learn.distributions import ClippedNormal, MultiCategorical
from torchrl_lightning.learn.dynamics_ensemble import DynamicsEnsemble
from torchrl_lightning.learn.ensembles import GaussianEnsemble
from torchrl_lightning.learn.exploration import EpsilonGreedyPolicy, ExploringPolicy, NoisyPolicy, StochasticPolicy
from torchrl_lightning.learn.loading import LoadedPolicy, load_policy
from torchrl_lightning.learn.loss_module import LossModuleAgent
from torchrl_lightning.learn.losses import clipped_surrogate_loss, critic_loss, policy_gradient_loss
from torchrl_lightning.learn.mbpo import MBPOModule
from torchrl_lightning.learn.networks import CNNNetwork, MLPNetwork, Network, RecurrentNetwork
from torchrl_lightning.learn.off_policy import OffPolicyModule
from torchrl_lightning.learn.planners import CrossEntropyPlanner, RandomShootingPlanner
from torchrl_lightning.learn.policy_gradients import A2CModule, PPOModule, ReinforceModule, VTraceModule
from torchrl_lightning.learn.q_learning import DQNModule, SACModule, TD3Module
from torchrl_lightning.learn.q_networks import build_action_critic, build_q_network
from torchrl_lightning.learn.rnd import RandomNetworkDistillation
from torchrl_lightning.learn.schedules import ConstantSchedule, CosineSchedule, LinearSchedule
from torchrl_lightning.learn.squashed import build_deterministic_actor, build_squashed_actor
from torchrl_lightning.learn.world_env import WorldModelEnvironment
from torchrl_lightning.learn.world_model_fit import WorldModelFit
from torchrl_lightning.learn.world_models import OutsideBox, WorldModel

__all__ = [
    "A2CModule",
    "Actor",
    "ActorCriticModule",
    "CNNNetwork",
    "ClippedNormal",
    "ConstantSchedule",
    "CosineSchedule",
    "Critic",
    "CrossEntropyPlanner",
    "DQNModule",
    "DynamicsEnsemble",
    "EpsilonGreedyPolicy",
    "ExploringPolicy",
    "GaussianEnsemble",
    "LinearSchedule",
    "LoadedPolicy",
    "LossModuleAgent",
    "MBPOModule",
    "MLPNetwork",
    "MultiCategorical",
    "Network",
    "NoisyPolicy",
    "OffPolicyModule",
    "OutsideBox",
    "PPOModule",
    "RandomNetworkDistillation",
    "RandomShootingPlanner",
    "RecurrentNetwork",
    "ReinforceModule",
    "SACModule",
    "StochasticPolicy",
    "TD3Module",
    "VTraceModule",
    "WorldModel",
    "WorldModelEnvironment",
    "WorldModelFit",
    "build_action_critic",
    "build_actor",
    "build_critic",
    "build_deterministic_actor",
    "build_q_network",
    "build_squashed_actor",
    "clipped_surrogate_loss",
    "critic_loss",
    "load_policy",
    "policy_gradient_loss",
]
