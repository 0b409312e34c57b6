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
from torchrl_lightning.datamodules._run.rank_agreement import rollouts_of_all_ranks
from torchrl_lightning.environments import EnvironmentSpecs, environment_specs
from torchrl_lightning.environments.backends.next_step import ResetTrackingVectorEnv
from torchrl_lightning.environments.backends.torchrl_env import ReplayTransform
from torchrl_lightning.environments.copies import FreshActions, FreshObservations
from torchrl_lightning.environments.recipe import differences, to_plain
from torchrl_lightning.environments.specs import COUNTERS, spec_fields, unwrap_transforms

# Wrappers that check, truncate, record or render an episode, but do not change observations and rewards.
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
    ReplayTransform,
    transforms.ConditionalSkip,
)


@dataclass(frozen=True)
class EnvironmentView:
    """Specs, wrappers and transforms of an environment, read without a step.

    Attributes:
        specs: Specs of observation and action.
        wrappers: Class names of one Gymnasium environment and its wrappers, innermost first; None if this
            is not a Gymnasium environment, or cannot be inspected.
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
    with unwrap_transforms(env) as (base, env_transforms):
        transform_names = tuple(
            type(transform).__name__ for transform in env_transforms if not isinstance(transform, _NEUTRAL_TRANSFORMS)
        )
        names, arguments = _wrappers(base._env) if isinstance(base, GymWrapper) else (None, None)
    return EnvironmentView(specs, names, arguments, transform_names)


def check_evaluation(collection: EnvironmentView, evaluation: EnvironmentView, is_user_env: bool) -> str | None:
    """Check that evaluation and collection use the same environment.

    Evaluation may leave out the clipping of rewards, because the score of a game counts unclipped rewards.

    Args:
        collection: the environment of collection.
        evaluation: the environment of evaluation.
        is_user_env: True if the user has set ``eval_env``, which may have other wrappers.

    Returns:
        The allowed difference of the wrappers; None without a difference.

    Raises:
        ValueError: The message names each difference.
    """
    differences = _spec_differences(collection.specs, evaluation.specs)
    wrapper_difference = _wrapper_difference(collection, evaluation)
    if differences or (wrapper_difference is not None and not is_user_env):
        if wrapper_difference is not None:
            differences.append(wrapper_difference)
        raise ValueError(
            f"evaluation must use the environment of collection, but they differ: {'; '.join(differences)}. "
            "Pass the same wrapped environment as eval_env=, or one recipe or factory as env= and eval_env=."
        )
    return wrapper_difference


def checked_rollouts(
    stream: Iterable[TensorDictBase], specs: EnvironmentSpecs, trainer: Any
) -> Iterator[TensorDictBase]:
    """Yield a collector's rollouts ``[*B]`` until the collector of any rank has ended.

    Args:
        stream: The rollouts.
        specs: The specs of the networks, with which the first rollout is compared.
        trainer: The run's trainer; None without a run.

    Raises:
        ValueError: An observation is missing or has another shape, or the ranks' rollouts have different sizes.
    """
    rollouts = rollouts_of_all_ranks(stream, trainer)
    for rollout in rollouts:
        for key, spec in specs.observation.items(True, True):
            value = rollout.get(key, None)
            shape = None if value is None else tuple(value.shape[rollout.ndim :])
            if shape != tuple(spec.shape):
                raise ValueError(
                    f"collector= must step the environment of env=, but observation {key!r} "
                    f"{'is missing in its rollouts' if shape is None else f'has shape {shape} in its rollouts'}, "
                    f"expected shape {tuple(spec.shape)}. Pass the same wrapped environment as env=, or use one recipe "
                    "or factory for both."
                )
        yield rollout
        break
    yield from rollouts


def _wrappers(env: Any) -> tuple[list[str] | None, list[dict[str, Any] | None] | None]:
    """Return the class names of one environment and its wrappers, innermost first, and their arguments."""
    env_wrappers: list[Any] = []
    while isinstance(env, VectorWrapper):
        env_wrappers.append(env)
        env = env.env
    if isinstance(env, SyncVectorEnv):
        env = env.envs[0]
    while isinstance(env, gymnasium.Wrapper):
        env_wrappers.append(env)
        env = env.env
    if not isinstance(env, gymnasium.Env):
        return None, None
    parts = [env, *(wrapper for wrapper in reversed(env_wrappers) if not isinstance(wrapper, _NEUTRAL_WRAPPERS))]
    return [type(part).__name__ for part in parts], [_arguments(part) for part in parts]


def _arguments(part: Any) -> dict[str, Any] | None:
    """Return the arguments of a wrapper or environment, or None if Gymnasium did not record them."""
    if isinstance(part, gymnasium.Env) and not isinstance(part, gymnasium.Wrapper):
        arguments = None if part.spec is None else part.spec.kwargs
    else:
        arguments = getattr(part, "_saved_kwargs", None)
    return (
        None
        if arguments is None
        else {name: to_plain(value) for name, value in arguments.items() if name != "render_mode"}
    )


def _spec_differences(collection: EnvironmentSpecs, evaluation: EnvironmentSpecs) -> list[str]:
    expected, actual = _fields(collection), _fields(evaluation)
    differences = []
    for name in {**expected, **actual}:
        if name not in actual:
            differences.append(f"{name} is missing in evaluation")
        elif name not in expected:
            differences.append(f"{name} exists only in evaluation")
        else:
            differences += [
                f"{name} has {field}={_format_value(actual[name].get(field))} in evaluation, "
                f"expected {_format_value(value)} as in collection"
                for field, value in expected[name].items()
                if actual[name].get(field) != value
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
    bounds = {name: _rounded_bound(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return {**fields, "shape": tuple(spec.shape), **bounds}


def _rounded_bound(bound: torch.Tensor) -> Any:
    """Return a bound as numbers, rounded to six digits, because computed bounds differ in the last digits."""
    flat = bound.flatten()
    numbers = [float(f"{number:.6g}") for number in (flat[:1] if (flat == flat[:1]).all() else flat).tolist()]
    return numbers[0] if len(numbers) == 1 else numbers


def _format_value(value: Any) -> str:
    # Abbreviate long lists, such as the bounds of an image.
    return reprlib.repr(value) if isinstance(value, list) else str(value)


def _wrapper_difference(collection: EnvironmentView, evaluation: EnvironmentView) -> str | None:
    collection = _without_reward_clipping(collection, evaluation)
    collection_transforms, evaluation_transforms = collection.transforms or (), evaluation.transforms or ()
    is_equal = (collection.wrappers, collection_transforms) == (evaluation.wrappers, evaluation_transforms)
    if collection.transforms is None or evaluation.transforms is None:
        if collection.wrappers is None or evaluation.wrappers is None:
            return None
        if collection_transforms or evaluation_transforms:
            # Wrappers of one side may replace transforms of the other side. This is excluded if the wrappers are
            # missing or if both sides have the same wrappers.
            is_equal = (
                len((evaluation if collection_transforms else collection).wrappers or ()) > 1
                and collection.wrappers != evaluation.wrappers
            )
    if is_equal:
        return _argument_differences(collection, evaluation)
    actual, expected = (
        " > ".join([*(view.wrappers or ["(not Gymnasium's)"]), *(view.transforms or ())])
        for view in (evaluation, collection)
    )
    return f"wrappers are {actual} in evaluation, expected {expected} as in collection"


def _without_reward_clipping(collection: EnvironmentView, evaluation: EnvironmentView) -> EnvironmentView:
    """Return the view of collection; leave out the clipping of rewards if evaluation does not clip."""
    clip = wrappers.ClipReward.__name__
    if collection.wrappers is None or collection.arguments is None or clip in (evaluation.wrappers or ()):
        return collection
    pairs = [pair for pair in zip(collection.wrappers, collection.arguments, strict=True) if pair[0] != clip]
    return replace(collection, wrappers=[name for name, _ in pairs], arguments=[arguments for _, arguments in pairs])


def _argument_differences(collection: EnvironmentView, evaluation: EnvironmentView) -> str | None:
    if collection.wrappers != evaluation.wrappers:
        return None  # transforms replace some wrappers
    descriptions = [
        f"{name} has {field}={_format_argument(actual)} in evaluation, "
        f"expected {_format_argument(expected)} as in collection"
        for name, collection_arguments, evaluation_arguments in zip(
            collection.wrappers or (), collection.arguments or (), evaluation.arguments or (), strict=True
        )
        if collection_arguments is not None and evaluation_arguments is not None
        for field, expected, actual in differences(collection_arguments, evaluation_arguments)
    ]
    return "; ".join(descriptions) or None


def _format_argument(value: Any) -> str:
    return "its default" if value is None else _format_value(value)
