"""Vector environments and their specs: what is built, and what is refused."""

from __future__ import annotations

import re
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torchrl.data import Binary, MultiCategorical

from kit.counting import CountingEnv, WholeResets, vector_env
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.environments import EnvironmentRecipe, environment_specs, make_vector_env
from torchrl_lightning.environments.specs import space_to_spec


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_make_vector_env_builds_same_step_environments(vectorization: str) -> None:
    recipe = EnvironmentRecipe("CartPole-v1", time_limit=3, vectorization=vectorization)
    env = make_vector_env(recipe, 2)
    assert isinstance(env, AsyncVectorEnv if vectorization == "async" else SyncVectorEnv)
    env.reset(seed=[0, 1])
    for _ in range(2):
        env.step(np.array([0, 1]))
    *_, truncated, info = env.step(np.array([0, 1]))
    assert truncated.all()
    assert info["final_obs"][1].shape == (4,)
    env.close()


def test_kwargs_and_wrappers_reach_a_factory() -> None:
    env = make_vector_env(CountingEnv, 3, env_kwargs={"limit": 7}, wrappers=[gymnasium.wrappers.FlattenObservation])
    assert env.get_attr("limit") == (7, 7, 7)
    assert all(isinstance(single, gymnasium.wrappers.FlattenObservation) for single in env.envs)


def test_next_step_mode_is_rejected_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"NEXT_STEP[\s\S]*autoreset_mode=.*SAME_STEP"):
        make_vector_env(vector_env(mode=AutoresetMode.NEXT_STEP), 4)
    with pytest.raises(ValueError, match="SAME_STEP"):
        GymnasiumCollector(vector_env(mode=AutoresetMode.NEXT_STEP), frames_per_batch=4)
    with pytest.raises(ValueError, match="NEXT_STEP"):
        make_vector_env(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"), 2)


def test_invalid_arguments_of_make_vector_env_are_rejected() -> None:
    assert make_vector_env(vector_env(), None).num_envs == 4
    for error, message, env, num_envs, options in (
        (ValueError, "num_envs must be 4 .*got 3", vector_env(), 3, {}),
        (ValueError, r"CartPoll-v1.*spelling", "CartPoll-v1", 2, {}),
        (TypeError, "ready environment", CountingEnv(), 2, {}),
        (TypeError, "SyncVectorEnv", vector_env, 2, {}),
        (TypeError, "int", 3, 2, {}),
        (ValueError, "vectorization", "CartPole-v1", 2, {"vectorization": "threads"}),
        (ValueError, "env_kwargs", vector_env(), 4, {"env_kwargs": {"length": 3}}),
    ):
        with pytest.raises(error, match=message):
            make_vector_env(env, num_envs, **options)
    with pytest.raises(ValueError, match="vectorization"):
        EnvironmentRecipe("CartPole-v1", vectorization="threads")


@pytest.mark.parametrize(
    ("error", "extra"),
    [
        (gymnasium.error.DependencyNotInstalled("Box2D is not installed"), "box2d"),
        (gymnasium.error.DependencyNotInstalled("MuJoCo is not installed"), "mujoco"),
        (gymnasium.error.DependencyNotInstalled("opencv-python package not installed"), "atari"),
        (ModuleNotFoundError("No module named 'minigrid'."), "minigrid"),
        (ModuleNotFoundError("No module named 'physics'"), None),
    ],
)
def test_package_that_is_missing_is_named_with_the_extra_that_brings_it(error, extra) -> None:
    def make() -> gymnasium.Env:
        raise error

    brings = "" if extra is None else rf" Install .* 'torchrl-lightning\[{extra}\]'\."
    reason = re.escape(str(error).rstrip("."))
    with pytest.raises(ImportError, match=rf"{reason}\.{brings}$"):
        make_vector_env(make)


def test_module_that_is_missing_before_the_colon_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ValueError, match=r"ale_py:ALE/Pong-v5.*torchrl-lightning\[atari\]"):
        make_vector_env("ale_py:ALE/Pong-v5")


def test_disabled_autoreset_without_partial_resets_is_refused() -> None:
    env = WholeResets([lambda: CountingEnv(0, 3), lambda: CountingEnv(1, 9)], autoreset_mode="Disabled")
    collector = GymnasiumCollector(env, frames_per_batch=20)
    with pytest.raises(RuntimeError, match=r"reset_mask[\s\S]*SAME_STEP"):
        next(iter(collector))
    assert collector.closed


def test_spaces() -> None:
    assert space_to_spec(spaces.MultiDiscrete([2, 3]), "x") == MultiCategorical([2, 3], dtype=torch.int64)
    assert space_to_spec(spaces.MultiBinary(3), "x") == Binary(3, dtype=torch.int8)
    assert space_to_spec(spaces.MultiDiscrete([4, 4]), "x").shape == (2,)
    assert space_to_spec(spaces.Discrete(3, start=2), "x").n == 5
    assert space_to_spec(spaces.MultiDiscrete([4, 4], start=[0, 1]), "x").nvec.tolist() == [4, 5]
    with pytest.raises(TypeError, match=r"-1.*TransformObservation"):
        space_to_spec(spaces.Discrete(3, start=-1), "x")
    for space in (spaces.Text(3), spaces.Tuple([spaces.Discrete(2)]), spaces.Box(0, 1, (2,), np.uint16)):
        with pytest.raises(TypeError):
            space_to_spec(space, "x")


def test_actions_that_have_no_spec() -> None:
    env = vector_env()
    for space in (spaces.Dict(a=spaces.Discrete(3)), spaces.Tuple([spaces.Discrete(3)]), spaces.Text(3)):
        env.single_action_space = space
        with pytest.raises(TypeError, match=r"action space must be Discrete.*TransformAction"):
            environment_specs(env)
    with pytest.raises(TypeError, match="VectorEnv"):
        environment_specs(CountingEnv())


def test_ready_environments_are_stepped_as_they_are() -> None:
    for vectorization in (None, "sync"):
        env = vector_env()
        assert make_vector_env(env, 4, vectorization=vectorization) is env
        env.close()
