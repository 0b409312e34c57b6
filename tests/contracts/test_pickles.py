"""Every part is pickled by Python's own ``pickle``, and what comes back behaves like the original."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers import Sampler, Storage, Writer

import torchrl_lightning
from contracts import arguments, learners
from kit.actor_critic import TinyActorCritic, rollouts
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import parameters, trainer
from kit.specs import BOX, DISCRETE
from kit.states import differences
from kit.world_models import world_model
from torchrl_lightning import (
    AsynchronousCollector,
    BestCheckpoint,
    BranchedReplay,
    BufferReport,
    DemonstrationReplay,
    DemonstrationReplayTransform,
    DynamicsDataModule,
    EnvironmentRecipe,
    EpisodeVideo,
    EpsilonGreedyPolicy,
    ExperienceBuffer,
    GaussianEnsemble,
    LastCheckpoint,
    LoadedPolicy,
    LossModuleAgent,
    MaxSegmentTree,
    MBReplayBuffer,
    MinSegmentTree,
    MixedReplay,
    PPODBuffer,
    QuadraticReward,
    RandomShootingPlanner,
    ReplayService,
    RolloutMetricsLogger,
    RolloutStorage,
    StandardScaler,
    StopAtScore,
    TrialReport,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
    WorldModel,
    WorldModelEnvironment,
)
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning.agents import (
    A2CModule,
    CrossEntropyPlanner,
    DQNModule,
    DynamicsEnsemble,
    MBPOModule,
    MLPNetwork,
    PPOModule,
    RandomNetworkDistillation,
    RecurrentNetwork,
    ReinforceModule,
    SACModule,
    TD3Module,
    VTraceModule,
    WorldModelFit,
)

KINDS = (
    L.LightningDataModule,
    L.LightningModule,
    Callback,
    nn.Module,
    ReplayBuffer,
    Storage,
    Sampler,
    Writer,
    ConfigSafe,
)
MODEL = world_model()


def no_loss(specs: Any) -> None:
    """Build no loss."""


def played() -> DemonstrationReplay:
    return DemonstrationReplay(**arguments.PLAYED)


def greedy() -> EpsilonGreedyPolicy:
    return EpsilonGreedyPolicy(dqn().build(DISCRETE).policy.network)


# What is needed beside the arguments that the contracts of constructors know.
MADE: dict[str, Callable[[], Any]] = {
    "BestCheckpoint": partial(BestCheckpoint, monitor="eval/return", mode="max"),
    "BranchedReplay": lambda: BranchedReplay(ExperienceBuffer()),
    "BufferReport": partial(BufferReport, "page.html"),
    "DemonstrationReplayTransform": lambda: DemonstrationReplayTransform(played()),
    "DynamicsDataModule": model_data,
    "EnvironmentRecipe": partial(EnvironmentRecipe, "CartPole-v1", time_limit=9),
    "EpisodeVideo": partial(EpisodeVideo, "videos"),
    "EpsilonGreedyPolicy": greedy,
    "RolloutMetricsLogger": RolloutMetricsLogger,
    "GaussianEnsemble": partial(GaussianEnsemble, 2, 3, 1, [4]),
    "LastCheckpoint": partial(LastCheckpoint, "checkpoints"),
    "LoadedPolicy": lambda: LoadedPolicy(greedy(), DISCRETE),
    "LossModuleAgent": partial(LossModuleAgent, no_loss),
    "MBReplayBuffer": partial(MBReplayBuffer, 8),
    "MaxSegmentTree": partial(MaxSegmentTree, 4),
    "MinSegmentTree": partial(MinSegmentTree, 4),
    "MixedReplay": lambda: MixedReplay(ExperienceBuffer(), [ExperienceBuffer()], [0.5, 0.5]),
    "QuadraticReward": partial(QuadraticReward, [1.0]),
    "RandomShootingPlanner": lambda: RandomShootingPlanner(WorldModelEnvironment(MODEL)),
    "ReplayService": lambda: ReplayService(ExperienceBuffer()),
    "RolloutStorage": partial(RolloutStorage, 4),
    "StandardScaler": partial(StandardScaler, "ab"),
    "StopAtScore": partial(StopAtScore, 475.0),
    "TrialReport": partial(TrialReport, "study", "sqlite:///it.db", 3, "folder"),
    "VTraceBuffer": partial(VTraceBuffer, 4),
    "VanillaOnPolicyBuffer": partial(VanillaOnPolicyBuffer, 4),
    "WorldModel": lambda: WorldModel(MODEL.ensemble, MODEL.targets),
}
# Bases; environments, which are no parts; and one that belongs to another storage.
LEFT_OUT = {
    *("ActorCriticModule", "BufferBase", "ExperienceDataModule", "OffPolicyModule", "RolloutBuffer"),
    *("UpdatesDataModule", "WorldModelEnvironment", "EpisodicReturn", "DemonstrationDirectory"),
}


def is_part(name: str) -> bool:
    part = getattr(torchrl_lightning, name)
    return inspect.isclass(part) and issubclass(part, KINDS) and not issubclass(part, gym.Wrapper)


PARTS = [name for name in sorted(torchrl_lightning.__all__) if name not in LEFT_OUT and is_part(name)]


def build(name: str) -> Any:
    kind = getattr(torchrl_lightning, name)
    sound: dict[str, Any] = {**arguments.SOUND, **learners.SOUND}.get(kind, {})
    return MADE.get(name, partial(kind, **sound))()


def again(part: Any) -> Any:
    return pickle.loads(pickle.dumps(part))


def settings_of(part: Any) -> dict[str, Any]:
    """What a part was built with, as far as it keeps that under the same name and it can be compared."""
    names = inspect.signature(type(part)).parameters
    found = {name: vars(part).get(name) for name in names if name in vars(part)}
    return {name: value for name, value in found.items() if isinstance(value, int | float | str | list | tuple | None)}


@pytest.mark.parametrize("name", PARTS)
def test_part_is_pickled_with_its_settings(name: str) -> None:
    part = build(name)
    state = dict(part.state_dict()) if isinstance(part, nn.Module) else {}  # a generator is seeded when it is looked at
    other = again(part)
    assert type(other) is type(part)
    assert settings_of(other) == settings_of(part)
    if isinstance(part, nn.Module):
        assert not differences(dict(other.state_dict()), state)
    elif isinstance(part, L.LightningDataModule):
        assert other.hparams == part.hparams
        assert repr(other) == repr(part)


# ---------------------------------------------------------------------- DataModules


DATA: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "rollouts": (rollouts, TinyActorCritic),
    "rollouts of demonstrations": (partial(rollouts, buffer=PPODBuffer), partial(PPOModule, MLPNetwork([8]))),
    "rollouts, normalised": (partial(rollouts, normalize_observation=True, normalize_reward=True), TinyActorCritic),
    "rollouts of processes": (
        partial(rollouts, env=EnvironmentRecipe("CartPole-v1", vectorization="async"), num_envs=2),
        TinyActorCritic,
    ),
    "rollouts of workers": (
        partial(rollouts, collector=partial(AsynchronousCollector, num_workers=1)),
        TinyActorCritic,
    ),
    "rollouts of a lambda": (lambda: rollouts(env=lambda: gym.make("CartPole-v1")), TinyActorCritic),
    "replay": (partial(replay_data, "prioritized, three steps"), dqn),
    "replay, beside the checkpoint": (partial(replay_data, checkpoint_buffer="beside"), dqn),
    "replay, updates in one step": (partial(replay_data, updates_per_step=5), dqn),
    "replay of sequences": (partial(replay_data, "sequence"), partial(dqn, recurrent=True)),
    "replay of real and imagined rows": (
        partial(replay_data, env="Pendulum-v1", source=partial(BranchedReplay, branches_per_fit=20)),
        lambda: MBPOModule(
            MLPNetwork([8]), dynamics=WorldModelFit([8], num_members=2, num_elites=1, max_epochs=1, batch_size=8)
        ),
    ),
    "fits": (
        model_data,
        lambda: DynamicsEnsemble([8], planner=partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2)),
    ),
}


class Pickled(L.Callback):
    """Pickles what a run consists of, within it."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            others = [each for each in run.callbacks if each is not self]
            self.kept.append((again(run.datamodule), again(module), again(others), run.datamodule.state_dict()))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", DATA)
def test_datamodule_is_pickled_at_any_time(name: str, tmp_path: Path) -> None:
    make, learn = DATA[name]
    data, module, kept = make(), learn(), list[Any]()
    data.setup("fit")
    other = again(data)
    assert other.trainer is None
    assert not differences(other.state_dict(), data.state_dict())
    data.close()
    callbacks = [RolloutMetricsLogger(), LastCheckpoint(tmp_path / "end"), Pickled(kept)]
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    run.fit(module, datamodule=other)  # what comes back trains
    within, learner, _, state = kept[0]
    assert not differences(within.state_dict(), state)
    assert parameters(learner).shape == parameters(module).shape
    behind = again(other)
    assert behind.frames == other.frames > 0
    assert not differences(behind.state_dict(), other.state_dict())
    if isinstance(other.buffer, ExperienceBuffer) and not isinstance(other, DynamicsDataModule):
        assert (behind.buffer.sample(4) == other.buffer.sample(4)).all()
    assert not differences(dict(again(module).state_dict()), dict(module.state_dict()))
    again([each for each in callbacks if not isinstance(each, Pickled)])
    for each in (within, behind):
        each.close()


@pytest.mark.parametrize("name", ["rollouts", "replay", "replay, updates in one step"])
def test_run_with_a_pickled_datamodule_equals_one_with_the_original(name: str, tmp_path: Path) -> None:
    weights = []
    for change in (lambda data: data, again, copy.deepcopy):
        torch.manual_seed(0)
        make, learn = DATA[name]
        module, data = learn(), change(make())
        trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
        weights.append(parameters(module))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_functions_travel_and_are_shared_by_copies() -> None:
    """A lambda is pickled by value; a copy within the process has the same one."""
    calls: list[int] = []

    def make() -> gym.Env:
        calls.append(1)
        return gym.make("CartPole-v1")

    data = replay_data(env=make)
    assert copy.deepcopy(data).env is make
    assert not calls
    other = again(data)
    other.setup("fit")
    assert other.specs.num_envs == 2
    other.close()


class Unpicklable:
    """Builds an environment, and goes nowhere."""

    def __call__(self) -> gym.Env:
        return gym.make("CartPole-v1")

    def __reduce__(self) -> Any:
        raise TypeError("it holds a connection\nto a simulator")


def test_value_that_cannot_travel_is_named_in_one_line() -> None:
    data = rollouts(env=Unpicklable())
    with pytest.raises(TypeError, match=r"^OnPolicyDataModule.*env=Unpicklable.*[^\n]*$"):
        pickle.dumps(data)


# ---------------------------------------------------------------------- agents

AGENTS: dict[str, tuple[Callable[[], Any], Any]] = {
    **{
        kind.__name__: (partial(kind, MLPNetwork([8])), DISCRETE)
        for kind in (A2CModule, PPOModule, ReinforceModule, VTraceModule, DQNModule)
    },
    **{kind.__name__: (partial(kind, MLPNetwork([8])), BOX) for kind in (SACModule, TD3Module)},
    "a recurrent one": (partial(PPOModule, RecurrentNetwork("gru", 8)), DISCRETE),
    "a curious one": (
        lambda: PPOModule(MLPNetwork([8]), intrinsic=RandomNetworkDistillation(MLPNetwork([8]))),
        DISCRETE,
    ),
    "a schedule that is a lambda": (
        lambda: PPOModule(MLPNetwork([8]), schedule=lambda progress: 1 - progress),
        DISCRETE,
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_built_agent_is_pickled_with_its_networks(name: str) -> None:
    make, specs = AGENTS[name]
    module = make().build(specs)
    other = again(module)
    assert other.is_built
    assert not differences(dict(other.state_dict()), dict(module.state_dict()))
    step = specs.observation.rand()[None]
    if name != "a recurrent one":
        acted = []
        for each in (module, other):
            torch.manual_seed(0)
            acted.append(each.policy(step.clone())["action"])
        assert torch.equal(*acted)
