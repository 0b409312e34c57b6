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
from torchrl_lightning.environments.specs import layers, torchrl_specs
from torchrl_lightning.environments.workers.threads import close_environment, note_threads
from torchrl_lightning.environments.workers.time_limits import TimedCalls, time_calls
from torchrl_lightning.environments.wrappers.rename import WITHIN, new_names


def transformed(
    made: object,
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
        TypeError: ``made`` is not a TorchRL environment, or a wrapper does not make a transform.
    """
    if not isinstance(made, EnvBase):
        raise TypeError(f"id made a {type(made).__name__}; expected a gymnasium.Env or a torchrl EnvBase.")
    note_threads(made)
    env = TransformedEnv(made, Compose(), auto_unwrap=True)
    if calls is not None:
        time_calls(env.base_env, calls)
    try:
        if time_limit is not None:
            _lay(env, StepCounter(time_limit), f"time_limit={time_limit}")
        if action_repeat > 1:
            raise ValueError(
                f"action_repeat={action_repeat} is for Gymnasium's environments: TorchRL's transform would step on "
                f"after an episode has ended. Give frame_skip={action_repeat} to GymEnv."
            )
        for what, make in wrappers.items():
            _lay(env, _transform(make, what), what)
        if keep is not None or drop:
            _lay(env, _without(env, keep, drop), "drop" if drop else "keep")
        if rename:
            _lay(env, _renaming(env, rename), f"rename={dict(rename)}")
        if observe is not None:
            raise ValueError(
                f"observe={list(observe)} is for Gymnasium's environments. Take a transform of your own among wrappers="
            )
        if flatten:
            _flatten(env)
        if frame_stack > 1:
            _stack(env, frame_stack)
        if clip_reward is not None:
            _lay(env, RewardClipping(-clip_reward, clip_reward), f"clip_reward={clip_reward}")
    except BaseException:
        close_environment(env)
        raise
    return env


def _lay(env: TransformedEnv, transform: Transform, what: str) -> None:
    """Append a transform, and run it immediately; raise ValueError if it does not fit."""
    if isinstance(transform, StepCounter):
        with layers(env) as (_, around):
            if any(isinstance(each, StepCounter) for each in around):
                raise ValueError(f"{what} adds a StepCounter, but there is one already; leave one of them out.")
        if "step_count" in torchrl_specs(env).observation.keys():  # noqa: SIM118
            raise ValueError(f"{what} would overwrite the observation 'step_count'. {WITHIN}")
    try:
        env.append_transform(transform)
        torchrl_specs(env)
        env.fake_tensordict()
    except Exception as error:
        raise ValueError(f"{what} does not fit {env.base_env}: {error}") from error


def _transform(make: Callable[..., Any], what: str) -> Transform:
    if isinstance(make, Transform):
        return make.clone()  # a transform belongs to one environment
    try:
        transform = make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} makes no TorchRL transform, as a TorchRL environment needs: {error}") from error
    if not isinstance(transform, Transform):
        raise TypeError(f"{what} made a {type(transform).__name__}; a TorchRL environment needs a TorchRL transform.")
    return transform


def _without(env: EnvBase, keep: Sequence[str] | None, drop: Sequence[str]) -> ExcludeTransform:
    names = list(torchrl_specs(env).observation.keys())
    asked, argument = (drop, "drop") if keep is None else (keep, "keep")
    missing = [name for name in asked if name not in names]
    hidden = [name for name in names if (name in asked) == (keep is None)]
    if missing or len(hidden) == len(names):
        what = f"names {missing}, which are not there" if missing else "leaves nothing"
        raise ValueError(f"{argument}={list(asked)} {what}; the environment observes {sorted(names)}.")
    return ExcludeTransform(*hidden)


def _renaming(env: EnvBase, rename: Mapping[str, str]) -> RenameTransform:
    new_names(torchrl_specs(env).observation.keys(), rename)
    if NEXT in rename:
        raise ValueError(f"{NEXT!r} is what TorchRL's environments keep the outcome of a step under. {WITHIN}")
    return RenameTransform(list(rename), list(rename.values()))


def _flatten(env: TransformedEnv) -> None:
    specs = torchrl_specs(env)
    if len(specs.keys) > 1:
        raise ValueError(
            f"flatten=True makes one vector of one entry, but the environment observes {sorted(map(str, specs.keys))}. "
            "Join them by torchrl.envs.CatTensors among wrappers=."
        )
    dims = specs.observation[specs.keys[0]].ndim
    if dims > 1:
        _lay(env, FlattenObservation(-dims, -1, in_keys=specs.keys), "flatten=True")


def _stack(env: TransformedEnv, count: int) -> None:
    observation = torchrl_specs(env).observation
    shapes = {key: tuple(spec.shape) for key, spec in observation.items(True, True)}
    images = {key: shape for key, shape in shapes.items() if len(shape) == 3}
    if not images:
        raise ValueError(
            f"frame_stack={count} stacks images of three dimensions, but the environment observes {shapes}. For others "
            "there are torchrl.envs.UnsqueezeTransform and CatFrames among wrappers=."
        )
    for key, shape in images.items():
        dim = -1 if channels_are_last(shape) else -3
        _lay(env, CatFrames(count, dim, in_keys=[key]), f"frame_stack={count}")
