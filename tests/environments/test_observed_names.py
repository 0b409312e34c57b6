"""Entries of an observation that are named as a run's own are refused, and renamed by the recipe."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymWrapper

from kit.images import first_action
from kit.runs import trainer
from torchrl_lightning import (
    AsynchronousCollector,
    EnvironmentRecipe,
    GymnasiumCollector,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    environment_specs,
    play_episodes,
)
from torchrl_lightning._core.keys import RESERVED, UNNAMEABLE
from torchrl_lightning.datamodules._run.arguments import environment_fields
from torchrl_lightning.environments import make_environment
from torchrl_lightning.rollout import GAEBuffer

SEEN = spaces.Box(-100, 100, (2,), np.float32)


class Telling(gym.Env[Any, Any]):
    """Rewards each step with 1, and shows 77 under a name."""

    action_space = spaces.Discrete(2)

    def __init__(self, name: str = "reward", nested: bool = False) -> None:
        self.name, self.nested = name, nested
        entry = spaces.Dict({"here": SEEN}) if nested else SEEN
        self.observation_space = spaces.Dict({"observation": SEEN, name: entry})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._seen(), 1.0, False, self.steps == 3, {}

    def _seen(self) -> Any:
        told = np.full(2, 77, np.float32)
        return {"observation": np.full(2, self.steps, np.float32), self.name: {"here": told} if self.nested else told}


def ready(name: str) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Telling, name)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def torchrl(name: str, nested: bool = False) -> GymWrapper:
    return GymWrapper(Telling(name, nested), categorical_action_encoding=True)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_name_is_rejected_with_a_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*rename={{{name}: last_{name.strip('_')}}}"):
        environment_specs(ready(name))


ON_POLICY = partial(OnPolicyDataModule, buffer=partial(GAEBuffer, 8), num_envs=2, frames_per_batch=16)


@pytest.mark.parametrize(
    "read",
    [
        lambda: environment_specs(make_environment(EnvironmentRecipe(Telling))),
        lambda: ON_POLICY(Telling).specs,
        lambda: ON_POLICY(ready("reward"), eval_env=Telling).specs,
        lambda: GymnasiumCollector(Telling, frames_per_batch=4).rollout(),
        lambda: AsynchronousCollector(Telling, num_workers=1, frames_per_batch=4).specs,
        lambda: play_episodes(Telling, None, 1),
        lambda: environment_specs(make_environment(partial(torchrl, "is_init"), 2)),
        lambda: environment_specs(make_environment(partial(torchrl, "gamma"), 2)),
        lambda: environment_specs(make_environment(partial(torchrl, "demo", nested=True), 2)),
        lambda: make_environment(partial(torchrl, "reward"), 2),
        lambda: make_environment(EnvironmentRecipe(partial(torchrl, "done")), 2),
    ],
)
def test_specs_of_invalid_observations_are_rejected_by_all_readers(read: Any) -> None:
    with pytest.raises(ValueError, match=r"rename="):
        read()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["reward", "action", "is_init", "done", "next", "index"])
def test_renamed_entry_is_an_observation_and_the_run_keeps_its_own(name: str, nested: bool) -> None:
    recipe = EnvironmentRecipe(Telling, {"name": name, "nested": nested}, rename={name: "told"})
    collector = GymnasiumCollector(pickle.loads(pickle.dumps(recipe)), num_envs=2, frames_per_batch=16)
    batch = collector.rollout()
    collector.shutdown()
    told = ("told", "here") if nested else "told"
    assert sorted(collector.specs.observation.keys()) == ["observation", "told"]
    for part in (batch, batch["next"]):
        assert (part[told] == 77).all()
    assert (batch["next", "reward"] == 1).all()
    assert batch["is_init"].sum() == 6
    assert play_episodes(recipe, first_action, 2)["episode_return"].tolist() == [3.0, 3.0]
    assert environment_fields(recipe)["rename"] == {name: "told"}


@pytest.mark.parametrize("name", ["is_init", "gamma", "action", "step_count", "_reset"])
@pytest.mark.parametrize("nested", [False, True])
def test_torchrls_environments_rename_too(name: str, nested: bool) -> None:
    recipe = EnvironmentRecipe(partial(torchrl, name, nested), rename={name: "told"}, keep=["observation", name])
    env = make_environment(recipe, 2)
    told = ("told", "here") if nested else "told"
    assert environment_specs(env).keys == ["observation", told]
    rollout = env.rollout(3)
    assert (rollout[told] == 77).all()
    assert (rollout["next", told] == 77).all()
    env.close()


def test_wrappers_use_old_names_and_later_settings_new_names() -> None:
    recipe = EnvironmentRecipe(Telling, keep=["reward"], rename={"reward": "told"})
    assert list(recipe().observation_space.spaces) == ["told"]
    swapped = EnvironmentRecipe(partial(Telling, "other"), rename={"other": "observation", "observation": "other"})()
    first, _ = swapped.reset()
    assert first["observation"][0] == 77
    assert first["other"][0] == 0
    assert EnvironmentRecipe(Telling, rename={"reward": "told"}, flatten=True)().observation_space.shape == (4,)


MISFITS: dict[str, tuple[Any, dict[str, Any]]] = {
    r"rename must .*\['rewrd'\] are missing": (Telling, {"rename": {"rewrd": "told"}}),
    r"rename must name .*\['observation'\], got .*\['reward'\] are missing": (
        Telling,
        {"drop": ["reward"], "rename": {"reward": "told"}},
    ),
    "got 'observation' twice": (Telling, {"rename": {"reward": "observation"}}),
    "got 'c' twice": ("A-v0", {"rename": {"a": "c", "b": "c"}}),
    "reserved names 'gamma'": ("A-v0", {"rename": {"reward": "gamma"}}),
    "rename=.*needs a Dict": ("CartPole-v1", {"rename": {"a": "b"}}),
    r"rename must .*\['gama'\] are missing": (partial(torchrl, "gamma"), {"rename": {"gama": "told"}}),
    "got 'observation' twice ": (partial(torchrl, "gamma"), {"rename": {"gamma": "observation"}}),
    "inside the environment": (partial(torchrl, "next"), {"rename": {"next": "told"}}),
    "time_limit=3 .*step_count": (
        partial(torchrl, "step_count"),
        {"rename": {"step_count": "told"}, "time_limit": 3},
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_renaming_that_does_not_fit_is_named(message: str) -> None:
    given, settings = MISFITS[message]
    with pytest.raises(ValueError, match=message):
        EnvironmentRecipe(given, **settings)()


def is_refused_by_torchrl(name: str) -> bool:
    try:
        Composite({name: Unbounded(1), "c": Unbounded(1)}).zero()
    except (AttributeError, TypeError):
        return True
    return False


def test_unnameable_are_those_that_torchrl_refuses() -> None:
    names = {
        *dir(Composite),
        *dir(TensorDict),
        *dir(nn.ModuleDict),
        "",
        " ",
        ".",
        "..",
        "a.b",
        "a/b",
        "0",
        "state",
        "_x",
        "space",
    }
    assert {name for name in names if is_refused_by_torchrl(name)} == UNNAMEABLE


class Spaced(gym.Env[Any, Any]):
    """Shows samples of a space, and ends after three steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 3, {}


SAMPLED = spaces.Box(-1, 1, (2,), np.float32)
BAD: list[Any] = [*sorted(UNNAMEABLE), 0, None, 1.5, ("a", "shape"), b"x"]


def at(name: Any, nested: bool) -> spaces.Dict:
    entry = spaces.Dict({name: SAMPLED, "c": SAMPLED})
    return spaces.Dict({"arm": entry, "d": SAMPLED}) if nested else entry


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_name_that_specs_cannot_hold_is_refused_and_renamed(name: Any, nested: bool) -> None:
    make = partial(Spaced, at(name, nested))
    with pytest.raises(ValueError, match=r"rename=\{") as refused:
        ON_POLICY(make).specs  # noqa: B018
    path = f"arm.{name}" if nested else str(name)
    assert (path or "''") in str(refused.value)
    recipe = EnvironmentRecipe(make, rename={path: "form"})
    collector = GymnasiumCollector(pickle.loads(pickle.dumps(recipe)), num_envs=2, frames_per_batch=16)
    batch = collector.rollout()
    collector.shutdown()
    assert batch["arm", "form"].shape == (2, 8, 2) if nested else batch["form"].shape == (2, 8, 2)
    dropped = EnvironmentRecipe(make, drop=["arm" if nested else name])
    assert environment_specs(make_environment(dropped)).keys == ["d" if nested else "c"]


@pytest.mark.parametrize("name", ["shape", ""])
@pytest.mark.parametrize("nested", [False, True])
def test_torchrls_environments_refuse_them_in_one_line(name: str, nested: bool) -> None:
    make = partial(GymWrapper, Spaced(at(name, nested)), categorical_action_encoding=True)
    with pytest.raises(ValueError, match="inside the environment"):
        make_environment(make, 2)


@pytest.mark.parametrize(
    "name", ["keys", "items", "batch_size", "names", "data", "a.b", "..", "a/b", "é", "_x", "state"]
)
@pytest.mark.parametrize("nested", [False, True])
def test_unreserved_name_is_an_observation(name: str, nested: bool) -> None:
    sizes: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 16, "num_mini_batch": 1, "num_epochs": 1}
    data = OnPolicyDataModule(partial(Spaced, at(name, nested)), **sizes, eval_episodes=1, seed=0)
    run = trainer(max_epochs=1, limit_val_batches=1)
    run.fit(PPOModule(MLPNetwork([4])), datamodule=data)
    assert run.callback_metrics["eval/return"] == 3.0


def test_nested_entries_are_renamed_by_their_paths() -> None:
    inner = spaces.Dict({"a": SAMPLED, "b": spaces.Dict({"a": SAMPLED})})
    make = partial(Spaced, spaces.Dict({"arm": inner, "arm.a": SAMPLED, "a": SAMPLED}))
    rename = {"arm": "leg", "arm.b.a": "c", "arm.a": "whole"}
    env = EnvironmentRecipe(make, rename=rename)()
    observation, _ = env.reset()
    space = env.observation_space
    assert space.contains(observation)
    assert sorted(space) == ["a", "leg", "whole"]
    assert sorted(space["leg"]) == ["a", "b"]
    assert list(space["leg"]["b"]) == ["c"]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"arm.a": "c"}, "got 'c' twice"),
        ({"arm.x": "y"}, r"\['arm.x'\] are missing"),
        ({"arm.a": "shape"}, "reserved names 'shape'"),
        ({"arm": ""}, "rename must map .*got"),
    ],
)
def test_nested_renaming_that_does_not_fit_is_named(rename: dict[str, str], message: str) -> None:
    make = partial(Spaced, at("a", nested=True))
    with pytest.raises((ValueError, TypeError), match=message):
        EnvironmentRecipe(make, rename=rename)()


@pytest.mark.parametrize("rename", [{"reward": 3}, ["reward"]])
def test_renaming_must_map_names_to_names(rename: Any) -> None:
    with pytest.raises(TypeError, match=r"rename must map .*got"):
        EnvironmentRecipe("A-v0", rename=rename)
