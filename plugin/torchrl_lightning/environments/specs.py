"""Observation and action specs of an environment for actors and critics, and their plain form for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict.utils import NestedKey
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded
from torchrl.data.utils import numpy_to_torch_dtype_dict, torch_to_numpy_dtype_dict
from torchrl.envs import EnvBase, GymWrapper, Transform, TransformedEnv, transforms
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_lightning._core.keys import ACTION_MASK, BOOKKEEPING, DEMO, MASK, check_not_reserved, check_spec_names
from torchrl_lightning._core.tree import Path, join, path_of
from torchrl_lightning.environments.actions import ActionFormat, network_spec, to_zero_based
from torchrl_lightning.environments.masks import action_mask, is_mask
from torchrl_lightning.environments.workers.threads import close_environment, record_num_threads
from torchrl_lightning.environments.wrappers.rename import entries_of

COUNTERS = (
    transforms.InitTracker,
    transforms.StepCounter,
    transforms.RewardSum,
    transforms.TrajCounter,
    transforms.Timer,
)


@dataclass(frozen=True)
class EnvironmentSpecs:
    """Specs of one environment, without the batch dimension, and the number of environments.

    Attributes:
        observation: One spec for each observation key.
        action: The spec of one action, as networks compute it: float32, or int64 choices that count from 0.
        num_envs: The number of environments.
        frame_stack: The number of images that a recipe stacks; None if unknown.
        action_start: The environment's first discrete action, which networks and buffers count as 0; one number for
            each part of a MultiDiscrete action. ``action_format`` also stores it.
        action_format: Shape, dtype, bounds and numbering of the environment's actions, and whether they are clipped;
            by default the format of ``action`` without clipping.
    """

    observation: Composite
    action: TensorSpec
    num_envs: int
    frame_stack: int | None = field(default=None, compare=False)
    action_start: int | tuple[int, ...] = field(default=0, compare=False)
    action_format: ActionFormat = field(default=None, compare=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        form: ActionFormat | None = self.action_format
        form = ActionFormat.from_spec(self.action, self.action_start) if form is None else form
        object.__setattr__(self, "action_format", form)
        object.__setattr__(self, "action_start", form.start)

    @property
    def keys(self) -> list[NestedKey]:
        """The observation keys."""
        return list(self.observation.keys(include_nested=True, leaves_only=True))

    def with_clipping(self, clip: bool) -> EnvironmentSpecs:
        """Return the specs with clipping of actions to their Box switched on or off in ``action_format``."""
        if self.action_format.clip == clip:
            return self
        return replace(self, action_format=replace(self.action_format, clip=clip))


def environment_specs(env: VectorEnv[Any, Any, Any] | EnvBase) -> EnvironmentSpecs:
    """Read the specs of a gymnasium vector environment or of a TorchRL environment.

    The specs equal the specs of ``GymEnv(..., categorical_action_encoding=True)``, so discrete actions are integers,
    not one-hot. There are two differences: floating-point actions are always float32, and choices are int64 and count
    from 0. ``action_format`` converts the actions for the environment.

    Raises:
        TypeError: The environment has another type, or a space without a spec.
        ValueError: An observation has a reserved name, or its ``action_mask`` does not fit the actions.

    Examples:
        >>> from torchrl_lightning import make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 2))
        >>> specs.keys, specs.observation["observation"].shape, specs.action.n
        (['observation'], torch.Size([4]), 2)
    """
    specs = torchrl_specs(env) if isinstance(env, EnvBase) else _gymnasium_specs(env)
    has_mask_entry = ACTION_MASK not in specs.observation and is_mask(specs.observation.get(MASK, None), specs.action)
    check_not_reserved(specs.observation.keys(), {MASK: ACTION_MASK} if has_mask_entry else {})
    action_mask(specs.observation, specs.action)
    return specs


def _gymnasium_specs(env: VectorEnv[Any, Any, Any]) -> EnvironmentSpecs:
    if not isinstance(env, VectorEnv):
        raise TypeError(
            f"env must be a gymnasium.vector.VectorEnv or a torchrl EnvBase, got {type(env).__name__}. "
            "torchrl_lightning.make_vector_env builds a VectorEnv from an id or a factory."
        )
    check_spec_names(path for path, _ in entries_of(env.single_observation_space))
    observation = space_to_spec(env.single_observation_space, "observation")
    if not isinstance(observation, Composite):
        observation = Composite(observation=observation)
    action_space = env.single_action_space
    if not isinstance(action_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TypeError(
            f"The action space must be Discrete, MultiDiscrete, MultiBinary or Box, got {action_space}. "
            "Convert it by a wrapper, such as gymnasium.wrappers.TransformAction."
        )
    form = ActionFormat.from_space(action_space)
    action = network_spec(space_to_spec(to_zero_based(action_space), "action"))
    return EnvironmentSpecs(observation, action, env.num_envs, action_format=form)


def space_to_spec(space: spaces.Space[Any], name: str) -> TensorSpec:
    """Convert a space to the TorchRL spec that ``GymEnv`` uses for it; raise TypeError if no spec exists.

    If the choices of the space start above 0, the spec counts from 0, and its first choices are unused.
    """
    if isinstance(space, spaces.Dict):
        return Composite({_key(entry, space): space_to_spec(space[entry], entry) for entry in space})
    if isinstance(space, spaces.Box):
        return _box(space, name)
    if np.any(np.asarray(getattr(space, "start", 0)) < 0):
        raise TypeError(
            f"The space of {name!r} must start at 0 or above, got {space}. "
            "Shift it by gymnasium.wrappers.TransformObservation."
        )
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n + space.start), dtype=_dtype(space, name))
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape[-1], shape=space.shape, dtype=_dtype(space, name))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        choices = space.nvec + space.start
        if len(np.unique(choices)) > 1:
            return MultiCategorical(choices.tolist(), dtype=_dtype(space, name))
        return Categorical(int(choices[0]), shape=space.shape, dtype=_dtype(space, name))
    raise TypeError(
        f"The space of {name!r}, {space}, is not supported: expected Box, Discrete, one-dimensional MultiDiscrete, "
        "MultiBinary or Dict of those. Convert it by a gymnasium wrapper, for example FlattenObservation, or remove it "
        "by EnvironmentRecipe(drop=...)."
    )


def spec_to_space(spec: TensorSpec, start: Any = 0) -> spaces.Space[Any]:
    """Convert a spec to a space, the reverse of :func:`space_to_spec`; raise TypeError if no space exists.

    Args:
        spec: The spec, without a batch dimension.
        start: The first choice of the space; one number for each part of a MultiDiscrete space.

    Examples:
        >>> spec_to_space(Categorical(3), start=1)
        Discrete(3, start=1)
    """
    if isinstance(spec, Composite):
        return spaces.Dict({key: spec_to_space(entry) for key, entry in spec.items()})
    dtype: Any = torch_to_numpy_dtype_dict.get(spec.dtype)
    if isinstance(spec, Binary | OneHot):
        return spaces.MultiBinary(spec.shape[0] if spec.ndim == 1 else spec.shape)
    if isinstance(spec, Categorical):
        if not spec.ndim:
            return spaces.Discrete(int(spec.n), start=start, dtype=np.int64 if spec.dtype is torch.bool else dtype)
        choices = spec.nvec.numpy() if isinstance(spec, MultiCategorical) else np.full(spec.shape, int(spec.n))
        return spaces.MultiDiscrete(choices, dtype=dtype, start=np.broadcast_to(start, choices.shape))
    if isinstance(spec, Bounded):
        return spaces.Box(spec.space.low.numpy(), spec.space.high.numpy(), dtype=dtype)
    if isinstance(spec, Unbounded):
        limits = None if spec.dtype.is_floating_point else torch.iinfo(spec.dtype)
        low, high = (-np.inf, np.inf) if limits is None else (limits.min, limits.max)
        return spaces.Box(low, high, tuple(spec.shape), dtype)
    raise TypeError(f"Gymnasium has no space for a {type(spec).__name__} spec of {spec.dtype}.")


def action_space_of(specs: EnvironmentSpecs) -> spaces.Space[Any]:
    """Return the space of the environment's own actions; raise TypeError if no space exists."""
    form = specs.action_format
    if form.low is not None and form.high is not None:
        return spaces.Box(form.low, form.high, form.shape, form.dtype.type)
    return spec_to_space(specs.action.to(numpy_to_torch_dtype_dict[form.dtype]), form.start)


def observation_leaves(space: spaces.Space[Any]) -> list[tuple[Path, NestedKey, spaces.Space[Any]]]:
    """List the leaves of an observation space: path in the observation, key in the TensorDict, space."""
    if not isinstance(space, spaces.Dict):
        return [((), "observation", space)]
    leaves: list[tuple[Path, NestedKey, spaces.Space[Any]]] = []
    for name in space:
        key, inner = _key(name, space), space[name]
        if isinstance(inner, spaces.Dict):
            leaves += [((name, *path), join(key, path_of(k)), leaf) for path, k, leaf in observation_leaves(inner)]
        else:
            leaves.append(((name,), key, inner))
    return leaves


def _key(name: str, space: spaces.Dict) -> str:
    # Like TorchRL, rename "state" to "observation" if the Dict has no "observation".
    return "observation" if name == "state" and "observation" not in space.spaces else name


def _dtype(space: spaces.Space[Any], name: str) -> torch.dtype:
    dtype: torch.dtype | None = numpy_to_torch_dtype_dict.get(np.dtype(space.dtype))
    if dtype is None:
        raise TypeError(
            f"The dtype {space.dtype} of the space of {name!r}, {space}, is not supported by TorchRL's specs."
        )
    return dtype


def _box(space: spaces.Box, name: str) -> TensorSpec:
    dtype = _dtype(space, name)
    shape = torch.Size(space.shape or (1,))  # TorchRL gives scalars a dimension
    low, high = torch.as_tensor(space.low, dtype=dtype), torch.as_tensor(space.high, dtype=dtype)
    if dtype is torch.bool:
        return Bounded(low, high, shape, dtype=dtype)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    dtype_min, dtype_max = (torch.tensor(limit, dtype=dtype) for limit in (limits.min, limits.max))
    infinite = low.isinf().all() and high.isinf().all()
    if infinite or (torch.isclose(low, dtype_min).all() and torch.isclose(high, dtype_max).all()):
        return Unbounded(shape, dtype=dtype)
    return Bounded(low, high, shape, dtype=dtype)


def torchrl_specs(env: EnvBase) -> EnvironmentSpecs:
    """Read the specs of a TorchRL environment without checking the names of its observations."""
    observation = env.observation_spec_unbatched.clone().clear_device_()
    with unwrap_transforms(env) as (base, applied):
        counter_keys = {key for transform in applied for key in _counter_keys(transform)}
        # A Gymnasium observation stays an observation, even if it has the name of a bookkeeping entry.
        observed = set(base.observation_spec.keys()) if isinstance(base, GymWrapper) else set()
    for key in list(observation.keys(include_nested=True, leaves_only=True)):
        path = path_of(key)
        is_bookkeeping = bool({path[0], path[-1]}.intersection(BOOKKEEPING)) or (path[0] == DEMO and len(path) > 1)
        if key in counter_keys or (is_bookkeeping and path[0] not in observed):
            del observation[key]
    state_keys = carried_keys(env)
    for key, spec in list(observation.items()):
        if (isinstance(spec, Composite) and spec.is_empty()) or key in state_keys:
            del observation[key]
    action = env.action_spec_unbatched
    form = ActionFormat.from_spec(action)
    return EnvironmentSpecs(observation, network_spec(action), max(1, env.batch_size.numel()), action_format=form)


def carried_keys(env: EnvBase) -> list[str]:
    """Return the keys of state trees, such as Brax states, that the environment needs back at each step."""
    state_keys, observation = env.full_state_spec.keys(), env.observation_spec
    return [key for key, spec in observation.items() if isinstance(spec, Composite) and key in state_keys]


@contextmanager
def unwrap_transforms(env: EnvBase) -> Iterator[tuple[EnvBase, list[Transform]]]:
    """Yield the innermost environment and its transforms, inside out; build a copy if the environment is batched."""
    if isinstance(env, TransformedEnv):
        with unwrap_transforms(env.base_env) as (base, applied):
            yield base, [*applied, *flatten_transform(env.transform)]
    elif isinstance(env, BatchedEnvBase):
        # The environments of the batch may be in other processes, so build one here.
        env_copy = env.create_env_fn[0](**env.create_env_kwargs[0])
        record_num_threads(env_copy)
        try:
            with unwrap_transforms(env_copy) as innermost_and_transforms:
                yield innermost_and_transforms
        finally:
            close_environment(env_copy)
    else:
        yield env, []


def flatten_transform(transform: Transform) -> Iterator[Transform]:
    """Yield the parts of a ``Compose``, nested ones included, or the transform itself."""
    if isinstance(transform, transforms.Compose):
        for part in transform:
            yield from flatten_transform(part)
    else:
        yield transform


def _counter_keys(transform: Transform) -> Iterable[NestedKey]:
    """Return the keys that a transform adds for the collector; they are not observations."""
    if isinstance(transform, transforms.TensorDictPrimer):
        return transform.primers.keys(True, True)
    return transform.out_keys if isinstance(transform, COUNTERS) else ()


def specs_state(specs: EnvironmentSpecs) -> dict[str, Any]:
    """Return an environment's specs as tensors and scalars, which ``torch.load(weights_only=True)`` reads."""
    observation, action = spec_state(specs.observation), spec_state(specs.action)
    form = specs.action_format.state_dict()
    return {"observation": observation, "action": action, "num_envs": specs.num_envs, "action_format": form}


def specs_from_state(state: Mapping[str, Any]) -> EnvironmentSpecs:
    """Return the specs that :func:`specs_state` wrote."""
    observation, action = spec_from_state(state["observation"]), spec_from_state(state["action"])
    if "action_format" not in state:  # a file of an earlier release
        return EnvironmentSpecs(observation, action, int(state["num_envs"]), action_start=state.get("action_start", 0))
    form = ActionFormat.from_state(state["action_format"], action)
    return EnvironmentSpecs(observation, action, int(state["num_envs"]), action_format=form)


def spec_fields(spec: TensorSpec) -> dict[str, Any]:
    """Return the plain fields of a leaf: kind, shape, dtype, and bounds (tensors) or number of choices."""
    # Use the name of the exact class, because TorchRL derives some kinds of spec from others.
    kind = type(spec).__name__.removesuffix("Continuous").removesuffix("Discrete")
    fields = {"kind": kind, "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
    match kind:
        case "Bounded":
            return {**fields, "low": spec.space.low.clone(), "high": spec.space.high.clone()}
        case "Categorical" | "OneHot":
            return {**fields, "n": int(spec.space.n)}
        case "MultiCategorical":
            return {**fields, "nvec": spec.nvec.tolist()}
    return fields


def spec_state(spec: TensorSpec) -> dict[str, Any]:
    """Return one spec as tensors and scalars; raise TypeError if its kind is not supported."""
    if isinstance(spec, Composite):
        return {"kind": "Composite", "entries": {str(key): spec_state(entry) for key, entry in spec.items()}}
    state = spec_fields(spec)
    if state["kind"] not in ("Unbounded", "Bounded", "Binary", "Categorical", "OneHot", "MultiCategorical"):
        raise TypeError(f"a {type(spec).__name__} spec cannot be stored in a checkpoint: {spec}")
    return state


def spec_from_state(state: Mapping[str, Any]) -> Any:
    """Return the spec that :func:`spec_state` wrote; raise ValueError if its kind is unknown."""
    kind = state["kind"]
    if kind == "Composite":
        return Composite({key: spec_from_state(entry) for key, entry in state["entries"].items()})
    shape, dtype = torch.Size(state["shape"]), getattr(torch, state["dtype"])
    match kind:
        case "Unbounded":
            return Unbounded(shape, dtype=dtype)
        case "Bounded":
            return Bounded(state["low"], state["high"], shape, dtype=dtype)
        case "Binary":
            return Binary(shape[-1], shape=shape, dtype=dtype)
        case "Categorical":
            return Categorical(state["n"], shape=shape, dtype=dtype)
        case "OneHot":
            return OneHot(state["n"], shape=shape, dtype=dtype)
        case "MultiCategorical":
            return MultiCategorical(state["nvec"], shape=shape, dtype=dtype)
    raise ValueError(f"unknown kind of spec {kind!r}; resume or load with the release that wrote it")
