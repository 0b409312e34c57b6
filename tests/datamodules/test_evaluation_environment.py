"""Evaluation uses the environment of the collection, or the run raises an error before it trains."""

from __future__ import annotations

import re
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import (
    ClipReward,
    DtypeObservation,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformObservation,
    TransformReward,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)

from kit import actor_critic
from kit.actor_critic import TinyActorCritic, rollouts
from kit.counting import CountingEnv
from kit.images import CountedImages
from kit.replay import replay_data
from kit.runs import trainer
from kit.states import differences, plain
from torchrl_lightning import (
    AsynchronousCollector,
    EnvironmentRecipe,
    GymnasiumCollector,
    make_vector_env,
    play_episodes,
)
from torchrl_lightning._core.protocols import CollectorApi
from torchrl_lightning.agents import DQNModule, MLPNetwork
from torchrl_lightning.datamodules._run.evaluation import (
    check_evaluation,
    checked_rollouts,
    view_of,
    view_of_collector,
)
from torchrl_lightning.environments import spawn_seed

SIZES = {"num_envs": 2, "frames_per_batch": 64}


class Shift(TransformObservation):
    """Add ten to all observations without new bounds."""

    def __init__(self, env):
        super().__init__(env, lambda observation: observation + np.float32(10), env.observation_space)


def shifted(**kwargs):
    return Shift(gym.make("CartPole-v1", **kwargs))


def torchrl_env(make, *around):
    return TransformedEnv(GymWrapper(make(), categorical_action_encoding=True), Compose(InitTracker(), *around))


def ours(policy, seed, env=shifted):
    return GymnasiumCollector(env, policy, **SIZES, seed=seed)


def of_torchrl(policy, make=shifted):
    return Collector(SerialEnv(2, partial(torchrl_env, make)), policy, frames_per_batch=64)


def ready(*wrappers):
    return make_vector_env("CartPole-v1", 2, wrappers=wrappers)


@pytest.fixture
def fit(tmp_path):
    def run(env="CartPole-v1", **settings):
        module = TinyActorCritic()
        try:
            actor_critic.fit(tmp_path, rollouts(env=env, **{**SIZES, **settings}), module, max_epochs=1)
        finally:
            run.updates = module.updates
        return module

    return run


REFUSED = (
    r"evaluation must use the environment of collection, .* wrappers are CartPoleEnv in evaluation, expected "
    r"CartPoleEnv > Shift as in collection\. .* eval_env="
)


@pytest.mark.parametrize("collector", [ours, of_torchrl])
def test_wrapper_that_is_missing_in_evaluation_is_refused_without_eval_env(collector, fit, caplog) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        fit(collector=collector)
    assert fit.updates == 0
    assert fit(shifted, collector=collector).updates
    assert fit(collector=collector, eval_env=shifted).updates
    assert "eval_env" not in caplog.text
    assert fit(collector=collector, eval_env="CartPole-v1").updates
    assert caplog.text.count("wrappers are CartPoleEnv in evaluation, expected CartPoleEnv > Shift") == 1


def test_ready_vector_environment_is_compared_with_eval_env(fit, caplog) -> None:
    assert fit(ready(Shift), eval_env=shifted).updates
    assert "eval_env" not in caplog.text
    assert fit(ready(Shift), eval_env="CartPole-v1").updates
    assert caplog.text.count("wrappers are CartPoleEnv in evaluation, expected CartPoleEnv > Shift") == 1
    other = partial(DtypeObservation, dtype=np.float64)
    with pytest.raises(ValueError, match=r"'observation'.*dtype=float64.*float32"):
        fit(ready(), eval_env=lambda: other(gym.make("CartPole-v1")))
    assert fit.updates == 0


@pytest.mark.usefixtures("forked")
def test_specs_of_environments_in_other_processes_are_compared(fit) -> None:
    def collector(policy, seed):
        made = AsynchronousCollector(CountingEnv, policy, num_workers=1, **SIZES, seed=seed)
        made.rollout = None  # the check must not need a rollout
        return made

    with pytest.raises(ValueError, match=r"'observation'.*shape=\(4,\).*\(3,\)"):
        fit(collector=collector)


def test_validation_without_a_fit_compares_nothing() -> None:
    data = rollouts(collector=ours, **SIZES)
    trainer(limit_val_batches=1).validate(TinyActorCritic(), datamodule=data, verbose=False)


def difference(stepped, played, given=True):
    return check_evaluation(view_of(stepped), view_of(played), given)


@pytest.mark.parametrize(
    "wrap",
    [
        RecordEpisodeStatistics,
        partial(TimeLimit, max_episode_steps=7),
        lambda env: RecordEpisodeStatistics(TimeLimit(env, 7)),
    ],
)
def test_neutral_wrappers_are_ignored(wrap) -> None:
    assert difference(ready(wrap), ready(), given=False) is None
    assert difference(gym.wrappers.vector.RecordEpisodeStatistics(ready()), ready(), given=False) is None


def test_wrappers_are_named_from_the_inside_out() -> None:
    clipped = gym.wrappers.vector.ClipReward(ready(partial(TransformReward, func=np.sign), Shift), -1, 1)
    assert view_of(clipped).wrappers == ["CartPoleEnv", "TransformReward", "Shift", "ClipReward"]


class Bare(gym.Wrapper):
    """A wrapper that does not store its arguments."""

    def __init__(self, env, shown=0):
        super().__init__(env)


def pendulum(*around, **arguments):
    return make_vector_env(EnvironmentRecipe("Pendulum-v1", arguments, wrappers=around), 1)


@pytest.mark.parametrize(
    ("stepped", "played", "message"),
    [
        ({"g": 9.0}, {"g": 9.0, "render_mode": "rgb_array"}, None),
        ({"g": 9.0}, {"g": 8.0}, "PendulumEnv has g=8.0 in evaluation, expected 9.0 as in collection"),
        ({}, {"g": 8.0}, "PendulumEnv has g=8.0 in evaluation, expected its default as in collection"),
        (partial(TransformReward, func=np.sign), partial(TransformReward, func=np.sign), None),
        (
            partial(TransformReward, func=np.sign),
            partial(TransformReward, func=np.tanh),
            "TransformReward has func=numpy.t",
        ),
        (
            partial(ClipReward, min_reward=-1, max_reward=1),
            partial(ClipReward, min_reward=-1, max_reward=np.float32(0.5)),
            "ClipReward has max_reward=0.5 in evaluation, expected 1 as in collection",
        ),
        (partial(Bare, shown=1), partial(Bare, shown=2), None),
    ],
)
def test_recorded_arguments_of_environments_and_wrappers_are_compared(stepped, played, message) -> None:
    made = [pendulum(**each) if isinstance(each, dict) else pendulum(each) for each in (stepped, played)]
    if message is None:
        assert difference(*made, given=False) is None
        return
    assert message in difference(*made)
    with pytest.raises(ValueError, match=re.escape(message)):
        difference(*made, given=False)


def test_reward_clipping_may_be_missing_in_evaluation() -> None:
    clipping, bare = (EnvironmentRecipe("Pendulum-v1", time_limit=9, clip_reward=clip) for clip in (0.1, None))
    still = TensorDictModule(lambda x: x[..., :1] * 0, ["observation"], ["action"])
    earned, of_bare = (play_episodes(env, still, 2, seed=0)["episode_return"] for env in (clipping, bare))
    assert earned.min() < -9 * 0.1
    assert torch.equal(earned, of_bare)
    stepped, played = make_vector_env(clipping, 1), make_vector_env(bare, 1)
    assert difference(stepped, played, given=False) is None
    assert difference(stepped, stepped, given=False) is None
    assert "> ClipReward in evaluation" in difference(played, stepped)


RECIPE = EnvironmentRecipe(
    CountedImages,
    {"shape": (5, 5, 2), "end": "never"},
    action_repeat=2,
    time_limit=7,
    wrappers=[partial(TransformReward, func=np.sqrt)],
    drop=["step"],
    frame_stack=3,
)
WAYS_IN = {
    "id": {"env": "CartPole-v1"},
    "recipe": {"env": RECIPE},
    "recipe that clips": {"env": EnvironmentRecipe("CartPole-v1", clip_reward=1.0, observe=[2, 0])},
    "factory": {"env": shifted},
    "ready vector environment": {"env": lambda: ready(Shift), "eval_env": shifted},
    "collector of an id": {"env": "CartPole-v1", "collector": partial(ours, env="CartPole-v1")},
    "collector of a recipe": {"env": RECIPE, "collector": partial(ours, env=RECIPE)},
}


class Acts:
    """A random policy that stores its inputs."""

    def __init__(self):
        self.seen, self.random = [], torch.Generator().manual_seed(0)

    def __call__(self, step):
        self.seen.append(plain(step))
        return step.set("action", torch.randint(2, step.shape, generator=self.random))


class Evaluates(DQNModule):
    """Play the same episodes in the collector's environment and in an evaluation."""

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        data, (here, there) = self.trainer.datamodule, self.acts
        found = play_episodes(data.collector.env, here, 8, seed=spawn_seed(0, "evaluation", 0, 1))
        self.played = plain(found), plain(data.evaluate(there, 8))


@pytest.mark.parametrize("way", WAYS_IN)
def test_evaluation_steps_as_training_does(way, tmp_path) -> None:
    settings = dict(WAYS_IN[way])
    if "eval_env" in settings:
        settings["env"] = settings["env"]()
    module = Evaluates(MLPNetwork([8]))
    module.acts = Acts(), Acts()
    data = replay_data(**settings, eval_num_envs=2, updates_per_epoch=1)
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    here, there = module.acts
    assert len(here.seen) > 8  # episodes end in between
    assert not differences(here.seen, there.seen)
    assert not differences(*module.played)


def test_inaccessible_environments_are_not_compared() -> None:
    vectorized = gym.make_vec("CartPole-v1", 2, "vector_entry_point")
    assert view_of(vectorized).wrappers is None
    assert difference(vectorized, ready(Shift), given=False) is None
    assert view_of_collector(CollectorApi.of(iter([]))) is None


def cart_pole(*around):
    return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), Compose(*around))


def test_transforms_of_observations_or_rewards_are_named() -> None:
    scaled = cart_pole(InitTracker(), RewardScaling(0.0, 0.1))
    for env in (scaled, SerialEnv(1, lambda: scaled), TransformedEnv(SerialEnv(1, lambda: scaled), StepCounter())):
        assert "expected CartPoleEnv > RewardScaling as" in str(difference(env, ready()))
        with pytest.raises(ValueError, match="> RewardScaling"):
            difference(env, ready(), given=False)
    # A reward wrapper of Gymnasium replaces the transform.
    assert difference(scaled, ready(partial(TransformReward, func=lambda r: r / 10)), given=False) is None


def test_counters_and_primers_are_not_named() -> None:
    kept = Compose(StepCounter(max_steps=9), RewardSum(), TensorDictPrimer(hidden=Unbounded((3,))))
    env = cart_pole(InitTracker(), kept, DoubleToFloat(), DeviceCastTransform("cpu"))
    assert view_of(env).specs.keys == ["observation"]
    assert difference(env, ready(), given=False) is None
    assert difference(SerialEnv(2, lambda: env), ready(), given=False) is None


def spaced(**changes):
    env = CountingEnv(kind="dict")
    for name, space in changes.items():
        if name == "action":
            env.action_space = space
        else:
            env.observation_space = spaces.Dict({**env.observation_space.spaces, name: space})
    return make_vector_env(lambda: env, 1)


UP_TO_SEVEN = spaces.Box(np.array([-1, -7], np.float32), 7, (2,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": spaces.Discrete(2)}, "observation 'more' exists only in evaluation"),
        (
            {"image": spaces.Box(0, 255, (3, 3), np.uint8)},
            r"'image' has shape=\(3, 3\) in evaluation, expected \(2, 2\)",
        ),
        ({"image": spaces.Box(0, 7, (2, 2), np.uint8)}, "'image' has kind=Bounded in evaluation, expected Unbounded"),
        ({"inner": spaces.Dict({})}, r"observation \('inner', 'count'\) is missing in evaluation"),
        ({"action": spaces.Discrete(4)}, "action has n=4 in evaluation, expected 3 as in collection"),
        ({"action": spaces.MultiBinary(3)}, "action has kind=Binary in evaluation, expected Categorical"),
        ({"action": UP_TO_SEVEN}, r"action has low=\[-1.0, -7.0\] in evaluation, expected -1.0 .*; action has hi"),
    ],
)
def test_specs_that_differ_are_refused_field_by_field(changes, message) -> None:
    stepped = spaced(action=spaces.Box(-1, 1, (2,))) if UP_TO_SEVEN in changes.values() else spaced()
    with pytest.raises(ValueError, match=message):
        difference(stepped, spaced(**changes))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"observation": torch.zeros(2, 5, 3)},
            r"'observation' has shape \(3,\) in its rollouts, expected shape \(4,\)",
        ),
        ({"pixels": torch.zeros(2, 5, 4)}, r"'observation' is missing in its rollouts, expected shape \(4,\)"),
    ],
)
def test_first_rollout_of_an_inaccessible_collector_is_compared(rollout, message) -> None:
    specs = view_of(ready()).specs
    with pytest.raises(ValueError, match=message):
        next(checked_rollouts([TensorDict(rollout, [2, 5])], specs, None))
    rollouts = [TensorDict({"observation": torch.zeros(2, 5, 4)}, [2, 5]) for _ in range(3)]
    assert [id(each) for each in checked_rollouts(rollouts, specs, None)] == [id(each) for each in rollouts]
