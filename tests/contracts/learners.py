"""Arguments that learners, networks and planners take and refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded

from contracts.arguments import Each, named, refused
from kit.specs import BOX, DISCRETE, specs_of
from kit.torchrl_losses import SilentLoss
from kit.world_models import world_model
from torchrl_lightning.agents import (
    CNNNetwork,
    CrossEntropyPlanner,
    DQNModule,
    DynamicsEnsemble,
    GaussianEnsemble,
    LossModuleAgent,
    MBPOModule,
    MLPNetwork,
    MujocoTermination,
    OutsideBox,
    PPOModule,
    RandomNetworkDistillation,
    RecurrentNetwork,
    SACModule,
    TD3Module,
    WorldModel,
    WorldModelEnvironment,
    WorldModelFit,
    build_actor,
    build_critic,
)
from torchrl_lightning.agents.networks.q_networks import build_q_network
from torchrl_lightning.agents.networks.squashed import build_squashed_actor

SQUARE, BITS = specs_of(Bounded(0, 1, (2, 2))), specs_of(Binary(3))
CHOICES, UNBOUNDED = specs_of(MultiCategorical([2, 3])), specs_of(Unbounded(2))
MNIH = CNNNetwork(kernels=[8, 4, 3], strides=[4, 2, 1])
MODEL = world_model()


def built(kind: Any = DQNModule, specs: Any = BOX) -> Any:
    return kind().build(specs)


def encoder(network: Any, spec: Any) -> Any:
    return network.encoder([spec])


member, judged = partial(GaussianEnsemble), partial(WorldModel)
SOUND: dict[Callable[..., Any], dict[str, Any]] = {
    LossModuleAgent: {"loss": lambda specs: None},
    member: {"num_members": 3, "inputs": 5, "outputs": 2, "hidden_sizes": [8]},
    WorldModelFit: {"num_members": 3, "num_elites": 2},
    judged: {"ensemble": MODEL.ensemble, "targets": MODEL.targets},
    OutsideBox: {"low": [0.0, None], "high": [None, 1.0]},
    MujocoTermination: {"body": "hopper"},
    CrossEntropyPlanner: {"env": WorldModelEnvironment(MODEL), "candidates": 40},
    build_actor: {"specs": BOX},
    build_critic: {"specs": BOX},
}

VALUES = (
    *refused(PPOModule, "must be one of constant, linear, cosine", schedule="linaer"),
    *refused(DQNModule, "smooth_l1", loss_function="huber"),
    *refused(DQNModule, "epsilon_start", epsilon_start=2.0),
    *refused(DQNModule, "frames", epsilon_frames=0),
    *refused(DQNModule, "target_interval", target_interval=0),
    *refused(DQNModule, "RecurrentNetwork.*MLPNetwork", network=MLPNetwork([8]), refresh_states=True),
    *refused(SACModule, "tau", tau=0.0),
    *refused(SACModule, "learn_alpha", learn_alpha=False, alpha_optimizer=torch.optim.Adam),
    *refused(TD3Module, "target_interval", target_interval=0),
    *refused(RandomNetworkDistillation, "update_fraction", update_fraction=0.0),
    *named(member, num_members=0, activation="sine"),
    *refused(member, "hidden_sizes", hidden_sizes=[0]),
    *named(DynamicsEnsemble, patience=0, min_improvement=-0.1, weight_decay=-1.0, propagation="rows", num_elites=0),
    *named(WorldModelFit, num_members=0, patience=0, max_epochs=0, batch_size=0, learning_rate=0),
    *refused(WorldModelFit, "num_elites.*num_members=3.*4", num_elites=4),
    *refused(
        WorldModelFit, "^learn_terminated .*terminated", learn_terminated=True, terminated=OutsideBox([0.0], [1.0])
    ),
    *named(judged, propagation="row"),
    *refused(MujocoTermination, "body.*'hopper'.*'Hopper-v5'", body="Hopper-v5"),
    *refused(OutsideBox, "low and high .*1 and 2", low=[0.0], high=[1.0, 2.0]),
    *named(CrossEntropyPlanner, horizon=0, candidates=0, particles=0, iterations=0, initial_std=0, noise=-1.0),
    *refused(CrossEntropyPlanner, "elites", elites=Each((41, 1))),
    *refused(build_actor, "continuous", specs=DISCRETE, distribution="normal"),
    *refused(build_actor, "tanh_normal", distribution="beta"),
    *refused(build_actor, "finite bounds", specs=UNBOUNDED, distribution="tanh_normal"),
    *refused(MLPNetwork, "tahn", activation="tahn"),
    *refused(build_actor, "'gru'.*'lstm'", network=RecurrentNetwork("rnn")),
    *refused(build_actor, "MLPNetwork for vectors", network=CNNNetwork()),
    *refused(build_critic, "build_critic", network=MLPNetwork(shared=True)),
    *refused(MLPNetwork, "initialization", initialization="zeros"),
    *refused(encoder, r"kernels=\[2, 2, 2\].*cnn_small", network=MNIH, spec=Unbounded((1, 10, 10))),
    *refused(CNNNetwork, r"equal lengths, got \[8, 4\], \[8, 4, 3\], \[4, 2, 1\]", channels=[8, 4]),
    *refused(encoder, "kernels and strides .*an MLPNetwork", network=CNNNetwork(), spec=Unbounded((3, 3))),
)

TYPES = (
    *refused(PPOModule, "normalize_advantage.*'yes'", normalize_advantage="yes"),
    *refused(built, "SAC or TD3"),
    *refused(built, "must be Discrete, got MultiDiscrete", specs=specs_of(Categorical(3, shape=(2,)))),
    *refused(built, "DQN", kind=Each((SACModule, TD3Module)), specs=DISCRETE),
    *refused(built, "bounds", kind=Each((SACModule, TD3Module)), specs=UNBOUNDED),
    *refused(built, "finite bounds, got Discrete", kind=MBPOModule, specs=DISCRETE),
    *refused(MBPOModule, "^network .*MLPNetwork", network=RecurrentNetwork("gru", 8)),
    *refused(LossModuleAgent, "SilentLoss.*actor_network", loss=SilentLoss()),
    *refused(built, "must return a LossModule.*Linear", kind=lambda: LossModuleAgent(lambda specs: nn.Linear(1, 1))),
    *refused(build_actor, r"got Box of shape \(2, 2\).*TransformA", specs=SQUARE),
    *refused(build_actor, r"MultiBinary\(\[2, 3\]\)", specs=specs_of(Binary(3, (2, 3)))),
    *refused(build_q_network, r"MultiDiscrete\(\[2, 3\]\)", specs=CHOICES),
    *refused(build_q_network, r"MultiBinary\(3\).*SAC.*DiscretizeAction", specs=BITS),
    *refused(build_squashed_actor, r"got Discrete\(3\).*DQN", specs=DISCRETE),
    *refused(build_squashed_actor, r"\(2,\) and dtype float32 without bounds.*PPO, or .*Trans", specs=UNBOUNDED),
    *refused(build_squashed_actor, r"got Box of shape \(2, 2\) and dtype float32.*TransformA", specs=SQUARE),
)
