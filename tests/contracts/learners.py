"""Arguments that learners, networks and planners refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded

from contracts.arguments import Refused, each
from kit.specs import BOX, DISCRETE, specs_of
from kit.torchrl_losses import SilentLoss
from kit.world_models import world_model
from torchrl_lightning.learn import (
    CNNNetwork,
    CrossEntropyPlanner,
    DQNModule,
    DynamicsEnsemble,
    GaussianEnsemble,
    LossModuleAgent,
    MBPOModule,
    MLPNetwork,
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
from torchrl_lightning.learn.q_networks import build_q_network
from torchrl_lightning.learn.squashed import build_squashed_actor

SQUARE, BITS = specs_of(Bounded(0, 1, (2, 2))), specs_of(Binary(3))
CHOICES, UNBOUNDED = specs_of(MultiCategorical([2, 3])), specs_of(Unbounded(2))
MODEL = world_model()


def built(kind: Any, specs: Any) -> Any:
    return kind().build(specs)


def encoder(network: Any, spec: Any) -> Any:
    return network.encoder([spec])


LEARNERS = (
    Refused(partial(PPOModule), {}, {"known are constant, linear, cosine": {"schedule": "linaer"}}),
    Refused(
        PPOModule,
        {},
        {"normalize_advantage must be True or False, got 'yes'": {"normalize_advantage": "yes"}},
        TypeError,
    ),
    Refused(
        DQNModule,
        {},
        {
            "smooth_l1": {"loss_function": "huber"},
            "epsilon_start": {"epsilon_start": 2.0},
            "frames": {"epsilon_frames": 0},
            "target_interval": {"target_interval": 0},
            "needs a RecurrentNetwork, but the network is a MLPNetwork": {
                "network": MLPNetwork([8]),
                "refresh_states": True,
            },
        },
    ),
    Refused(
        SACModule,
        {},
        {"tau": {"tau": 0.0}, "learn_alpha": {"learn_alpha": False, "alpha_optimizer": torch.optim.Adam}},
    ),
    Refused(TD3Module, {}, {"target_interval": {"target_interval": 0}}),
    Refused(
        partial(built, DQNModule),
        {"specs": DISCRETE},
        {"SAC or TD3": {"specs": BOX}, "one choice": {"specs": specs_of(Categorical(3, shape=(2,)))}},
        TypeError,
    ),
    *(
        Refused(
            partial(built, kind),
            {"specs": BOX},
            {"DQN": {"specs": DISCRETE}, "bounds": {"specs": UNBOUNDED}},
            TypeError,
        )
        for kind in (SACModule, TD3Module)
    ),
    Refused(
        partial(built, MBPOModule),
        {"specs": BOX},
        {"within finite bounds .*got Discrete": {"specs": DISCRETE}},
        TypeError,
    ),
    Refused(MBPOModule, {}, {"no recurrent states; take an": {"network": RecurrentNetwork("gru", 8)}}, TypeError),
    Refused(
        LossModuleAgent,
        {"loss": lambda specs: None},
        {"SilentLoss has none of actor_network": {"loss": SilentLoss()}},
        TypeError,
    ),
    Refused(
        partial(built, partial(LossModuleAgent, lambda specs: nn.Linear(1, 1))),
        {},
        {"gave Linear; expected one of": {"specs": BOX}},
        TypeError,
    ),
    Refused(partial(RandomNetworkDistillation), {}, {"update_fraction": {"update_fraction": 0.0}}),
    Refused(
        partial(GaussianEnsemble),
        {"num_members": 3, "inputs": 5, "outputs": 2, "hidden_sizes": [8]},
        {
            "num_members": {"num_members": 0},
            "hidden_sizes": {"hidden_sizes": [0]},
            "activation": {"activation": "sine"},
        },
    ),
    Refused(
        DynamicsEnsemble,
        {},
        {
            "patience": {"patience": 0},
            "min_improvement": {"min_improvement": -0.1},
            "weight_decay": {"weight_decay": -1.0},
            "propagation": {"propagation": "rows"},
            "num_elites": {"num_elites": 0},
        },
    ),
    Refused(
        WorldModelFit,
        {"num_members": 3, "num_elites": 2},
        {
            **{name: {name: 0} for name in ("num_members", "patience", "max_epochs", "batch_size", "learning_rate")},
            "num_elites=4 is more than num_members=3": {"num_elites": 4},
        },
    ),
    Refused(
        partial(WorldModel),
        {"ensemble": MODEL.ensemble, "targets": MODEL.targets},
        {"propagation": {"propagation": "row"}},
    ),
    Refused(
        OutsideBox,
        {"low": [0.0, None], "high": [None, 1.0]},
        {"low has 1 numbers and high 2": {"low": [0.0], "high": [1.0, 2.0]}},
    ),
    Refused(
        CrossEntropyPlanner,
        {"env": WorldModelEnvironment(MODEL), "candidates": 40},
        {
            **{name: {name: 0} for name in ("horizon", "candidates", "particles", "iterations", "initial_std")},
            "elites": each("elites", 41, 1),
            "noise": {"noise": -1.0},
        },
    ),
    Refused(
        build_actor,
        {"specs": BOX},
        {
            "continuous": {"specs": DISCRETE, "distribution": "normal"},
            "tanh_normal": {"distribution": "beta"},
            "finite bounds": {"specs": UNBOUNDED, "distribution": "tanh_normal"},
            "tahn": {"network": MLPNetwork(activation="tahn")},
            "'gru' or 'lstm'": {"network": RecurrentNetwork("rnn")},
            "MLPNetwork for vectors": {"network": CNNNetwork()},
        },
    ),
    Refused(
        build_actor,
        {"specs": BOX},
        {
            r"no .* fits Box of shape \(2, 2\).*TransformA": {"specs": SQUARE},
            r"MultiBinary\(\[2, 3\]\) actions; Discrete, ": {"specs": specs_of(Binary(3, (2, 3)))},
        },
        TypeError,
    ),
    Refused(
        build_q_network,
        {"specs": DISCRETE},
        {
            r"got MultiDiscrete\(\[2, 3\]\); use": {"specs": CHOICES},
            r"got MultiBinary\(3\); use SAC.*DiscretizeAction": {"specs": BITS},
        },
        TypeError,
    ),
    Refused(
        build_squashed_actor,
        {"specs": BOX},
        {
            r"got Discrete\(3\); use DQN": {"specs": DISCRETE},
            r"\(2,\) and dtype float32 without bounds": {"specs": UNBOUNDED},
        },
        TypeError,
    ),
    Refused(build_critic, {"specs": BOX}, {"give build_critic the actor": {"network": MLPNetwork(shared=True)}}),
    Refused(
        encoder,
        {"network": MLPNetwork(), "spec": Unbounded(3)},
        {
            "initialization": {"network": MLPNetwork(initialization="zeros")},
            r"too small.*kernels=\[2, 2, 2\].*cnn_small": {"network": CNNNetwork(), "spec": Unbounded((1, 10, 10))},
            "too small.*an MLPNetwork would fit": {"network": CNNNetwork(), "spec": Unbounded((3, 3))},
        },
    ),
)
