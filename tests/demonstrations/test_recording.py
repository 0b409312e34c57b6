from __future__ import annotations

from functools import partial
from unittest import mock

import gymnasium
import pytest
from torchrl.envs import GymEnv

from kit.images import CountedImages, first_action
from torchrl_lightning import EnvironmentRecipe, environment_specs, make_vector_env
from torchrl_lightning.cli.checks import one_line
from torchrl_lightning.demonstrations import record_demonstrations, recording
from torchrl_lightning.demonstrations.recording import demonstration_specs


@pytest.mark.parametrize("shape", [(2, 2), (1, 4, 4), (4, 4, 3)])
@pytest.mark.parametrize("stack", [1, 4])
def test_steps_are_kept_unstacked_with_what_followed(shape, stack):
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


def test_the_repeat_of_a_recipe_is_the_frame_skip():
    (found,) = record_demonstrations(EnvironmentRecipe("CartPole-v1", action_repeat=3), first_action, 1, seed=0)
    assert (found.frame_skip, found.metadata["environment"]) == (3, "CartPole-v1")


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
def test_what_the_environment_calls_a_success_is_kept(name, always, told, limit):
    env = EnvironmentRecipe(partial(Goal, name, always), time_limit=limit)
    found = [each.metadata.get("success") for each in record_demonstrations(env, first_action, 3, seed=0)]
    assert found == (told if limit is None else [*told[:2], told[1]])


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
    few = mock.patch.object(recording, "MANY_STEPS", 128)
    with few, pytest.raises(SystemExit, match=r"^error: No episode has ended .*time_limit="), one_line():
        next(record_demonstrations(partial(CountedImages, end="never"), first_action, 1))
