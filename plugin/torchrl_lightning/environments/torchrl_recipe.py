"""Apply the settings of an environment recipe to a TorchRL environment by TorchRL's transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    ExcludeTransform,
    FlattenObservation,
    RenameTransform,
    RewardClipping,
    StepCounter,
    Transform,
    TransformedEnv,
)

from torchrl_lightning._core.images import channels_are_last
from torchrl_lightning._core.keys import NEXT
from torchrl_lightning.environments.specs import torchrl_specs, unwrap_transforms
from torchrl_lightning.environments.workers.threads import close_environment, record_num_threads
from torchrl_lightning.environments.workers.time_limits import TimedCalls, time_calls
from torchrl_lightning.environments.wrappers.rename import RENAME_REMEDY, new_names


def apply_transforms(
    base_env: object,
    *,
    time_limit: int | None,
    action_repeat: int,
    wrappers: Mapping[str, Callable[..., Any]],
    keep: Sequence[str] | None,
    drop: Sequence[str],
    rename: Mapping[str, str],
    observe: Sequence[int] | None,
    flatten: bool,
    frame_stack: int,
    clip_reward: float | None,
    calls: TimedCalls | None,
) -> EnvBase:
    """Apply a recipe's settings to the TorchRL environment that it made, from the inside out.

    ``wrappers`` maps the name of each transform in error messages to its factory. ``calls`` limits the time of the
    environment's calls. The other arguments are the settings of :class:`~torchrl_lightning.EnvironmentRecipe`.

    Raises:
        ValueError: a setting does not fit; the message names the setting and its replacement.
        TypeError: ``base_env`` is not a TorchRL environment, or a wrapper does not make a transform.
    """
    if not isinstance(base_env, EnvBase):
        raise TypeError(f"id must make a gymnasium.Env or a torchrl EnvBase, got {type(base_env).__name__}.")
    record_num_threads(base_env)
    env = TransformedEnv(base_env, Compose(), auto_unwrap=True)
    if calls is not None:
        time_calls(env.base_env, calls)
    try:
        if time_limit is not None:
            _append(env, StepCounter(time_limit), f"time_limit={time_limit}")
        if action_repeat > 1:
            raise ValueError(
                f"action_repeat must be 1 for a TorchRL environment, got {action_repeat}: TorchRL's transform would "
                f"continue after the end of an episode. Give frame_skip={action_repeat} to GymEnv."
            )
        for label, make in wrappers.items():
            _append(env, _make_transform(make, label), label)
        if keep is not None or drop:
            _append(env, _make_exclusion(env, keep, drop), "drop" if drop else "keep")
        if rename:
            _append(env, _make_renaming(env, rename), f"rename={dict(rename)}")
        if observe is not None:
            raise ValueError(
                f"observe must be None for a TorchRL environment, got {list(observe)}. Add a transform to wrappers."
            )
        if flatten:
            _append_flattening(env)
        if frame_stack > 1:
            _append_stacking(env, frame_stack)
        if clip_reward is not None:
            _append(env, RewardClipping(-clip_reward, clip_reward), f"clip_reward={clip_reward}")
    except BaseException:
        close_environment(env)
        raise
    return env


def _append(env: TransformedEnv, transform: Transform, label: str) -> None:
    """Append a transform, and run it immediately; raise ValueError if it does not fit."""
    if isinstance(transform, StepCounter):
        with unwrap_transforms(env) as (_, transforms):
            if any(isinstance(existing, StepCounter) for existing in transforms):
                raise ValueError(f"{label} adds a second StepCounter. Remove one of them.")
        if "step_count" in torchrl_specs(env).observation.keys():  # noqa: SIM118
            raise ValueError(f"{label} would overwrite the observation 'step_count'. {RENAME_REMEDY}")
    try:
        env.append_transform(transform)
        torchrl_specs(env)
        env.fake_tensordict()
    except Exception as error:
        raise ValueError(f"{label} does not fit {env.base_env}: {error}") from error


def _make_transform(make: Callable[..., Any], label: str) -> Transform:
    if isinstance(make, Transform):
        return make.clone()  # a transform belongs to one environment
    try:
        transform = make()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{label} must make a TorchRL transform for a TorchRL environment, got an error: {error}"
        ) from error
    if not isinstance(transform, Transform):
        raise TypeError(
            f"{label} must make a TorchRL transform for a TorchRL environment, got {type(transform).__name__}."
        )
    return transform


def _make_exclusion(env: EnvBase, keep: Sequence[str] | None, drop: Sequence[str]) -> ExcludeTransform:
    names = list(torchrl_specs(env).observation.keys())
    entries, argument = (drop, "drop") if keep is None else (keep, "keep")
    missing = [name for name in entries if name not in names]
    hidden = [name for name in names if (name in entries) == (keep is None)]
    if missing or len(hidden) == len(names):
        problem = f"{missing} are missing" if missing else "no entry remains"
        raise ValueError(
            f"{argument} must select some of the observed entries {sorted(names)}, got {list(entries)}: {problem}."
        )
    return ExcludeTransform(*hidden)


def _make_renaming(env: EnvBase, rename: Mapping[str, str]) -> RenameTransform:
    new_names(torchrl_specs(env).observation.keys(), rename)
    if NEXT in rename:
        raise ValueError(f"rename must not contain {NEXT!r}, TorchRL's entry for the result of a step. {RENAME_REMEDY}")
    return RenameTransform(list(rename), list(rename.values()))


def _append_flattening(env: TransformedEnv) -> None:
    specs = torchrl_specs(env)
    if len(specs.keys) > 1:
        raise ValueError(
            f"flatten=True needs an observation with one entry, got {sorted(map(str, specs.keys))}. Concatenate the "
            "entries by torchrl.envs.CatTensors in wrappers."
        )
    dims = specs.observation[specs.keys[0]].ndim
    if dims > 1:
        _append(env, FlattenObservation(-dims, -1, in_keys=specs.keys), "flatten=True")


def _append_stacking(env: TransformedEnv, count: int) -> None:
    observation = torchrl_specs(env).observation
    shapes = {key: tuple(spec.shape) for key, spec in observation.items(True, True)}
    images = {key: shape for key, shape in shapes.items() if len(shape) == 3}
    if not images:
        raise ValueError(
            f"frame_stack={count} needs an image of three dimensions in the observation, got shapes {shapes}. For "
            "others use torchrl.envs.UnsqueezeTransform and CatFrames in wrappers."
        )
    for key, shape in images.items():
        dim = -1 if channels_are_last(shape) else -3
        _append(env, CatFrames(count, dim, in_keys=[key]), f"frame_stack={count}")
