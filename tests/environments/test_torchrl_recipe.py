"""A recipe lays TorchRL's transforms around a TorchRL environment, as it lays wrappers around Gymnasium's."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from torchrl.envs import GymWrapper, RewardScaling, SerialEnv, StepCounter

from kit.images import ImageAlone, Mission
from kit.torchrl_envs import Walk, still
from torchrl_lightning import EnvironmentRecipe, environment_specs
from torchrl_lightning.environments import make_environment

CART_POLE = {"_target_": "torchrl.envs.GymEnv", "env_name": "CartPole-v1", "categorical_action_encoding": True}
SCALED = {"_target_": "torchrl.envs.RewardScaling", "loc": 0.0, "scale": 0.5}


def image(layout):
    return GymWrapper(ImageAlone(Mission(), layout), categorical_action_encoding=True)


def test_environment_by_its_target() -> None:
    recipe = EnvironmentRecipe(CART_POLE, time_limit=5, wrappers=[SCALED], clip_reward=0.4)
    env = make_environment(pickle.loads(pickle.dumps(recipe)), 2)
    assert isinstance(env, SerialEnv)
    assert environment_specs(env).keys == ["observation"]
    rollout = env.rollout(9)
    assert rollout["next", "reward"].unique().tolist() == [pytest.approx(0.4)]
    assert rollout.shape == (2, 5)
    assert rollout["next", "truncated"][:, -1].all()
    assert eval(repr(recipe)).settings() == recipe.settings()
    assert recipe.settings()["wrappers"][0]["scale"] == 0.5


@pytest.mark.parametrize("wrapper", [partial(RewardScaling, 0.0, 0.5), RewardScaling(0.0, 0.5), SCALED])
def test_transform_in_each_form_serves_several_environments(wrapper) -> None:
    recipe = EnvironmentRecipe(Walk, wrappers=[wrapper])
    for _ in range(2):
        bare, env = Walk(), recipe()
        for each in (bare, env):
            each.set_seed(0)
        runs = [each.rollout(2, still) for each in (bare, env)]
        assert torch.equal(runs[0]["next", "reward"] * 0.5, runs[1]["next", "reward"])


@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_stacked_images_are_those_of_gymnasiums_environment(layout) -> None:
    gymnasium_env = EnvironmentRecipe(lambda: ImageAlone(Mission(), layout), frame_stack=3)()
    torchrl_env = EnvironmentRecipe(partial(image, layout), frame_stack=3)()
    step = torchrl_env.reset()
    key = "pixels" if "pixels" in step.keys() else "observation"  # noqa: SIM118
    pairs = [(gymnasium_env.reset()[0], step[key])]
    for _ in range(4):
        step = torchrl_env.step(step.set("action", torch.tensor(0)))["next"]
        pairs.append((gymnasium_env.step(0)[0], step[key]))
    for stacked, expected in pairs:
        assert torch.equal(torch.as_tensor(stacked), expected)


def test_entries_that_are_shown() -> None:
    def make():
        return GymWrapper(Mission(), categorical_action_encoding=True)

    for asked in ({"keep": ["step"]}, {"drop": ["image", "mission"]}):
        env = EnvironmentRecipe(make, **asked)()
        assert environment_specs(env).keys == ["step"]
        assert "image" not in env.rollout(2)["next"]
    flat = EnvironmentRecipe(make, keep=["image"], flatten=True)()
    assert environment_specs(flat).observation["image"].shape == (50,)
    assert flat.rollout(2)["image"].shape == (2, 50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_repeat": 2}, "action_repeat must be 1 .* got 2.* Give frame_skip=2 to GymEnv"),
        ({"observe": [0]}, r"observe must be None .* got \[0\]"),
        ({"frame_stack": 4}, r"frame_stack=4 needs an image of three dimensions .* \{'observation': \(2,\)\}"),
        ({"keep": ["place"]}, r"keep must .*\['observation'\], got \['place'\]: \['place'\] are missing"),
        ({"drop": ["observation"]}, r"drop must .* got \['observation'\]: no entry remains"),
        ({"wrappers": [{"_target_": "torchrl.envs.RewardScaling"}]}, r"wrappers\[0\]=.* must make a TorchRL transform"),
        ({"wrappers": [{"_target_": "torchrl.envs.CatTensors", "in_keys": ["a"]}]}, r"wrappers\[0\]=.* does not fit"),
        (
            {"wrappers": [{"_target_": "gymnasium.wrappers.TimeLimit"}]},
            r"wrappers\[0\]=.* must make a TorchRL transform",
        ),
        ({"wrappers": [StepCounter], "time_limit": 3}, "adds a second StepCounter"),
    ],
)
def test_setting_without_a_matching_transform_is_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentRecipe(Walk, **settings)()


def test_invalid_environment_or_transform_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"gymnasium.Env.*EnvBase"):
        EnvironmentRecipe(dict)()
    with pytest.raises(TypeError, match=r"wrappers\[0\]=.* must make a TorchRL transform .*, got dict"):
        EnvironmentRecipe(Walk, wrappers=[dict])()
