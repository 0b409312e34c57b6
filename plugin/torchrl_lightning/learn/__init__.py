"""LightningModules around TorchRL's on-policy losses, and the builders of actors and critics."""

from torchrl_lightning.learn.a2c import A2CModule
from torchrl_lightning.learn.actors import Actor, build_actor
from torchrl_lightning.learn.base import ActorCriticModule
from torchrl_lightning.learn.critics import Critic, build_critic
from torchrl_lightning.learn.distributions import ClippedNormal, MultiCategorical
from torchrl_lightning.learn.losses import DirectA2CLoss, DirectClipPPOLoss, DirectReinforceLoss
from torchrl_lightning.learn.networks import CNNNetwork, MLPNetwork, Network, RecurrentNetwork
from torchrl_lightning.learn.ppo import PPOModule
from torchrl_lightning.learn.reinforce import ReinforceModule
from torchrl_lightning.learn.rnd import RandomNetworkDistillation
from torchrl_lightning.learn.schedules import ConstantSchedule, CosineSchedule, LinearSchedule
from torchrl_lightning.learn.vtrace import VTraceModule

__all__ = [
    "A2CModule",
    "Actor",
    "ActorCriticModule",
    "CNNNetwork",
    "ClippedNormal",
    "ConstantSchedule",
    "CosineSchedule",
    "Critic",
    "DirectA2CLoss",
    "DirectClipPPOLoss",
    "DirectReinforceLoss",
    "LinearSchedule",
    "MLPNetwork",
    "MultiCategorical",
    "Network",
    "PPOModule",
    "RandomNetworkDistillation",
    "RecurrentNetwork",
    "ReinforceModule",
    "VTraceModule",
    "build_actor",
    "build_critic",
]
