"""Untrained agents of all families over all kinds of spaces, with large weights, for comparisons of exported files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torchrl import objectives
from torchrl.data import Bounded, Unbounded

import torchrl_lightning as tl
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer

Array = NDArray[Any]
Box = spaces.Box
INF = math.inf


def box(*shape: int, dtype: Any = np.float32, low: Any = -INF, high: Any = INF) -> Box:
    """Return a Box, by default without bounds."""
    return Box(low, high, shape, dtype)


def bounds(low: list[float], high: list[float], dtype: Any = np.float32) -> Box:
    """Return a Box of a vector with these bounds."""
    return Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


def pixels(*shape: int) -> Box:
    """Return a Box of bytes."""
    return Box(0, 255, shape, np.uint8)


OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "float32": box(4),
    "bounded": bounds([-1, -2, 0, 5], [1, 3, 10, 6]),
    "half-infinite": bounds([-INF, 0, -1], [0, INF, INF]),
    "float64": box(3, dtype=np.float64),
    "seconds": Box(1.7e9, 1.8e9, (2,), np.float64),
    "float16": box(3, dtype=np.float16),
    "uint8": pixels(5),
    "int8": Box(-128, 127, (3,), np.int8),
    "int32": Box(-(2**31), 2**31 - 1, (3,), np.int32),
    "int64": Box(-(2**62), 2**62, (3,), np.int64),
    "bool": Box(0, 1, (3,), np.bool_),
    "scalar": box(low=-1, high=1),
    "matrix": box(2, 3),
    "hwc": pixels(14, 14, 3),
    "chw": pixels(3, 14, 14),
    "hw": pixels(14, 14),
    "float image": box(14, 14, 3, low=0, high=1),
    "alphabet": spaces.Dict(velocity=box(2), goal=box(2), aim=spaces.Discrete(3)),
    "nested": spaces.Dict(
        z=spaces.Dict(b=box(2), a=Box(-1, 1, (2,), np.float64)), arm=spaces.Dict(touch=spaces.MultiBinary(3)), a=box()
    ),
    "image and vector": spaces.Dict(pixels=pixels(14, 14, 3), hand=box(3)),
    "kinds": spaces.Dict(
        wide=box(2, dtype=np.float64), bits=spaces.MultiBinary(2), choice=spaces.Discrete(3), small=pixels(2)
    ),
    "discrete": spaces.Discrete(5),
    "discrete from 2": spaces.Discrete(5, start=2),
    "choices": spaces.MultiDiscrete([2, 3, 4]),
    "equal choices": spaces.MultiDiscrete([3, 3]),
    "choices from 1": spaces.MultiDiscrete([2, 3], start=[1, 2]),
    "bits": spaces.MultiBinary(4),
    "bit matrix": spaces.MultiBinary([2, 3]),
    "mask of 4": spaces.Dict(observation=box(4), action_mask=spaces.MultiBinary(4)),
    "mask of choices": spaces.Dict(observation=box(4), action_mask=spaces.MultiBinary(5), aim=box(2)),
    "flags of 4": spaces.Dict(observation=box(4), action_mask=Box(0, 1, (4,), np.int8)),
    "tuple": spaces.Tuple([box(2), box(2)]),
    "choice matrix": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "text": spaces.Text(5),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "from 3": spaces.Discrete(4, start=3),
    "from -2": spaces.Discrete(4, start=-2),
    "choices": spaces.MultiDiscrete([2, 3]),
    "equal choices": spaces.MultiDiscrete([3, 3]),
    "choices from 1": spaces.MultiDiscrete([2, 3], start=[1, -4]),
    "int32 choices": spaces.MultiDiscrete([2, 3], dtype=np.int32),
    "bits": spaces.MultiBinary(3),
    "box": bounds([-2, 0, 5], [2, 1, 9]),
    "far box": bounds([1e5, -1e-5], [1e5 + 1, 1e-5]),
    "float64 box": Box(np.array([-2, 0.1]), np.array([2, 0.7]), dtype=np.float64),
    "float16 box": bounds([-2, 0.1], [2, 0.7], np.float16),
    "scalar box": box(low=-2, high=3),
    "half-infinite box": bounds([-INF, 0, -1], [0, INF, 2]),
    "unbounded box": box(2),
    "box matrix": box(2, 2, low=-1, high=1),
    "integer box": Box(0, 9, (2,), np.int64),
    "choice matrix": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "bit matrix": spaces.MultiBinary([2, 3]),
}


def recurrent(cell: str, layers: int, encoder: Any = None) -> Any:
    """Return a small recurrent network."""
    return tl.RecurrentNetwork(cell, 8, layers, encoder)


CNN = tl.CNNNetwork([6, 6], [4, 3], [2, 1], [16])
NETWORKS: dict[str, Any] = {
    "mlp": tl.MLPNetwork([16, 16]),
    **{name: tl.MLPNetwork([16], name) for name in ("elu", "gelu", "leaky_relu", "relu", "silu")},
    "heads": tl.MLPNetwork([16], shared=True, head_sizes=[8], layer_norm=True),
    "renorm": tl.BatchRenormNetwork([16]),
    "cnn": CNN,
    "gru": recurrent("gru", 1),
    "lstm": recurrent("lstm", 2),
    "cnn lstm": recurrent("lstm", 1, CNN),
}


def by_loss(loss: Any, policy: Any = None, **networks: Any) -> Callable[..., Any]:
    """Return a builder of agents with a loss of TorchRL, as in the presets of the configs."""
    return lambda network: tl.LossModuleAgent(loss, networks=networks, network=network, policy=policy)


SQUASHED = {"actor_network": tl.build_squashed_actor, "qvalue_network": tl.build_action_critic}
OF_DATA = {"actor_network": tl.build_deterministic_actor}
CHOOSING = {"actor_network": tl.build_actor, "qvalue_network": tl.build_q_network}
C51 = {"value_network": partial(tl.build_distributional_q_network, low=0.0, high=100.0)}
FAMILIES: dict[str, Callable[..., Any]] = {
    "ppo": tl.PPOModule,
    "ppo tanh": partial(tl.PPOModule, distribution="tanh_normal"),
    "ppo rnd": partial(tl.PPOModule, intrinsic=tl.RandomNetworkDistillation()),
    "a2c": tl.A2CModule,
    "reinforce": tl.ReinforceModule,
    "vtrace": tl.VTraceModule,
    "dqn": tl.DQNModule,
    "dueling dqn": partial(tl.DQNModule, dueling=True),
    "c51": by_loss(objectives.DistributionalDQNLoss, tl.EpsilonGreedyPolicy, **C51),
    "discrete cql": by_loss(objectives.DiscreteCQLLoss, value_network=tl.build_q_network),
    "discrete sac": by_loss(objectives.DiscreteSACLoss, **CHOOSING),
    "sac": tl.SACModule,
    "td3": tl.TD3Module,
    "ddpg": partial(tl.TD3Module, num_critics=1, target_interval=1, policy_noise=0.0),
    "mbpo": tl.MBPOModule,
    "tqc": by_loss(objectives.TQCLoss, **SQUASHED),
    "redq": by_loss(objectives.REDQLoss, **SQUASHED),
    "crossq": by_loss(objectives.CrossQLoss, **SQUASHED),
    "bc": by_loss(objectives.BCLoss, **OF_DATA),
    "iql": by_loss(objectives.IQLLoss, **SQUASHED, value_network=tl.build_critic),
}


@dataclass(frozen=True)
class Agent:
    """The settings of an agent: family, spaces, network, normalisation of observations and clipping of actions."""

    family: str
    observation: str
    action: str
    network: str = "mlp"
    normalize: bool = False
    clip: bool = False

    def __str__(self) -> str:
        options = [self.network, *(["normalized"] if self.normalize else []), *(["clipped"] if self.clip else [])]
        return f"{self.family}, {self.observation} -> {self.action}, {' '.join(options)}"


def agents() -> Iterator[Agent]:
    """Yield all agents."""
    images = ("hwc", "chw", "hw", "float image", "image and vector")
    unsupported = ("tuple", "choice matrix", "text")
    masks = ("mask of 4", "flags of 4")
    vectors = [name for name in OBSERVATIONS if name not in (*images, *unsupported, *masks, "mask of choices")]
    for name in vectors:
        yield Agent("ppo", name, "discrete")
    for name in (*images, *unsupported):
        yield Agent("ppo", name, "discrete", "mlp" if name in unsupported else "cnn")
    for name in ("hwc", "image and vector"):
        yield Agent("dqn", name, "from 3", "cnn")
        yield Agent("sac", name, "box", "cnn")
    for name in ACTIONS:
        yield Agent("ppo", "float32", name)
    for name in ("box", "half-infinite box", "unbounded box", "float64 box", "integer box"):
        yield Agent("ppo", "float32", name, clip=True)
    for name in ("float32", "float64", "seconds", "float16", "uint8", "int32", "int64", "scalar", "nested", "matrix"):
        yield Agent("ppo", name, "box" if name in ("seconds", "int64") else "discrete", normalize=True)
    for name in ("float image", "hwc", "image and vector"):
        yield Agent("ppo", name, "discrete", "cnn", normalize=True)
    for name in ("elu", "gelu", "leaky_relu", "relu", "silu", "heads", "renorm"):
        yield Agent("ppo", "bounded", "box", name)
        if name != "heads":  # DQN shares no layers
            yield Agent("dqn", "float32", "discrete", name)
    for name in ("box", "far box", "float64 box", "float16 box", "scalar box"):
        yield Agent("ppo tanh", "float32", name)
        yield Agent("sac", "float32", name)
        yield Agent("td3", "float32", name)
    for family in ("a2c", "reinforce", "vtrace", "ppo rnd"):
        yield Agent(family, "alphabet", "choices from 1")
        yield Agent(family, "bounded", "box", normalize=True)
    for family in ("dqn", "dueling dqn", "c51", "discrete cql", "discrete sac"):
        yield Agent(family, "float32", "from 3")
        yield Agent(family, "kinds", "discrete", normalize=family == "c51")
    for family in ("ddpg", "mbpo", "tqc", "redq", "crossq", "bc", "iql"):
        network = "renorm" if family == "crossq" else "relu"
        yield Agent(family, "bounded", "box", network)
        yield Agent(family, "float64", "box", network, normalize=True)
    for family in ("ppo", "dqn"):
        for name in masks:
            yield Agent(family, name, "discrete")
            yield Agent(family, name, "from 3", "gru")
    yield Agent("ppo", "mask of choices", "choices")
    yield Agent("ppo", "mask of choices", "choices from 1", normalize=True)
    yield Agent("discrete sac", "mask of 4", "discrete")
    for network in ("gru", "lstm"):
        yield Agent("ppo", "float32", "discrete", network, normalize=True)
        yield Agent("ppo", "nested", "box", network)
        yield Agent("ppo", "float64", "half-infinite box", network)
        yield Agent("vtrace", "kinds", "choices", network)
        yield Agent("dueling dqn", "bounded", "from -2", network)
        yield Agent("sac", "alphabet", "box", network)
        yield Agent("td3", "uint8", "box", network, normalize=True)
    yield Agent("ppo", "hwc", "from 3", "cnn lstm")
    yield Agent("dqn", "image and vector", "discrete", "cnn lstm")
    yield from (Agent("pets", "bounded", "box"), Agent("pets shooting", "bounded", "box"))


def build(agent: Agent) -> tl.LoadedPolicy:
    """Build the policy of an agent with large random weights, and with moments if it normalises observations."""
    space, actions = OBSERVATIONS[agent.observation], ACTIONS[agent.action]

    class Env(gym.Env[Any, Any]):
        observation_space, action_space = space, actions

        def reset(self, **_: Any) -> Any:
            return space.sample(), {}

    specs = tl.environment_specs(tl.make_vector_env(Env, 1)).with_clipping(agent.clip)
    torch.manual_seed(0)
    if agent.family.startswith("pets"):
        kind = tl.RandomShootingPlanner if agent.family.endswith("shooting") else tl.CrossEntropyPlanner
        return tl.LoadedPolicy(tl.DynamicsEnsemble(planner=kind).build(specs).policy, specs)
    normalizer = ObservationNormalizer(specs, _numeric_keys(specs), 5.0) if agent.normalize else None
    learner = FAMILIES[agent.family](NETWORKS[agent.network])
    policy = learner.build(specs if normalizer is None else normalizer.specs).policy
    with torch.no_grad():
        for parameter in policy.parameters():
            fan_in = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 4
            parameter.normal_(0.0, 1.5 / math.sqrt(fan_in))
        for module in policy.modules():
            if hasattr(module, "running_mean"):
                module.running_mean.normal_()
                module.running_var.uniform_(0.1, 3.0)
    if normalizer is None:
        return tl.LoadedPolicy(policy, specs)
    rows = by_name(random_rows(space, 200, 1))
    for key in normalizer.keys:
        values = torch.as_tensor(rows[entry_name(key)]).reshape(200, *specs.observation[key].shape)
        normalizer.advance({key: Moments.from_samples(values)})
    return tl.LoadedPolicy(NormalizedPolicy(policy, normalizer), specs)


def _numeric_keys(specs: Any) -> list[Any]:
    leaves = specs.observation.items(True, True)
    numeric = {key: spec for key, spec in leaves if isinstance(spec, Bounded | Unbounded)}
    return [key for key, spec in numeric.items() if spec.dtype is not torch.bool and key != "action_mask"]


def entry_name(key: Any) -> str:
    """Return the name of an input for a key of a TensorDict."""
    return key if isinstance(key, str) else ".".join(key)


def by_name(batch: Any, prefix: str = "") -> dict[str, Array]:
    """Name the entries of a batch as the guide does: dots join the parts of a nested name."""
    if not isinstance(batch, Mapping):
        return {prefix or "observation": batch}
    entries: dict[str, Array] = {}
    for name, part in batch.items():
        entries |= by_name(part, f"{prefix}.{name}" if prefix else name)
    return entries


def random_rows(space: spaces.Space[Any], rows: int, seed: int) -> Any:
    """Sample rows ``[N, *F]`` of a space, with the same nested dictionaries as the space."""
    batched = batch_space(space, rows)
    batched.seed(seed)
    return batched.sample()
