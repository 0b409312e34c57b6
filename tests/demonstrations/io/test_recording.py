from __future__ import annotations

import math
import re
from functools import partial
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv, GymWrapper

from kit.images import CountedImages, first_action
from torchrl_lightning import EnvironmentRecipe, environment_specs, make_vector_env
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.demonstrations import record_demonstrations
from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.io import keyboard, recording
from torchrl_lightning.demonstrations.io.recording import demonstration_specs


@pytest.mark.parametrize("shape", [(2, 2), (1, 4, 4), (4, 4, 3)])
@pytest.mark.parametrize("stack", [1, 4])
def test_recorded_steps_are_unstacked_and_have_a_last_observation(shape, stack):
    recipe = EnvironmentRecipe(partial(CountedImages, shape, length=3, growth=2), frame_stack=stack, clip_reward=2)
    specs, frame_skip = demonstration_specs(recipe)
    first, second = record_demonstrations(recipe, first_action, 2, seed=0)
    assert (second.length, first.length) == (first.length + 2, first.length)
    for found in (first, second):
        found.fits(specs, frame_skip)
        count = list(range(found.length))
        assert found.steps["image"].flatten(1).amax(1).tolist() == count
        assert found.steps["step"].flatten().tolist() == count
        assert found.steps["image"].shape[1:] == shape
        assert found.last_observation["image"].unique().tolist() == [found.length]
        assert found.rewards.tolist() == [1.0, *[2.0] * (found.length - 1)]  # as learning gets them
        assert (found.terminated, found.truncated) == (True, False)
        assert found.metadata.get("frame_stack") == (stack if stack > 1 else None)


def test_action_repeat_of_a_recipe_is_the_frame_skip():
    (found,) = record_demonstrations(EnvironmentRecipe("CartPole-v1", action_repeat=3), first_action, 1, seed=0)
    assert (found.frame_skip, found.metadata["environment"]) == (3, "CartPole-v1")


@pytest.mark.parametrize(
    "env",
    [
        EnvironmentRecipe("CartPole-v1", time_limit=4),
        partial(GymEnv, "CartPole-v1", max_episode_steps=4, categorical_action_encoding=True),
    ],
)
def test_time_limit_truncates_without_terminating(env):
    (found,) = record_demonstrations(env, first_action, 1, seed=0)
    assert (found.length, found.terminated, found.truncated) == (4, False, True)


class Goal(gymnasium.Wrapper):
    """Says at every step, or once it is reached, that an episode's goal is its second step."""

    def __init__(self, name, always):
        super().__init__(CountedImages(length=1, growth=1))
        self.name, self.always = name, always

    def step(self, action):
        *step, info = super().step(action)
        reached = int(step[0]["step"][0]) == 2
        return *step, {**info, **({self.name: reached} if reached or self.always else {})}


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize(
    ("name", "always", "told"),
    [
        ("success", True, [False, True, False]),
        ("is_success", True, [False, True, False]),
        ("is_success", False, [None, True, None]),
        ("reached", True, [None, None, None]),
    ],
)
def test_reported_success_is_stored(name, always, told, limit):
    env = EnvironmentRecipe(partial(Goal, name, always), time_limit=limit)
    found = [each.metadata.get("success") for each in record_demonstrations(env, first_action, 3, seed=0)]
    assert found == (told if limit is None else [*told[:2], told[1]])


def test_torchrl_environment_is_recorded_like_a_gymnasium_environment():
    env = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    (found,) = record_demonstrations(env, first_action, 1, seed=0)
    found.fits(environment_specs(make_vector_env("CartPole-v1", 1)))
    assert found.total_reward == found.length
    assert found.last_observation is not None


def test_same_seed_records_the_same():
    first, again, other = (
        next(record_demonstrations("CartPole-v1", first_action, 1, seed=seed)).steps["observation"][0].tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_environment_without_an_end_is_refused():
    few = mock.patch.object(recording, "MANY_STEPS", 128)
    with few, pytest.raises(SystemExit, match=r"^error.*time_limit="), exit_with_one_line():
        next(record_demonstrations(partial(CountedImages, end="never"), first_action, 1))


class Received(gymnasium.Env):
    """Observes what it was given as its last action, and ends after three steps."""

    def __init__(self, space):
        self.action_space = space
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (math.prod(space.shape or (1,)),), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(self.observation_space.shape), {}

    def step(self, action):
        self.t += 1
        return np.nan_to_num(np.asarray(action, np.float64)).reshape(-1), 1.0, self.t == 3, False, {}


def acting(*numbers, dtype=torch.float32):
    """Always act so."""
    return TensorDictModule(
        lambda x: torch.tensor(numbers, dtype=dtype).expand(*x.shape[:-1], len(numbers)),
        in_keys=["observation"],
        out_keys=["action"],
    )


TWO = gymnasium.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 3], np.float32))
CLIPPED = {
    "above": (TWO, [4.0, 0.5], [1.0, 0.5]),
    "below": (TWO, [0.5, -7.0], [0.5, -2.0]),
    "infinite": (TWO, [np.inf, -np.inf], [1.0, -2.0]),
    "scalar": (gymnasium.spaces.Box(-1, 1, (), np.float32), [2.0], [1.0]),
    "float16": (gymnasium.spaces.Box(-1, 1, (2,), np.float16), [2.0, -0.5], [1.0, -0.5]),
    "float64": (gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float64), [2.0, -0.05], [0.1, -0.05]),
    "one side": (gymnasium.spaces.Box(-np.inf, 0.3, (2,), np.float64), [2.0, -9.0], [0.3, -9.0]),
    "whole": (gymnasium.spaces.Box(0, 5, (2,), np.int32), [7.0, 2.0], [5.0, 2.0]),
}


WAYS = [(name, library) for name in CLIPPED for library in ("gymnasium", "torchrl")]
WAYS.remove(("scalar", "torchrl"))  # GymWrapper gives scalars a dimension


@pytest.mark.parametrize(("name", "library"), WAYS)
@pytest.mark.filterwarnings("ignore")  # TorchRL warns about classes of its own
def test_actions_outside_of_their_box_are_refused_or_recorded_as_the_environment_gets_them(name, library):
    space, given, expected = CLIPPED[name]
    env = partial(Received, space) if library == "gymnasium" else lambda: GymWrapper(Received(space))
    dtype = torch.float32 if space.dtype.kind == "f" else torch.int32
    policy = acting(*(int(number) if dtype == torch.int32 else number for number in given), dtype=dtype)
    says = r"^error: In episode 0 'action'\[0[],].* outside of .* Record with clip_actions=True"
    with pytest.raises(SystemExit, match=says), exit_with_one_line():
        next(record_demonstrations(env, policy, 1, seed=0))
    (found,) = record_demonstrations(env, policy, 1, seed=0, clip_actions=True)
    specs, _ = demonstration_specs(env)
    found.fits(specs)
    assert found.steps["action"].dtype == specs.action.dtype
    received = [*found.steps["observation"][1:].tolist(), found.last_observation["observation"].tolist()]
    torch.testing.assert_close(found.steps["action"].double(), torch.tensor(received).double())
    assert found.steps["action"].tolist() == [pytest.approx(expected)] * 3


def test_rounding_is_recorded_without_clipping():
    space = gymnasium.spaces.Box(0.1, 0.3, (2,), np.float64)
    (found,) = record_demonstrations(partial(Received, space), acting(0.1, 0.3), 1, seed=0)
    found.fits(demonstration_specs(partial(Received, space))[0])
    assert found.last_observation["observation"].tolist() == [pytest.approx(0.1), 0.3]


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (gymnasium.spaces.Discrete(3), 3),
        (gymnasium.spaces.Discrete(3, start=2), -1),
        (gymnasium.spaces.MultiDiscrete([2, 3]), [1, 3]),
        (gymnasium.spaces.MultiBinary(2), [1, 2]),
    ],
)
def test_invalid_discrete_actions_are_refused_and_never_clipped(space, action):
    numbers = torch.tensor(action)
    policy = TensorDictModule(
        lambda x: numbers.expand(*x.shape[:-1], *numbers.shape), in_keys=["observation"], out_keys=["action"]
    )
    with pytest.raises(DemonstrationFault, match="0 'action'"):
        next(record_demonstrations(partial(Received, space), policy, 1, seed=0))
    with pytest.raises(DemonstrationFault, match="clip_actions"):
        next(record_demonstrations(partial(Received, space), policy, 1, seed=0, clip_actions=True))


@pytest.mark.parametrize("clip", [False, True])
def test_actions_that_are_no_numbers_are_refused(clip):
    with pytest.raises(ValueError, match="NaN actions"):
        next(record_demonstrations(partial(Received, TWO), acting(np.nan, 0.0), 1, seed=0, clip_actions=clip))


def recorder_of(space, clips):
    return keyboard._Recorder(Received(space), 1, None, clips)


@pytest.mark.parametrize(
    ("space", "key", "expected"),
    [
        (gymnasium.spaces.Discrete(3, start=2), 4, 4),
        (gymnasium.spaces.Discrete(3, dtype=np.int32), 2.0, 2),
        (gymnasium.spaces.Box(-1, 1, (), np.float32), 0.5, 0.5),
        (gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float16), 0.1, [0.1, 0.1]),
        (TWO, [1, 3], [1, 3]),
        (gymnasium.spaces.MultiBinary(2), [0, 1], [0, 1]),
        (gymnasium.spaces.MultiDiscrete([2, 3], start=[1, 1]), [2, 3], [2, 3]),
    ],
)
def test_action_of_a_key_is_one_of_the_space(space, key, expected):
    recorder = recorder_of(space, clips=False)
    recorder.reset()
    action = recorder.action(key, "noop")
    assert space.contains(action)
    assert np.asarray(action).tolist() == pytest.approx(expected, abs=1e-3)
    recorder.step(key)
    assert space.contains(recorder._actions[0])


@pytest.mark.parametrize(
    ("space", "key", "clipped"),
    [
        (gymnasium.spaces.Discrete(3, start=2), 0, None),
        (gymnasium.spaces.Discrete(3), 1.7, None),
        (gymnasium.spaces.Discrete(3), "left", None),
        (gymnasium.spaces.MultiBinary(2), [0, 2], None),
        (TWO, 2, [1, 2]),
        (TWO, [1, 2, 3], None),
        (TWO, np.nan, None),
        (gymnasium.spaces.Box(0, 5, (2,), np.uint8), 300, [5, 5]),
    ],
)
def test_invalid_action_of_a_key_is_refused_or_clipped(space, key, clipped):
    says = rf"^noop must be an action of .*, got {re.escape(repr(key))}\. Choose another"
    with pytest.raises(ValueError, match=says):
        recorder_of(space, clips=False).action(key, "noop")
    if not isinstance(space, gymnasium.spaces.Box):
        with pytest.raises(ValueError, match="clip_actions"):
            recorder_of(space, clips=True)
    elif clipped is not None:
        recorder = recorder_of(space, clips=True)
        recorder.reset()
        shown, *_ = recorder.step(key)
        assert shown.tolist() == clipped == recorder._actions[0].tolist()
