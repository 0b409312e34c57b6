"""TorchRL's losses over small networks, for an environment's specs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.modules.distributions import NormalParamExtractor
from torchrl.objectives import DQNLoss, IQLLoss, LossModule, REDQLoss, SoftUpdate

from torchrl_lightning.agents import LossModuleAgent


def gaussian_actor(specs: Any) -> ProbabilisticActor:
    size, actions = specs.observation["observation"].shape[-1], specs.action.shape[-1]
    net = nn.Sequential(MLP(in_features=size, out_features=2 * actions, num_cells=[8]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=specs.action,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": specs.action.space.low, "high": specs.action.space.high},
    )


def value(specs: Any, *keys: str) -> ValueOperator:
    """Build a value network of the observation, or of the observation and the action."""
    sizes = {"observation": specs.observation["observation"].shape[-1], "action": specs.action.shape[-1]}
    network = MLP(in_features=sum(sizes[key] for key in keys), out_features=1, num_cells=[8])
    return ValueOperator(network, in_keys=list(keys))


def redq(specs: Any) -> REDQLoss:
    critic = value(specs, "observation", "action")
    return REDQLoss(gaussian_actor(specs), critic, num_qvalue_nets=3, sub_sample_len=2)


def iql(specs: Any) -> IQLLoss:
    critic = value(specs, "observation", "action")
    loss = IQLLoss(gaussian_actor(specs), critic, value_network=value(specs, "observation"))
    loss.make_value_estimator(gamma=0.9)
    return loss


def dqn(specs: Any) -> DQNLoss:
    network = MLP(in_features=4, out_features=int(specs.action.space.n), num_cells=[8])
    return DQNLoss(QValueActor(network, spec=specs.action), action_space=specs.action, delay_value=True)


class SilentLoss(LossModule):
    """A loss without a policy network."""

    def __init__(self) -> None:
        super().__init__()


def loss_agent(loss: Any, **settings: Any) -> LossModuleAgent:
    """Build an agent that minimises the loss."""
    torch.manual_seed(0)
    settings = {"target_updater": partial(SoftUpdate, tau=0.1), "learning_rate": 1e-2, **settings}
    return LossModuleAgent(loss, **settings)
