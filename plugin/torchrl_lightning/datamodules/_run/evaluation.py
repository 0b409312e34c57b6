"""Compare the environments of collection and evaluation before training."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import torch
from gymnasium import wrappers
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from tensordict import TensorDictBase
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase, GymWrapper, transforms

from torchrl_lightning._core.protocols import CollectorApi
from torchrl_lightning.environments import EnvironmentSpecs, environment_specs
from torchrl_lightning.environments.backends.next_step import ResetTrackingVectorEnv
from torchrl_lightning.environments.backends.torchrl_env import PlayingTransform
from torchrl_lightning.environments.copies import FreshActions, FreshObservations
from torchrl_lightning.environments.recipe import differences, plain
from torchrl_lightning.environments.specs import COUNTERS, layers, spec_fields

# Wrappers that guard, cut, record or render an episode, and change neither observation nor reward of a step.
_NEUTRAL_WRAPPERS = (
    ResetTrackingVectorEnv,
    FreshActions,
    FreshObservations,
    wrappers.PassiveEnvChecker,
    wrappers.OrderEnforcing,
    wrappers.TimeLimit,
    wrappers.RecordEpisodeStatistics,
    wrappers.RecordVideo,
    wrappers.RenderCollection,
    wrappers.HumanRendering,
    wrappers.AddWhiteNoise,
    wrappers.ObstructView,
    wrappers.vector.RecordEpisodeStatistics,
    wrappers.vector.RecordVideo,
    wrappers.vector.HumanRendering,
    wrappers.vector.DictInfoToList,
)
_NEUTRAL_TRANSFORMS = (
    *COUNTERS,
    transforms.TensorDictPrimer,
    transforms.FiniteTensorDictCheck,
    transforms.DeviceCastTransform,
    transforms.PinMemoryTransform,
    transforms.VecGymEnvTransform,
    transforms.DTypeCastTransform,  # already part of the specs
    # Evaluation plays no demonstrations.
    PlayingTransform,
    transforms.ConditionalSkip,
)


@dataclass(frozen=True)
class EnvironmentView:
    """Specs, wrappers and transforms of an environment, read without a step.

    Attributes:
        specs: Specs of observation and action.
        wrappers: Class names of one Gymnasium environment and its wrappers, from the inside out; None for other or
            inaccessible environments.
        arguments: Arguments of each wrapper as plain values; None if Gymnasium did not record them.
        transforms: Class names of TorchRL transforms that may change observation, reward or end; None for other
            environments.
    """

    specs: EnvironmentSpecs
    wrappers: list[str] | None = None
    arguments: list[dict[str, Any] | None] | None = None
    transforms: tuple[str, ...] | None = None


def view_of_collector(collector: CollectorApi) -> EnvironmentView | None:
    """Return the view of a collector's environment; None if the collector has neither environment nor specs."""
    if isinstance(collector.env, VectorEnv | EnvBase):
        return view_of(collector.env)
    specs = collector.specs
    return EnvironmentView(specs) if isinstance(specs, EnvironmentSpecs) else None


def view_of(env: VectorEnv[Any, Any, Any] | EnvBase) -> EnvironmentView:
    """Return the view of an environment.

    Examples:
        >>> from torchrl_lightning import make_vector_env
        >>> view_of(make_vector_env("CartPole-v1", 2, wrappers=[wrappers.NormalizeReward])).wrappers
        ['CartPoleEnv', 'NormalizeReward']
    """
    specs = environment_specs(env)
    if isinstance(env, VectorEnv):
        return EnvironmentView(specs, *_wrappers(env))
    with layers(env) as (base, around):
        changing = tuple(type(each).__name__ for each in around if not isinstance(each, _NEUTRAL_TRANSFORMS))
        names, arguments = _wrappers(base._env) if isinstance(base, GymWrapper) else (None, None)
    return EnvironmentView(specs, names, arguments, changing)


def check_evaluation(stepped: EnvironmentView, played: EnvironmentView, given: bool) -> str | None:
    """Check that evaluation and collection use the same environment.

    Evaluation may leave out the clipping of rewards, because the score of a game counts unclipped rewards.

    Args:
        stepped: the environment of collection.
        played: the environment of evaluation.
        given: the user set ``eval_env``; then its wrappers may differ.

    Returns:
        The allowed difference of the wrappers; None without a difference.

    Raises:
        ValueError: The message names each difference.
    """
    differences = _spec_differences(stepped.specs, played.specs)
    wrapped = _wrapper_difference(stepped, played)
    if differences or (wrapped is not None and not given):
        if wrapped is not None:
            differences.append(wrapped)
        raise ValueError(
            f"evaluation would not play the environment that is collected from: {'; '.join(differences)}. "
            "Give eval_env= the same wrapped environment, or one recipe or factory to both."
        )
    return wrapped


def first_checked(stream: Iterable[TensorDictBase], specs: EnvironmentSpecs) -> Iterator[TensorDictBase]:
    """Yield a collector's rollouts ``[*B]`` after a check of the first one against the specs of the networks.

    Raises:
        ValueError: An observation is missing or has another shape.
    """
    rollouts = iter(stream)
    for rollout in rollouts:
        for key, spec in specs.observation.items(True, True):
            value = rollout.get(key, None)
            shape = None if value is None else tuple(value.shape[rollout.ndim :])
            if shape != tuple(spec.shape):
                raise ValueError(
                    f"collector= steps another environment than env=: observation {key!r} "
                    f"{'is not in its rollouts' if shape is None else f'has shape {shape} in its rollouts'}, expected "
                    f"shape {tuple(spec.shape)}. Give env= the same wrapped environment, or one recipe or factory to "
                    "both."
                )
        yield rollout
        break
    yield from rollouts


def _wrappers(env: Any) -> tuple[list[str] | None, list[dict[str, Any] | None] | None]:
    """Return the class names of one environment and its wrappers, from the inside out, and their arguments."""
    around: list[Any] = []
    while isinstance(env, VectorWrapper):
        around.append(env)
        env = env.env
    if isinstance(env, SyncVectorEnv):
        env = env.envs[0]
    while isinstance(env, gymnasium.Wrapper):
        around.append(env)
        env = env.env
    if not isinstance(env, gymnasium.Env):
        return None, None
    shown = [env, *(each for each in reversed(around) if not isinstance(each, _NEUTRAL_WRAPPERS))]
    return [type(each).__name__ for each in shown], [_arguments(each) for each in shown]


def _arguments(part: Any) -> dict[str, Any] | None:
    """Return the arguments of a wrapper or environment, or None if Gymnasium did not record them."""
    if isinstance(part, gymnasium.Env) and not isinstance(part, gymnasium.Wrapper):
        given = None if part.spec is None else part.spec.kwargs
    else:
        given = getattr(part, "_saved_kwargs", None)
    return None if given is None else {name: plain(value) for name, value in given.items() if name != "render_mode"}


def _spec_differences(stepped: EnvironmentSpecs, played: EnvironmentSpecs) -> list[str]:
    expected, came = _fields(stepped), _fields(played)
    differences = []
    for name in {**expected, **came}:
        if name not in came:
            differences.append(f"{name} is not there in evaluation")
        elif name not in expected:
            differences.append(f"{name} is there in evaluation alone")
        else:
            differences += [
                f"{name} has {field}={_shown(came[name].get(field))} in evaluation, "
                f"expected {_shown(value)} as in collection"
                for field, value in expected[name].items()
                if came[name].get(field) != value
            ]
    return differences


def _fields(specs: EnvironmentSpecs) -> dict[str, dict[str, Any]]:
    """Return the spec fields of each observation and action."""
    leaves = {f"observation {key!r}": spec for key, spec in specs.observation.items(True, True)}
    if isinstance(specs.action, Composite):
        leaves |= {f"action {key!r}": spec for key, spec in specs.action.items(True, True)}
    else:
        leaves["action"] = specs.action
    return {name: _spec_fields(spec) for name, spec in leaves.items()}


def _spec_fields(spec: TensorSpec) -> dict[str, Any]:
    fields = spec_fields(spec)
    bounds = {name: _numbers(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return {**fields, "shape": tuple(spec.shape), **bounds}


def _numbers(bound: torch.Tensor) -> Any:
    """Return a bound as numbers of six digits, because computed bounds differ in the last digits."""
    flat = bound.flatten()
    numbers = [float(f"{number:.6g}") for number in (flat[:1] if (flat == flat[:1]).all() else flat).tolist()]
    return numbers[0] if len(numbers) == 1 else numbers


def _shown(value: Any) -> str:
    # Shorten the bounds of an image.
    return reprlib.repr(value) if isinstance(value, list) else str(value)


def _wrapper_difference(stepped: EnvironmentView, played: EnvironmentView) -> str | None:
    stepped = _without_clipping(stepped, played)
    mine, theirs = stepped.transforms or (), played.transforms or ()
    same = (stepped.wrappers, mine) == (played.wrappers, theirs)
    if stepped.transforms is None or played.transforms is None:
        if stepped.wrappers is None or played.wrappers is None:
            return None
        if mine or theirs:
            # Wrappers of one side may replace transforms of the other, unless they are missing or equal on both sides.
            same = len((played if mine else stepped).wrappers or ()) > 1 and stepped.wrappers != played.wrappers
    if same:
        return _argument_differences(stepped, played)
    came, expected = (
        " > ".join([*(each.wrappers or ["(not Gymnasium's)"]), *(each.transforms or ())]) for each in (played, stepped)
    )
    return f"wrappers are {came} in evaluation, expected {expected} as in collection"


def _without_clipping(stepped: EnvironmentView, played: EnvironmentView) -> EnvironmentView:
    """Return the view of collection without the clipping of rewards if evaluation does not clip."""
    clip = wrappers.ClipReward.__name__
    if stepped.wrappers is None or stepped.arguments is None or clip in (played.wrappers or ()):
        return stepped
    kept = [pair for pair in zip(stepped.wrappers, stepped.arguments, strict=True) if pair[0] != clip]
    return replace(stepped, wrappers=[name for name, _ in kept], arguments=[arguments for _, arguments in kept])


def _argument_differences(stepped: EnvironmentView, played: EnvironmentView) -> str | None:
    if stepped.wrappers != played.wrappers:
        return None  # transforms replace some wrappers
    found = [
        f"{name} has {field}={_told(came)} in evaluation, expected {_told(expected)} as in collection"
        for name, mine, theirs in zip(
            stepped.wrappers or (), stepped.arguments or (), played.arguments or (), strict=True
        )
        if mine is not None and theirs is not None
        for field, expected, came in differences(mine, theirs)
    ]
    return "; ".join(found) or None


def _told(value: Any) -> str:
    return "its default" if value is None else _shown(value)
