"""Check that a demonstration and an environment have the same task.

The task consists of the recipe settings that change steps or rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from torchrl_lightning._core.trust import check_config
from torchrl_lightning.environments.recipe import EnvironmentRecipe, as_recipe, differences, to_plain

_RECIPE = "recipe"  # the metadata entry with the recipe as JSON
# All other settings change only stepping, episode ends, shapes or the frame skip. Demonstration.fits compares shapes
# and frame skip.
_TASK_SETTINGS = {"id": str | dict, "env_kwargs": dict, "wrappers": list, "observe": list, "clip_reward": int | float}
_RUN_SETTINGS = ("vectorization", "step_timeout", "demonstrations_of")  # settings of a run, not of the task
# Arguments and Gymnasium wrappers that do not change steps.
_HARMLESS_ARGUMENTS = {"camera_id", "camera_name", "default_camera_config", "device", "disable_env_checker"}
_HARMLESS_ARGUMENTS |= {"max_episode_steps", "num_envs", "render_fps", "render_mode", "seed"}
_HARMLESS_WRAPPERS = {
    "AddWhiteNoise",
    "Autoreset",
    "HumanRendering",
    "ObstructView",
    "OrderEnforcing",
    "PassiveEnvChecker",
}
_HARMLESS_WRAPPERS |= {"RecordEpisodeStatistics", "RecordVideo", "RenderCollection", "TimeLimit"}


def known_recipe(env: Any) -> EnvironmentRecipe | None:
    """Return the recipe of an environment, or None for an instance, because its recipe is unknown."""
    return None if isinstance(env, VectorEnv | EnvBase) else as_recipe(env)


def recipe_metadata(recipe: EnvironmentRecipe | None) -> dict[str, str]:
    """Return the metadata of a demonstration's environment: ``environment``, and ``recipe`` as JSON.

    Examples:
        >>> recipe_metadata(EnvironmentRecipe("CartPole-v1", time_limit=9, vectorization="async"))
        {'environment': 'CartPole-v1', 'recipe': '{"id": "CartPole-v1", "time_limit": 9}'}
    """
    if recipe is None:
        return {}
    return {"environment": str(to_plain(recipe.id)), _RECIPE: json.dumps(_to_json_settings(recipe))}


def recorded_recipe(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the recipe settings in a demonstration's metadata, or None. Nothing is imported.

    Examples:
        >>> recorded_recipe(recipe_metadata(EnvironmentRecipe("CartPole-v1"))), recorded_recipe({"recipe": "unknown"})
        ({'id': 'CartPole-v1'}, None)
    """
    try:
        settings = json.loads(metadata[_RECIPE])
        check_config(settings, where=_RECIPE, trusted=True)  # trusted, because nothing is built from it
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    has_id = isinstance(settings, dict) and "id" in settings
    if not has_id or not all(
        isinstance(settings[name], type_) for name, type_ in _TASK_SETTINGS.items() if name in settings
    ):
        return None
    return settings if isinstance(_environment_name(settings), str) else None


def check_task(owner: str, metadata: Mapping[str, Any], recipe: EnvironmentRecipe | None) -> None:
    """Raise a ValueError if a demonstration is from another environment or has another reward.

    The check compares id, arguments, wrappers, ``observe`` and ``clip_reward``. Arguments and wrappers that only
    render, count or end episodes are ignored. Demonstrations without a recipe are accepted. If a function without an
    importable name builds the environment, all demonstrations are accepted.

    Args:
        owner: The demonstration's name in the message.
        metadata: The metadata of the demonstration.
        recipe: The environment's recipe. Demonstrations of the environments in its ``demonstrations_of`` are accepted.

    Examples:
        >>> recorded = recipe_metadata(EnvironmentRecipe("CartPole-v1"))
        >>> check_task("Demonstration 'a'", recorded, EnvironmentRecipe("CartPole-v1", time_limit=9))
        >>> check_task("Demonstration 'a'", recorded, EnvironmentRecipe("CartPole-v1", clip_reward=1))
        Traceback (most recent call last):
            ...
        ValueError: Demonstration 'a' was recorded without clip_reward, but the environment has clip_reward=1.0. Use \
demonstrations of this environment, or set demonstrations_of=['CartPole-v1'] of its recipe (data.env).
    """
    recorded = recorded_recipe(metadata)
    if recorded is None or recipe is None:
        return
    recorded_task, current_task = _task_settings(recorded), _task_settings(_to_json_settings(recipe))
    name, accepted = _environment_name(recorded_task), map(_without_module, recipe.demonstrations_of)
    if name in accepted or any(map(_is_private, (name, _environment_name(current_task)))):
        return
    for field, recorded_value, current_value in differences(recorded_task, current_task):
        recorded_with = f"without {field}" if recorded_value is None else f"with {field}={recorded_value!r}"
        current = f"no {field}" if current_value is None else f"{field}={current_value!r}"
        raise ValueError(
            f"{owner} was recorded {recorded_with}, but the environment has {current}. Use demonstrations of this "
            f"environment, or set demonstrations_of=[{name!r}] of its recipe (data.env)."
        )


def _to_json_settings(recipe: EnvironmentRecipe) -> dict[str, Any]:
    settings = {name: value for name, value in recipe.settings().items() if name not in _RUN_SETTINGS}
    plain_settings: dict[str, Any] = json.loads(json.dumps(settings))
    return plain_settings


def _task_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the recipe settings to compare."""
    task = {name: settings[name] for name in _TASK_SETTINGS if name in settings}
    if isinstance(task["id"], str):
        task["id"] = _without_module(task["id"])
    arguments = {name: value for name, value in task.pop("env_kwargs", {}).items() if name not in _HARMLESS_ARGUMENTS}
    wrappers = [wrapper for wrapper in task.pop("wrappers", []) if not _is_harmless(wrapper)]
    return {**task, **({"env_kwargs": arguments} if arguments else {}), **({"wrappers": wrappers} if wrappers else {})}


def _environment_name(settings: Mapping[str, Any]) -> Any:
    environment = settings["id"]
    return environment.get("_target_") if isinstance(environment, dict) else environment


def _without_module(id: str) -> str:
    """Return an id without the module that registers it."""
    return id.rpartition(":")[2]


def _is_private(name: str) -> bool:
    return "<" in name or name.startswith("__main__.")  # a lambda, a local function or a script's function


def _is_harmless(wrapper: Any) -> bool:
    package, _, name = str(wrapper.get("_target_") if isinstance(wrapper, dict) else "").rpartition(".")
    return package.startswith("gymnasium.wrappers") and name in _HARMLESS_WRAPPERS
