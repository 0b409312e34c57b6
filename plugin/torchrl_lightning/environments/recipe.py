"""Recipe of one environment in plain values, for training, evaluation and deployment."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import ClipReward, FilterObservation, FlattenObservation, RepeatAction, TimeLimit

from torchrl_lightning._core.settings import Boolean, FinitePositive, Positive, PositiveInt, Settings, choices, setting
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import integer
from torchrl_lightning._hydra.compat import instantiate
from torchrl_lightning.environments.copies import copy_beneath_wrappers
from torchrl_lightning.environments.install_hint import install_hint
from torchrl_lightning.environments.workers.time_limits import TimedCalls, TimedEnv
from torchrl_lightning.environments.wrappers.frame_stack import FrameStack
from torchrl_lightning.environments.wrappers.rename import RenameObservation, check_rename

Environment = gym.Env[Any, Any]
Wrapper = Callable[[Environment], Environment]


def _check_target(part: Any, argument: str) -> Any:
    """Return a callable, or the mapping with its name; raise ValueError if Hydra refuses to call the target."""
    if callable(part):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("_target_"), str):
        raise TypeError(f"{argument} must be a callable, or a mapping with its name as _target_, got {part!r}.")
    # Imported here: processes that step environments receive a finished recipe and do not need Hydra.
    from hydra.errors import InstantiationException

    try:
        instantiate({"_target_": part["_target_"], "_partial_": True})
    except InstantiationException as error:
        wrapper = error.__cause__  # wraps the exception of the import
        import_error = (wrapper and wrapper.__cause__) or error
        raise _unknown_target_error(argument, part["_target_"], import_error) from error
    _resolve(part, argument)
    return dict(part)


def _check_id(value: Any, name: str) -> Any:
    return value if isinstance(value, str) else _check_target(value, name)


def _to_list(value: Any, name: str, items: str) -> list[Any]:
    # list() would split a string into letters and reduce a mapping to its keys.
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {items}, got {value!r}. Write [...] around it.")
    return list(value)


def _check_targets(value: Any, name: str) -> list[Any]:
    parts = enumerate(_to_list(value, name, "callables or mappings"))
    return [_check_target(part, f"{name}[{index}]") for index, part in parts]


def _to_names(value: Any, name: str) -> list[str]:
    return _to_list(value, name, "names")


def _to_kept_names(value: Any, name: str) -> list[str]:
    if names := _to_names(value, name):
        return names
    raise ValueError(f"{name} must name at least one entry, got []. Remove it to keep all.")


def _to_indices(value: Any, name: str) -> list[int]:
    indices = _to_list(value, name, "at least one number")
    if not indices:
        raise ValueError(f"{name} must be a list of at least one number, got []. Remove it to keep all.")
    return [integer(index, f"{name}[{position}]", 0) for position, index in enumerate(indices)]


def _to_dict(value: Any, name: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of names and values, got {value!r}.")
    return dict(value or {})


def _to_renames(value: Any, name: str) -> dict[str, str]:
    return check_rename({} if value is None else value)


Factory = str | Callable[..., Environment] | Mapping[str, Any]
Names = Annotated[Sequence[str], _to_names]


class EnvironmentRecipe(Settings, ConfigSafe):
    """Make an environment from settings and an id or a factory.

    Recipes can be pickled, and compared by their ``repr``.

    The settings wrap the environment from the inside out, in the order of the arguments. Wrappers and a factory can
    also be written as in a config: a mapping with the name of a class or function as ``_target_``, and its arguments.
    TorchRL environments are wrapped in TorchRL's transforms; a setting without a matching transform is an error.

    Args:
        id: an environment id, also ``module:id``, or a factory of one Gymnasium or TorchRL environment.
        module: the module that registers the id, if the id does not name it.
        env_kwargs: keyword arguments for :func:`gymnasium.make` or the factory.
        time_limit: steps after which an episode is truncated; the environment's own limit if None. An environment of a
            factory also keeps its own limit, which must not be smaller.
        action_repeat: number of steps that repeat each action; their rewards are added.
        wrappers: functions that take the environment and return it wrapped, e.g. partials of Gymnasium's wrappers. For
            a TorchRL environment: functions that make a transform.
        keep: entries of a Dict observation to keep; all if None.
        drop: entries to remove from a Dict observation.
        rename: new names for entries of a Dict observation. Names of a run's own entries, such as ``reward``, are
            reserved. TorchRL's specs cannot store some other names, such as ``shape``. Name an entry of a nested Dict
            by its path: ``{arm.shape: form}``. ``wrappers``, ``keep`` and ``drop`` use the old names.
        observe: indices into a flat observation; the selected numbers keep this order. All numbers if None.
        flatten: flatten the observation into one vector.
        frame_stack: number of images to stack along their channels, the newest last.
        clip_reward: limit of the rewards for learning, which are clipped to ``[-clip_reward, clip_reward]``; no limit
            if None. Evaluation uses the unclipped rewards, as published scores do.
        vectorization: how the copies are stepped during collection. ``"sync"`` steps them in this process, ``"async"``
            steps each copy in its own process (by ``spawn``: a script needs ``if __name__ == "__main__":``).
            ``"envpool"`` uses EnvPool, which allows no wrappers. Collectors with workers need ``"sync"``, because the
            workers step the environments. Evaluation runs in this process. With ``"envpool"`` it steps Gymnasium's
            environment of the same id. If Gymnasium does not have this id, or ``env_kwargs`` are set, it steps
            EnvPool's environment.
        demonstrations_of: ids, or names of factories. Demonstrations that were recorded in these environments are
            accepted, although the environment or its reward differs. List the environment's own id to allow other
            arguments and wrappers.
        step_timeout: maximum seconds for building the environment, and for each ``reset``, ``step`` or ``close``; no
            limit if None. A longer call is interrupted by an error that names the call. If the call does not return to
            Python, the process exits with status 1 (143 after SIGTERM). A call has at most 5 seconds after SIGTERM. The
            limit does not apply to code that blocks all other Python threads of the process that steps the environment.

    Raises:
        ValueError: a number is out of range, or a target is unknown. Calling the recipe raises this error if a setting
            does not fit the environment.
        TypeError: ``id`` or a wrapper has the wrong type.

    Examples:
        >>> recipe = EnvironmentRecipe(
        ...     "CartPole-v1", time_limit=200, wrappers=[{"_target_": "gymnasium.wrappers.TimeAwareObservation"}]
        ... )
        >>> recipe().observation_space.shape
        (5,)
        >>> EnvironmentRecipe("CartPole-v1", observe=[0, 2])
        EnvironmentRecipe('CartPole-v1', observe=[0, 2])
        >>> EnvironmentRecipe("ALE/Pong-v5", module="ale_py")
        EnvironmentRecipe('ale_py:ALE/Pong-v5')
    """

    CONFIG_NAME: ClassVar[str | None] = "recipe"

    id: Annotated[Factory, _check_id] = setting(kw_only=False)
    env_kwargs: Annotated[Mapping[str, Any], _to_dict] = setting(default=None, kw_only=False)
    module: str | None = None
    time_limit: PositiveInt | None = None
    action_repeat: PositiveInt = 1
    wrappers: Annotated[Sequence[Wrapper | Mapping[str, Any]], _check_targets] = ()
    keep: Annotated[Sequence[str], _to_kept_names] | None = None
    drop: Names = ()
    rename: Annotated[Mapping[str, str], _to_renames] = setting(default=None)
    observe: Annotated[Sequence[int], _to_indices] | None = None
    flatten: Boolean = False
    frame_stack: PositiveInt = 1
    clip_reward: FinitePositive | None = None
    vectorization: Annotated[str, choices("sync", "async", "envpool")] = "sync"
    demonstrations_of: Names = ()
    step_timeout: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.drop:
            raise ValueError(
                f"keep and drop must not both be set, got keep={self.keep} and drop={self.drop}. Remove one."
            )
        if self.time_limit is not None and isinstance(self.id, str) and "max_episode_steps" in self.env_kwargs:
            raise ValueError(
                f"time_limit must be None if env_kwargs has max_episode_steps, got {self.time_limit} and "
                f"env_kwargs={dict(self.env_kwargs)}. Remove one of them."
            )
        # Gymnasium imports the module of ``module:id`` also in worker processes.
        if self.module and isinstance(self.id, str) and ":" not in self.id:
            self.id = f"{self.module}:{self.id}"

    def __call__(self, **kwargs: Any) -> Any:
        """Make the environment; ``kwargs``, e.g. ``render_mode``, override the recipe's ``env_kwargs``."""
        kwargs = {**self.env_kwargs, **kwargs}
        if self.step_timeout is None:
            return self._build(kwargs, None)
        calls = TimedCalls(self.step_timeout)
        with calls.running():
            env = self._build(kwargs, calls)
        return TimedEnv(env, calls) if isinstance(env, gym.Env) else env

    def _build(self, kwargs: dict[str, Any], calls: TimedCalls | None) -> Any:
        env: Environment
        if isinstance(self.id, str):
            limit = {} if self.time_limit is None else {"max_episode_steps": self.time_limit}
            env = gym.make(self.id, **{**limit, **kwargs})
        else:
            env = _resolve(self.id, "id")(**kwargs)
            if not isinstance(env, gym.Env):
                return self._wrap_torchrl(env, calls)
            if self.time_limit is not None:
                _check_limit(env, self.time_limit)
                env = TimeLimit(env, self.time_limit)
        if self.action_repeat > 1:
            env = RepeatAction(env, self.action_repeat)
        for position, wrapper in enumerate(self.wrappers):
            env = _wrap(env, _resolve(wrapper, f"wrappers[{position}]"), f"wrappers[{position}]={to_plain(wrapper)}")
        if self.keep is not None or self.drop:
            env = FilterObservation(env, _select_entries(env.observation_space, self.keep, self.drop))
        if self.rename:
            env = RenameObservation(env, self.rename)
        if self.observe is not None:
            env = SelectObservation(env, self.observe)
        if self.flatten:
            env = _wrap(env, FlattenObservation, "flatten=True")
        if self.frame_stack > 1:
            env = FrameStack(env, self.frame_stack)
        if self.clip_reward is not None:
            env = ClipReward(env, -self.clip_reward, self.clip_reward)
        copy_beneath_wrappers(env)
        return env

    def _wrap_torchrl(self, env: Any, calls: TimedCalls | None) -> Any:
        # Imported here: a process that only steps Gymnasium's environments needs no torch.
        from torchrl_lightning.environments.torchrl_recipe import apply_transforms

        handled = ("id", "env_kwargs", "module", "wrappers", "vectorization", "demonstrations_of", "step_timeout")
        wrappers = {
            f"wrappers[{position}]={to_plain(wrapper)}": _resolve(wrapper, f"wrappers[{position}]")
            for position, wrapper in enumerate(self.wrappers)
        }
        settings = {name: value for name, value in vars(self).items() if name not in handled}
        return apply_transforms(env, wrappers=wrappers, calls=calls, **settings)

    def for_evaluation(self) -> EnvironmentRecipe:
        """Return the recipe with unclipped rewards."""
        return self.with_settings(clip_reward=None)

    def with_settings(self, **settings: Any) -> EnvironmentRecipe:
        """Return a copy of the recipe with the new values of ``settings``.

        Examples:
            >>> EnvironmentRecipe("CartPole-v1", time_limit=9).with_settings(time_limit=None)
            EnvironmentRecipe('CartPole-v1')
        """
        return type(self)(**{**vars(self), **settings})

    def __repr__(self) -> str:
        id, *settings = self.settings().items()
        text = "".join(f", {name}={value!r}" for name, value in settings)
        return f"{type(self).__name__}({id[1]!r}{text})"

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as plain data; classes and functions by name.

        Examples:
            >>> EnvironmentRecipe("CartPole-v1", wrappers=[partial(TimeLimit, max_episode_steps=9)]).settings()
            {'id': 'CartPole-v1', 'wrappers': [{'_target_': 'gymnasium.wrappers.common.TimeLimit', \
'max_episode_steps': 9}]}
        """
        defaults = {name: setting_.default for name, setting_ in EnvironmentRecipe.settings_of_class.items()}
        settings = {name: to_plain(value) for name, value in vars(self).items() if value and value != defaults[name]}
        settings.pop("module", None)  # the id names it
        # Write callables and mappings in the same form.
        if not isinstance(self.id, str):
            settings["id"] = _to_target(_resolve(self.id, "id"))
        if self.wrappers:
            settings["wrappers"] = [_to_target(_resolve(wrapper, "wrappers")) for wrapper in self.wrappers]
        return settings


def _check_limit(env: Environment, limit: int) -> None:
    """Validate that episodes can reach a limit; raise ValueError if the environment's own limit is smaller."""
    env_limit = None if env.spec is None else env.spec.max_episode_steps
    if env_limit is not None and env_limit < limit:
        raise ValueError(
            f"time_limit must be at most {env_limit}, the limit of the factory's environment, got {limit}. "
            "Build the environment with a larger limit."
        )


def as_recipe(env: str | Callable[..., Any]) -> EnvironmentRecipe:
    """Return a recipe unchanged, or wrap an id or a factory in a recipe without other settings."""
    return env if isinstance(env, EnvironmentRecipe) else EnvironmentRecipe(env)


class SelectObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Select some entries of a flat observation, e.g. to hide velocities from a policy with memory.

    Args:
        env: an environment with a one-dimensional Box observation.
        indices: indices of the entries, in this order.

    Raises:
        ValueError: if the observation is not a flat Box or an index is out of range.

    Examples:
        >>> SelectObservation(gym.make("CartPole-v1"), [0, 2]).reset(seed=0)[0].shape
        (2,)
    """

    def __init__(self, env: Environment, indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"observe needs a one-dimensional Box as the observation, got {space}. Remove observe.")
        if not indices or not all(0 <= index < space.shape[0] for index in indices):
            raise ValueError(f"observe must be indices from 0 to {space.shape[0] - 1} of {space}, got {list(indices)}.")
        self._indices = np.asarray(indices)
        self.observation_space = spaces.Box(space.low[self._indices], space.high[self._indices], dtype=space.dtype)

    def observation(self, observation: Any) -> Any:
        """Return the selected entries."""
        return observation[self._indices]


def _select_entries(space: spaces.Space[Any], keep: Sequence[str] | None, drop: Sequence[str]) -> list[str]:
    names, argument = (drop, "drop") if keep is None else (keep, "keep")
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"{argument}={list(names)} needs a Dict as the observation, got {space}. Remove {argument}.")
    missing = [name for name in names if name not in space.spaces]
    selected = [name for name in space.spaces if (name in names) == (keep is not None)]
    if missing or not selected:
        problem = f"{missing} are missing" if missing else "no entry remains"
        raise ValueError(
            f"{argument} must select some of the observed entries {sorted(space.spaces)}, got {list(names)}: {problem}."
        )
    return selected


def _unknown_target_error(argument: str, target: str, error: BaseException) -> ValueError:
    module, remedy = target.partition(".")[0], ""
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        remedy = install_hint(error) or f" Run in the folder of {module}.py, or add this folder to PYTHONPATH."
    return ValueError(f"{argument} has the unknown _target_ {target!r}: {str(error).splitlines()[0]}.{remedy}")


def _resolve(part: Any, argument: str) -> Callable[..., Any]:
    """Return a callable unchanged, or build it from a mapping of ``_target_`` and arguments."""
    if callable(part):
        return part
    module, _, name = part["_target_"].rpartition(".")
    try:
        target = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise _unknown_target_error(argument, part["_target_"], error) from error
    arguments = {key: value for key, value in part.items() if not key.startswith("_")}
    positional = part.get("_args_", ())
    return partial(target, *positional, **arguments) if arguments or positional else target


def _wrap(env: Environment, wrapper: Wrapper, label: str) -> Environment:
    try:
        wrapped = wrapper(env)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{label} does not fit {env}, which observes {env.observation_space}: {error}") from error
    if not isinstance(wrapped, gym.Env):
        raise TypeError(f"{label} must return the wrapped environment, a gymnasium.Env, got {type(wrapped).__name__}.")
    return wrapped


def to_plain(value: Any) -> Any:
    """Convert a setting to plain data (numbers, strings, lists, dicts).

    Other objects become their names. Exports of this package become their public names.

    Examples:
        >>> to_plain([TimeLimit, partial(TimeLimit, max_episode_steps=9), np.float32(2)])
        ['gymnasium.wrappers.common.TimeLimit', {'_target_': 'gymnasium.wrappers.common.TimeLimit', \
'max_episode_steps': 9}, 2.0]
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, partial):
        positional = {"_args_": value.args} if value.args else {}
        return to_plain({"_target_": value.func, **positional, **value.keywords})
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Sequence | Set):
        return [to_plain(item) for item in value]
    if isinstance(value, np.ufunc):
        return f"numpy.{value.__name__}"
    definition = value if hasattr(value, "__qualname__") else type(value)
    return _public_name(definition) or f"{definition.__module__}.{definition.__qualname__}"


def _public_name(definition: Any) -> str | None:
    """Return the public name of an export of this package. The name stays the same if the object moves."""
    package = __name__.partition(".")[0]
    exports, name = sys.modules[package], definition.__qualname__
    if definition.__module__.partition(".")[0] != package or getattr(exports, name, None) is not definition:
        return None
    return f"{package}.{name}"


def _to_target(part: Callable[..., Any]) -> dict[str, Any]:
    target = to_plain(part)
    return target if isinstance(target, dict) else {"_target_": target}


def differences(old: Any, new: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each field that differs between two plain values; a missing value is None.

    Examples:
        >>> list(differences({"stack": 4, "wrappers": [{"low": 0}]}, {"wrappers": [{"low": 1}]}))
        [('stack', 4, None), ('wrappers[0].low', 0, 1)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{field}.{key}" if field else key)
    elif isinstance(old, list) and isinstance(new, list) and any(isinstance(item, dict) for item in old + new):
        for index, (old_item, new_item) in enumerate(zip_longest(old, new)):
            yield from differences(old_item, new_item, f"{field}[{index}]")
    elif old != new:
        yield field, old, new
