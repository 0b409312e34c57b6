"""Settings that have no effect beside others, or cannot work, and settings that are taken: each is a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType

from contracts.arguments import Each, Refused, named, refused
from kit.world_models import POINT, targets_of
from torchrl_lightning import (
    AsynchronousCollector,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    DemonstrationWriter,
    DynamicsTargets,
    EnvironmentRecipe,
    EpisodicReplayBuffer,
    ExperienceBuffer,
    GaussianEnsemble,
    GymnasiumCollector,
    OutsideBox,
    PPODBuffer,
    UniformSampler,
    WorldModel,
    environment_specs,
    make_vector_env,
)
from torchrl_lightning.agents import (
    CrossEntropyPlanner,
    DynamicsEnsemble,
    MLPNetwork,
    PPOModule,
    RandomShootingPlanner,
    WorldModelFit,
)
from torchrl_lightning.agents.model_based.world_env import WorldModelEnvironment
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.ray import RayCollector, ReplayService


def idle(kind: Callable[..., Any], needs: str, /, **given: Any) -> Iterator[Refused]:
    """A setting, the first one, that has no effect beside the others; its refusal names what it needs."""
    yield from refused(kind, rf"^{next(iter(given))} must .*{needs}", **given)


# ---------------------------------------------------------------------- collectors and services


def collector(kind: Any, *, acts: bool = True, **settings: Any) -> Any:
    specs = environment_specs(make_vector_env("CartPole-v1", 1))
    policy = PPOModule(MLPNetwork([4])).build(specs).policy if acts else None
    env = GymEnv("CartPole-v1", categorical_action_encoding=True) if kind is TorchRLCollector else "CartPole-v1"
    return kind(env, policy, frames_per_batch=4, **settings)


def service(**settings: Any) -> ReplayService:
    return ReplayService(ExperienceBuffer(num_envs=4), name="it", **settings)


OVER_TORCHRL = partial(collector, TorchRLCollector)
SYNCHRONOUS, ASYNCHRONOUS, REMOTE = OVER_GYMNASIUM = tuple(
    partial(collector, kind) for kind in (GymnasiumCollector, AsynchronousCollector, RayCollector)
)
REPLAY = DemonstrationReplay(DemonstrationStorage(), DemonstrationSampler(), 3)
COLLECTORS = (
    *(
        row
        for make in (*OVER_GYMNASIUM, OVER_TORCHRL)
        for row in (
            *named(make, init_random_frames=Each((-1, 1.5, None, math.inf, True)), reset_at_each_batch="no", seed=1.5),
            *idle(partial(make, acts=False), "policy", init_random_frames=8),
        )
    ),
    *(
        row
        for make in OVER_GYMNASIUM
        for row in (
            *named(make, exploration_type="random", clip_actions="no", replay=REPLAY, env_kwargs=[1]),
            *named(make, wrappers=Each((FlattenObservation, "ab", [FlattenObservation, 3]))),
            *idle(partial(make, acts=False), "policy", exploration_type=ExplorationType.MODE),
        )
    ),
    *named(SYNCHRONOUS, return_same_td="no"),
    *idle(SYNCHRONOUS, "batches on", return_same_td=True, storing_device="cuda"),
    *idle(SYNCHRONOUS, "batches on", return_same_td=True, device="cuda"),
    *named(REMOTE, sync="no"),
    *idle(REMOTE, "sync=True", rollouts_in_flight=2, sync=True),
    *idle(partial(REMOTE, acts=False), "policy", max_weight_update_interval=3),
    *idle(service, "join=True", keep=True, join=True),
    *idle(service, "join=True", remote_configs={"num_cpus": 2}, join=True),
)

# ---------------------------------------------------------------------- environments


def pole(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", **kwargs)


def ready() -> SyncVectorEnv:
    return SyncVectorEnv([pole], autoreset_mode=AutoresetMode.SAME_STEP)


recipe = partial(EnvironmentRecipe, "CartPole-v1")
LISTED = Each(("Other-v0", 3, {"a": 1}))
ENVIRONMENTS = (
    *named(recipe, keep=Each((*LISTED, [])), drop=LISTED, demonstrations_of=LISTED),
    *named(recipe, observe=Each(([], "01", 1, [0, 1.5], [True], [-1])), clip_reward=math.inf, flatten="no"),
    *named(recipe, wrappers=Each((FlattenObservation, {"_target_": "a.B"})), env_kwargs=[1]),
    *idle(recipe, "max_episode_steps", time_limit=3, env_kwargs={"max_episode_steps": 7}),
    *idle(recipe, "max_episode_steps", time_limit=3, env_kwargs={"max_episode_steps": 7}, vectorization="envpool"),
    *refused(
        partial(AsynchronousCollector, frames_per_batch=2),
        "^vectorization",
        env=Each(recipe(vectorization=each) for each in ("async", "envpool")),
    ),
    *named(lambda **kwargs: make_vector_env(ready(), **kwargs), vectorization=Each(("async", "envpool"))),
    *named(
        lambda **kwargs: GymnasiumCollector(ready(), frames_per_batch=2, **kwargs),
        vectorization=Each(("async", "envpool")),
    ),
)

# ---------------------------------------------------------------------- demonstrations and episodes

TARGET = {"target_agent_demos_dir": "nowhere"}
HUMAN = {"initial_human_demos_dir": "nowhere"}
NOTHING = {"rho": 0.0, "phi": 0.0}
ppod = partial(PPODBuffer, 8)
episodic = partial(EpisodicReplayBuffer, None, 2, 8)


def writer(capacity: int = 4, phi: float | None = None, **settings: Any) -> DemonstrationWriter:
    sampler = None if phi is None else DemonstrationSampler(0.1, phi)
    return DemonstrationWriter(DemonstrationStorage(capacity), sampler=sampler, **settings)


def attached(**settings: Any) -> PPODBuffer:
    buffer = ppod(**settings)
    buffer.attach("CartPole-v1", 2)
    return buffer


DEMONSTRATIONS = (
    *idle(ppod, "target_agent_demos_dir", num_agent_demos_to_save=Each((3, 0))),
    *idle(ppod, "target_agent_demos_dir", save_demos_every=1),
    *idle(ppod, "target_agent_demos_dir", save_value_demos=True),
    *idle(attached, "target_agent_demos_dir", demo_dtypes={"Action": torch.int8}),
    *idle(ppod, "num_agent_demos_to_save", **TARGET, num_agent_demos_to_save=0),
    *idle(ppod, "phi", alpha=2.0, phi=0.0),
    *idle(ppod, "total_buffer_demo_capacity", alpha=Each((0.0, 1.0)), total_buffer_demo_capacity=1),
    *idle(ppod, "total_buffer_demo_capacity", alpha=0.0, total_buffer_demo_capacity=2),
    *idle(ppod, "phi", annealing="current", phi=0.0),
    *idle(ppod, "total_buffer_demo_capacity", annealing="current", total_buffer_demo_capacity=1),
    *idle(ppod, "phi", save_value_demos=True, **TARGET, phi=0.0),
    *idle(ppod, "total_buffer_demo_capacity", save_value_demos=True, **TARGET, total_buffer_demo_capacity=1),
    *idle(ppod, "rho or phi", human_share=0.5, **NOTHING, **HUMAN),
    *idle(ppod, "total_buffer_demo_capacity", human_share=1.0, **HUMAN, total_buffer_demo_capacity=1),
    *idle(ppod, "rho or phi", ends="truncated", **NOTHING),
    *idle(ppod, "rho or phi", log_prob="current", **NOTHING),
    *idle(DemonstrationSampler, "phi", alpha=2, phi=0.0),
    *idle(DemonstrationSampler, "rho or phi", human_share=0.5, **NOTHING),
    *idle(writer, "phi", annealing="current", phi=0.0),
    *idle(writer, "value_capacity", annealing="current", value_capacity=0),
    *idle(writer, "value_capacity", annealing="current", capacity=1),
    *idle(writer, "phi", value_capacity=2, phi=0.0),
    *named(ppod, initial_reward_threshold=Each((math.inf, math.nan, "high"))),
    *named(writer, reward_threshold=Each((math.inf, math.nan, "high"))),
    *idle(episodic, "recent_data_ratio", recent_data_steps=16, prioritized_sampling=Each((False, True))),
    *idle(episodic, "prioritized_sampling", initial_priority=2.0),
    *idle(episodic, "sampler", recent_data_steps=2, sampler=UniformSampler()),
    *idle(episodic, "sampler", recent_data_ratio=0.5, sampler=UniformSampler()),
    *idle(episodic, "sampler", prioritized_sampling=True, sampler=UniformSampler()),
    *idle(episodic, "sampler", with_replacement=True, sampler=UniformSampler()),
    *idle(episodic, "sampler", initial_priority=2.0, sampler=UniformSampler()),
    *idle(episodic, "record_episodic_return", reward_clip=(-1.0, 1.0)),
    *idle(episodic, "record_episodic_return", default_return=-5.0),
    *idle(episodic, "record_episodic_return", critic=print),
)

# ---------------------------------------------------------------------- models of the environment

MEAN = {"probabilistic": False}
ONE = {"num_members": 1, "num_elites": 1}
targets = partial(DynamicsTargets, POINT.observation, POINT.action)


def model(members: int = 3, probabilistic: bool = True, **settings: Any) -> WorldModel:
    return WorldModel(GaussianEnsemble(members, 3, 3, [4], probabilistic=probabilistic), targets_of(), **settings)


def ensemble(members: int = 3, **settings: Any) -> DynamicsEnsemble:
    return DynamicsEnsemble([4], **settings).build(POINT, num_members=members)


def fitted(**settings: Any) -> WorldModel:
    return WorldModelFit([4], **settings).build(POINT)


def planner(kind: Any, members: int = 3, world: Any = None, **settings: Any) -> Any:
    return kind(WorldModelEnvironment(model(members, **(world or {}))), **settings)


shooting, cem = partial(planner, RandomShootingPlanner), partial(planner, CrossEntropyPlanner)
MODELS = (
    *idle(DynamicsEnsemble, "probabilistic", sample=True, **MEAN),
    *idle(model, "probabilistic", sample=True, **MEAN),
    *idle(DynamicsEnsemble, "hidden_sizes", activation="tanh", hidden_sizes=[]),
    *idle(WorldModelFit, "hidden_sizes", activation="tanh", hidden_sizes=[]),
    *idle(model, "elite", propagation="trajectory", members=1),
    *idle(model, "elite", propagation="trajectory", num_elites=1),
    *idle(ensemble, "elite", propagation="trajectory", members=1),
    *idle(ensemble, "elite", propagation="trajectory", num_elites=1),
    *idle(WorldModelFit, "elite", propagation="trajectory", **ONE),
    *idle(WorldModelFit, "elite", propagation="trajectory", num_elites=1),
    *idle(WorldModelFit, "max_epochs", patience=2, max_epochs=1),
    *idle(WorldModelFit, "max_epochs", min_improvement=0.5, max_epochs=1),
    *idle(targets, "reward", reward_key="gain", reward=print),
    *idle(cem, "horizon", warm_start=True, horizon=1),
    *(row for kind in (cem, shooting) for row in idle(kind, "elite", particles=3, members=1)),
    *idle(shooting, "elite", particles=3, world={"num_elites": 1}),
    *idle(shooting, "candidates", particles=3, candidates=1),
    *idle(shooting, "candidates", horizon=3, candidates=1),
    *named(model, num_elites=Each((4, 0))),
    *named(cem, initial_std=math.inf),
    *named(WorldModelFit, learning_rate=math.inf),
    *named(targets, observation_keys=Each(([], ["observation"] * 2))),
    *refused(OutsideBox, "^low and high", low=[], high=[]),
    *refused(OutsideBox, "^low and high", low=[None, None], high=[None, None]),
    *refused(OutsideBox, "^low and high", low=[-math.inf], high=[math.inf]),
    *refused(OutsideBox, r"^low .*1\.0 and -1\.0", low=[0.0, 1.0], high=[None, -1.0]),
    *refused(OutsideBox, r"^low .*nan and 1\.0", low=[math.nan], high=[1.0]),
    *refused(fitted, "^terminated .*2 numbers.* 1 bound", terminated=OutsideBox([0.0], [1.0])),
    *refused(ensemble, "^terminated .*2 numbers.* 3 bound", terminated=OutsideBox([0.0] * 3, [1.0] * 3)),
    *refused(ensemble, "^terminated .*IndexError", terminated=lambda o, a, n: n[:, 7] > 0),
    *named(fitted, terminated=lambda o, a, n: (n > 0).any()),
    *named(ensemble, terminated=Each((lambda o, a, n: n > 0, lambda o, a, n: False))),
)

ROWS = (*COLLECTORS, *ENVIRONMENTS, *DEMONSTRATIONS, *MODELS)

TAKEN: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
    *((make, {"acts": False, "init_random_frames": 0}) for make in (*OVER_GYMNASIUM, OVER_TORCHRL)),
    *((make, {"init_random_frames": 1e3}) for make in (*OVER_GYMNASIUM, OVER_TORCHRL)),
    *((make, {"acts": False, "exploration_type": ExplorationType.RANDOM, "seed": 0}) for make in OVER_GYMNASIUM),
    *((make, {"exploration_type": ExplorationType.MODE, "wrappers": ()}) for make in OVER_GYMNASIUM),
    *((make, {"wrappers": [FlattenObservation], "env_kwargs": {}}) for make in OVER_GYMNASIUM),
    (SYNCHRONOUS, {"return_same_td": True, "storing_device": "cpu"}),
    (REMOTE, {"sync": True, "rollouts_in_flight": 1}),
    (REMOTE, {"acts": False, "max_weight_update_interval": -1}),
    (REMOTE, {"max_weight_update_interval": 3, "rollouts_in_flight": 2}),
    (service, {"join": True, "samples_per_insert": 1.0, "error_buffer": 9.0}),
    (recipe, {}),
    (recipe, {"env_kwargs": None, "wrappers": (), "drop": (), "keep": None, "flatten": False}),
    (recipe, {"demonstrations_of": ["Other-v0"], "observe": (0, 0), "flatten": True}),
    (recipe, {"env_kwargs": {"max_episode_steps": 7}, "demonstrations_of": ()}),
    (recipe, {"time_limit": 7, "clip_reward": 1.0, "step_timeout": math.inf}),
    *((ppod, settings) for settings in ({}, {"total_buffer_demo_capacity": 1}, NOTHING)),
    (ppod, {"total_buffer_demo_capacity": 1, "alpha": 10, "annealing": "linear", "human_share": 0.0}),
    (ppod, {**NOTHING, **TARGET, "save_demos_every": 1, "num_agent_demos_to_save": 1}),
    (ppod, {"rho": 0.0, "phi": 0.5, **HUMAN, "human_share": 0.5, "ends": "truncated", "log_prob": "current"}),
    (ppod, {"rho": 0.5, "phi": 0.0, "ends": "terminated", "log_prob": "current", "total_buffer_demo_capacity": 1}),
    (ppod, {"alpha": 0.0, "total_buffer_demo_capacity": 3, "annealing": "current"}),
    (ppod, {"annealing": "current", "total_buffer_demo_capacity": 2}),
    (ppod, {**TARGET, "save_value_demos": True, "demo_dtypes": {}}),
    (attached, {"demo_dtypes": {}, "num_agent_demos_to_save": 10, "save_demos_every": 10, "save_value_demos": False}),
    (DemonstrationSampler, {"rho": 1.0, "phi": 0.0, "human_share": 1.0}),
    (DemonstrationSampler, {**NOTHING, "alpha": 10}),
    (writer, {"phi": 0.0, "value_capacity": None}),
    (writer, {"value_capacity": 0}),
    (writer, {"phi": 0.2, "value_capacity": 100, "annealing": "current"}),
    (episodic, {"recent_data_steps": 2, "recent_data_ratio": 0.5}),
    (episodic, {"recent_data_steps": 2, "recent_data_ratio": 0.5, "prioritized_sampling": True, "initial_priority": 2}),
    *((episodic, {"with_replacement": True, "prioritized_sampling": each}) for each in (False, True)),
    (episodic, {"record_episodic_return": True, "reward_clip": (-1.0, 1.0), "default_return": -5.0, "critic": print}),
    (episodic, {"gamma": 0.9}),
    (episodic, {"sampler": UniformSampler(), "record_episodic_return": True, "default_return": -5.0}),
    (episodic, {"recent_data_steps": 1, "recent_data_ratio": 0.0, "default_return": -1000, "initial_priority": 1}),
    (DynamicsEnsemble, {**MEAN, "sample": False}),
    *((fitted, settings) for settings in (MEAN, {**MEAN, "sample": False}, {**ONE, "propagation": "step"})),
    (ensemble, {"members": 1, "propagation": "step"}),
    (ensemble, {"num_elites": 2, "propagation": "trajectory"}),
    (ensemble, {"num_elites": 3}),
    *((WorldModelFit, settings) for settings in ({"max_epochs": 1}, {"hidden_sizes": []})),
    (WorldModelFit, {"max_epochs": 2, "patience": 1, "min_improvement": 0.0}),
    *((targets, settings) for settings in ({"reward": print}, {"reward_key": "gain"})),
    (cem, {"horizon": 1, "candidates": 2, "elites": 2, "iterations": 1}),
    (cem, {"horizon": 2, "warm_start": True, "noise": 0.0}),
    (cem, {"members": 1, "world": {"sample": True}, "particles": 3}),
    *((shooting, settings) for settings in ({"candidates": 1}, {"members": 1, "particles": 1}, {"particles": 3})),
    (ensemble, {"terminated": OutsideBox([-1.0, None], [1.0, None])}),
    (ensemble, {"terminated": OutsideBox([0.7, 0.0], [0.7, 0.0])}),
    (fitted, {"terminated": lambda o, a, n: n[:, :1] > 0}),
    (fitted, {"terminated": lambda o, a, n: n[:, 0]}),
)
