from __future__ import annotations

from functools import partial
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import GymEnv

from torchrl_lightning import EnvironmentRecipe, environment_specs, make_vector_env
from torchrl_lightning.collectors._faults import EnvironmentFault
from torchrl_lightning.demonstrations import record_demonstrations, recording
from torchrl_lightning.demonstrations.recording import demonstration_specs


class Counting(gym.Env):
    """Shows its step as an image and a number; ends after three, or five and so on, steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape=(2, 2), ends=True):
        image = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Dict({"image": image, "step": spaces.Box(0, 255, (1,), np.float32)})
        self.count, self.length, self.ends = 0, 1, ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.length = 0, self.length + 2
        return self.seen(), {}

    def step(self, action):
        self.count += 1
        return self.seen(), float(10 * self.count), self.ends and self.count == self.length, False, {}

    def seen(self):
        space = self.observation_space["image"]
        return {"image": np.full(space.shape, self.count, np.uint8), "step": np.array([self.count], np.float32)}


def first_action(step):
    return step.set("action", torch.zeros(step.batch_size, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(2, 2), (1, 4, 4), (4, 4, 3)])
@pytest.mark.parametrize("stack", [1, 4])
def test_steps_are_kept_unstacked_with_what_followed(shape, stack):
    recipe = EnvironmentRecipe(partial(Counting, shape), frame_stack=stack, clip_reward=20)
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
        assert found.rewards.tolist() == [10.0, *[20.0] * (found.length - 1)]  # as learning gets them
        assert (found.terminated, found.truncated) == (True, False)
        assert found.metadata.get("frame_stack") == (stack if stack > 1 else None)


def test_the_repeat_of_a_recipe_is_the_frame_skip():
    (found,) = record_demonstrations(EnvironmentRecipe("CartPole-v1", action_repeat=3), first_action, 1, seed=0)
    assert (found.frame_skip, found.metadata) == (3, {"environment": "CartPole-v1"})


@pytest.mark.parametrize(
    "env",
    [
        EnvironmentRecipe("CartPole-v1", time_limit=4),
        partial(GymEnv, "CartPole-v1", max_episode_steps=4, categorical_action_encoding=True),
    ],
)
def test_a_time_limit_is_no_end_of_the_task(env):
    (found,) = record_demonstrations(env, first_action, 1, seed=0)
    assert (found.length, found.terminated, found.truncated) == (4, False, True)


def test_an_environment_of_torchrls_is_recorded_as_one_of_gymnasiums():
    env = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    (found,) = record_demonstrations(env, first_action, 1, seed=0)
    found.fits(environment_specs(make_vector_env("CartPole-v1", 1)))
    assert found.total_reward == found.length
    assert found.last_observation is not None


def test_the_same_seed_records_the_same():
    first, again, other = (
        next(record_demonstrations("CartPole-v1", first_action, 1, seed=seed)).steps["observation"][0].tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_an_environment_without_an_end_is_refused():
    with mock.patch.object(recording, "_MANY_STEPS", 128), pytest.raises(EnvironmentFault, match="time_limit="):
        next(record_demonstrations(partial(Counting, ends=False), first_action, 1))
