"""Compare the task of a demonstration with an environment: the recipe settings that change steps or rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from torchrl_lightning._core.trust import check_config
from torchrl_lightning.environments.recipe import EnvironmentRecipe, differences, plain, recipe_of

_RECIPE = "recipe"  # the metadata entry with the recipe as JSON
# Other settings only affect stepping and episode ends, or shapes and frame skip, which are compared elsewhere.
_COMPARED = {"id": str | dict, "env_kwargs": dict, "wrappers": list, "observe": list, "clip_reward": int | float}
_ASIDE = ("vectorization", "step_timeout", "demonstrations_of")  # settings of one run
# Arguments and Gymnasium wrappers that do not change steps.
_ARGUMENTS = {"camera_id", "camera_name", "default_camera_config", "device", "disable_env_checker"}
_ARGUMENTS |= {"max_episode_steps", "num_envs", "render_fps", "render_mode", "seed"}
_WRAPPERS = {"AddWhiteNoise", "Autoreset", "HumanRendering", "ObstructView", "OrderEnforcing", "PassiveEnvChecker"}
_WRAPPERS |= {"RecordEpisodeStatistics", "RecordVideo", "RenderCollection", "TimeLimit"}


def given_recipe(env: Any) -> EnvironmentRecipe | None:
    """Return the recipe of an environment; None for an instance, because its recipe is unknown."""
    return None if isinstance(env, VectorEnv | EnvBase) else recipe_of(env)


def recipe_metadata(recipe: EnvironmentRecipe | None) -> dict[str, str]:
    """Return the metadata of a demonstration's environment: ``environment``, and ``recipe`` as JSON.

    Examples:
        >>> recipe_metadata(EnvironmentRecipe("CartPole-v1", time_limit=9, vectorization="async"))
        {'environment': 'CartPole-v1', 'recipe': '{"id": "CartPole-v1", "time_limit": 9}'}
    """
    if recipe is None:
        return {}
    return {"environment": str(plain(recipe.id)), _RECIPE: json.dumps(_settings(recipe))}


def recorded_recipe(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the recipe settings in a demonstration's metadata, or None. Names in them are not imported.

    Examples:
        >>> recorded_recipe(recipe_metadata(EnvironmentRecipe("CartPole-v1"))), recorded_recipe({"recipe": "unknown"})
        ({'id': 'CartPole-v1'}, None)
    """
    try:
        found = json.loads(metadata[_RECIPE])
        check_config(found, where=_RECIPE, trusted=True)  # trusted, because nothing is built from it
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    is_one = isinstance(found, dict) and "id" in found
    if not is_one or not all(isinstance(found[name], kind) for name, kind in _COMPARED.items() if name in found):
        return None
    return found if isinstance(_name(found), str) else None


def check_task(owner: str, metadata: Mapping[str, Any], recipe: EnvironmentRecipe | None) -> None:
    """Raise a ValueError if a demonstration is from another environment or has another reward.

    It compares id, arguments, wrappers, ``observe`` and ``clip_reward``, except settings that only render, count or end
    episodes. Demonstrations without a recipe are accepted. All are accepted if a function without an importable name
    builds the environment.

    Args:
        owner: The demonstration, for the message.
        metadata: The metadata of the demonstration.
        recipe: The environment's recipe; the names in its ``demonstrations_of`` are accepted.

    Examples:
        >>> shown = recipe_metadata(EnvironmentRecipe("CartPole-v1"))
        >>> check_task("Demonstration 'a'", shown, EnvironmentRecipe("CartPole-v1", time_limit=9))
        >>> check_task("Demonstration 'a'", shown, EnvironmentRecipe("CartPole-v1", clip_reward=1))
        Traceback (most recent call last):
            ...
        ValueError: Demonstration 'a' was recorded without clip_reward, the environment has clip_reward=1.0; take \
demonstrations of this environment, or allow these by demonstrations_of=['CartPole-v1'] of its recipe (data.env).
    """
    shown = recorded_recipe(metadata)
    if shown is None or recipe is None:
        return
    there, here = _task(shown), _task(_settings(recipe))
    name = _name(there)
    if name in map(_bare, recipe.demonstrations_of) or any(map(_is_private, (name, _name(here)))):
        return
    for field, theirs, ours in differences(there, here):
        raise ValueError(
            f"{owner} was recorded {_said(field, theirs, 'with ')}, the environment {_said(field, ours, 'has ')}; take "
            f"demonstrations of this environment, or allow these by demonstrations_of=[{name!r}] of its recipe "
            "(data.env)."
        )


def _settings(recipe: EnvironmentRecipe) -> dict[str, Any]:
    settings = {name: value for name, value in recipe.settings().items() if name not in _ASIDE}
    as_read: dict[str, Any] = json.loads(json.dumps(settings))
    return as_read


def _task(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared part of a recipe's settings."""
    task = {name: settings[name] for name in _COMPARED if name in settings}
    if isinstance(task["id"], str):
        task["id"] = _bare(task["id"])
    arguments = {name: value for name, value in task.pop("env_kwargs", {}).items() if name not in _ARGUMENTS}
    wrappers = [each for each in task.pop("wrappers", []) if not _is_harmless(each)]
    return {**task, **({"env_kwargs": arguments} if arguments else {}), **({"wrappers": wrappers} if wrappers else {})}


def _name(settings: Mapping[str, Any]) -> Any:
    id = settings["id"]
    return id.get("_target_") if isinstance(id, dict) else id


def _bare(id: str) -> str:
    """Return an id without the module that registers it."""
    return id.rpartition(":")[2]


def _is_private(name: str) -> bool:
    return "<" in name or name.startswith("__main__.")  # a lambda, a local function or a script's function


def _is_harmless(wrapper: Any) -> bool:
    package, _, name = str(wrapper.get("_target_") if isinstance(wrapper, dict) else "").rpartition(".")
    return package.startswith("gymnasium.wrappers") and name in _WRAPPERS


def _said(field: str, value: Any, verb: str) -> str:
    if value is None:
        return f"{'without' if verb == 'with ' else 'has no'} {field}"
    return f"{verb}{field}={value!r}"
