"""Validate arguments of DataModules, and compare them with the settings in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gymnasium.vector import VectorEnv
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_lightning._core.settings import Settings
from torchrl_lightning._core.validators import non_negative
from torchrl_lightning.environments import EnvironmentRecipe
from torchrl_lightning.environments.recipe import differences, to_plain


def environment_name(env: Any) -> str:
    """Return the name of an environment given as an id, a factory or a ready (vector) environment."""
    if isinstance(env, str):
        return env
    if isinstance(env, VectorEnv):
        return env.spec.id if env.spec is not None else type(env).__name__
    if isinstance(env, EnvBase):
        return type(env).__name__
    return getattr(env, "__qualname__", None) or str(env)


def environment_fields(env: Any) -> Any:
    """Return the description of an environment in checkpoints: the settings of a recipe, or a name.

    The description omits the settings ``vectorization``, ``step_timeout`` and ``demonstrations_of``. A recipe with only
    an id is described by this id.

    Examples:
        >>> environment_fields(EnvironmentRecipe("CartPole-v1", time_limit=9, vectorization="async"))
        {'id': 'CartPole-v1', 'time_limit': 9}
    """
    if isinstance(env, EnvironmentRecipe):
        fields = env.settings()
        for name in ("vectorization", "demonstrations_of", "step_timeout"):
            fields.pop(name, None)
        return fields["id"] if list(fields) == ["id"] and isinstance(fields["id"], str) else fields
    return to_plain(env) if isinstance(env, partial) else environment_name(env)


def environment_difference(stored: Any, current: Any) -> str:
    """Describe field by field how two environments differ; return "" if they are equal.

    Examples:
        >>> environment_difference({"id": "Pong-v5", "frame_stack": 4}, "Pong-v5")
        'frame_stack: 4 in the checkpoint, not set here'
    """
    stored_fields, current_fields = (
        fields if isinstance(fields, dict) else {"id": fields} for fields in (stored, current)
    )
    descriptions = (
        f"{field}: {_format_value(old)} in the checkpoint, {_format_value(new)} here"
        for field, old, new in differences(stored_fields, current_fields)
    )
    return "; ".join(descriptions)


def run_fingerprint(data: Any) -> dict[str, Any]:
    """Return the settings of a DataModule that must be equal in a checkpoint and in a run that resumes from it."""
    specs = data.specs
    return {
        "datamodule": type(data).__name__,
        "environment": environment_fields(data.env),
        "observation": str({str(key): tuple(spec.shape) for key, spec in specs.observation.items(True, True)}),
        "action": f"{type(specs.action).__name__}{tuple(specs.action.shape)}",
        "num_envs": data.num_envs,
        "frames_per_batch": data.frames_per_batch,
        "normalize_observation": data.normalize_observation,
        "normalize_reward": data.normalize_reward,
        "normalize_clip": float(data.normalize_clip),
        "normalize_epsilon": float(data.normalize_epsilon),
    }


def buffer_fingerprint(buffer: Any) -> dict[str, Any]:
    """Return the settings of a replay buffer that must be equal in a checkpoint and in a run that resumes from it."""
    return {
        "buffer": type(buffer).__name__,
        "sampler": type(buffer.sampler).__name__,
        "capacity": int(buffer.storage.max_size),
        "n_steps": buffer.n_steps,
        "gamma": buffer.gamma if buffer.n_steps > 1 else 0.99,  # the discount does not affect single steps
    }


def check_environment(data: Any, state: Mapping[str, Any]) -> None:
    """Validate the environment of a stored state before an evaluation; this does not build a buffer.

    Raises:
        ValueError: The DataModule has another environment or other settings of the run.
    """
    current = run_fingerprint(data)
    check_fingerprint({name: state["fingerprint"].get(name) for name in current}, current)


def check_fingerprint(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the same settings; the ValueError names the first difference."""
    difference = environment_difference(stored.get("environment"), current["environment"])
    if difference:
        raise ValueError(
            f"environment differs: {difference}. Resume with the environment that the checkpoint was written with."
        )
    for name in {**stored, **current}:
        if _tuples_to_lists(stored.get(name)) != _tuples_to_lists(current.get(name)):
            raise ValueError(
                f"the checkpoint was written with {name}={stored.get(name)!r}, but this run has "
                f"{name}={current.get(name)!r}. Resume with the settings of the checkpoint."
            )


def _tuples_to_lists(value: Any) -> Any:
    """Replace tuples by lists, because files do not distinguish them."""
    return list(map(_tuples_to_lists, value)) if isinstance(value, list | tuple) else value


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value)


def unchanged_non_negative(value: Any, name: str) -> Any:
    """Return a finite number of at least 0 without converting it."""
    non_negative(value, name)
    return value


def check_buffer_factory(buffer: Any, data: Any) -> None:
    """Validate that a setting builds buffers of a DataModule's kind; raise TypeError if not."""
    if not callable(buffer):
        kind = type(buffer).__name__
        raise TypeError(
            f"buffer must be a callable that builds the buffer, such as a class or a functools.partial, "
            f"got an object of {kind}. Pass the class, or a partial with its arguments."
        )
    factory = buffer
    while isinstance(factory, partial):
        factory = factory.func
    if isinstance(factory, type) and issubclass(factory, ReplayBuffer) and not issubclass(factory, data.buffer_class):
        other = "a ReplayDataModule" if data.stream_kind == "rollouts" else "an OnPolicyDataModule"
        remedy = f"Pass it to {other}, or choose" if factory.__module__.startswith("torchrl_lightning.") else "Choose"
        raise TypeError(
            f"buffer must build a subclass of {data.buffer_class.__name__} for {type(data).__name__}, got "
            f"{factory.__name__}. {remedy} another buffer."
        )


def check_normalization(data: Settings, normalize_observation: bool | Sequence[Any], normalize_reward: bool) -> None:
    """Validate that normalisation settings have an effect; the ValueError names the first setting without effect."""
    if not isinstance(normalize_observation, bool) and not len(normalize_observation):
        raise ValueError("normalize_observation must be True, False or a list of entries, got []. Leave it out.")
    for name in ("normalize_clip", "normalize_epsilon"):
        data.require_effect(
            name, normalize_observation or normalize_reward, "normalize_observation or normalize_reward"
        )


def check_frozen(data: Any) -> None:
    """Validate that a run with frozen statistics normalises something; raise ValueError if not."""
    normalizes = data.normalize_observation or data.normalize_reward
    data.require_effect("freeze_statistics", normalizes, "normalize_observation or normalize_reward")


def check_frames(frames_per_batch: int, num_envs: int, reset_at_each_batch: bool) -> None:
    """Raise a ValueError if a rollout has partial steps, or if it has one step and ``reset_at_each_batch`` is True."""
    if frames_per_batch % num_envs:
        raise ValueError(
            f"frames_per_batch must be a multiple of num_envs={num_envs}, got {frames_per_batch}. "
            f"Set frames_per_batch={-(-frames_per_batch // num_envs) * num_envs}."
        )
    if reset_at_each_batch and frames_per_batch == num_envs:
        raise ValueError(
            f"reset_at_each_batch must be False with frames_per_batch={frames_per_batch} and num_envs={num_envs}, got "
            "True, which would end each episode after its first step. Collect several steps at a time, e.g. "
            f"frames_per_batch={16 * num_envs}."
        )
