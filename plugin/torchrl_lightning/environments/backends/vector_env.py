"""Gymnasium vector environments that report the true last observation of every episode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from traceback import extract_tb
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from torchrl_lightning._core.validators import integer, one_of
from torchrl_lightning.environments.backends.envpool_env import EnvPoolVectorEnv, check_envpool, envpool_task
from torchrl_lightning.environments.backends.next_step import tracks_resets
from torchrl_lightning.environments.copies import copy_beneath_wrappers
from torchrl_lightning.environments.env_errors import env_errors
from torchrl_lightning.environments.install_hint import install_hint, registration_hint
from torchrl_lightning.environments.recipe import EnvironmentRecipe, as_recipe
from torchrl_lightning.environments.replay_source import PartialStepVectorEnv
from torchrl_lightning.environments.workers.worker_env import WorkerVectorEnv
from torchrl_lightning.environments.wrappers.rename import RENAME_REMEDY

_FIX = (
    "Build it with gymnasium.vector.SyncVectorEnv([make] * n, "
    "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP), or pass the environment's id or a factory of one "
    "environment and let torchrl_lightning.make_vector_env build it."
)


def make_vector_env(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any],
    num_envs: int | None = 1,
    *,
    vectorization: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
) -> VectorEnv[Any, Any, Any]:
    """Build a vector environment that resets in the step that ends an episode, or check an existing one.

    With ``AutoresetMode.SAME_STEP`` every step is a real transition, and the last observation of a finished episode
    is in ``info["final_obs"]``.

    Args:
        env: A registered id, a factory of one environment, or a ready vector environment, which is returned unchanged.
            Environments that are built here may write all returned values into the same memory.
        num_envs: The number of copies; ``None`` means one, or the number of a ready vector environment.
        vectorization: ``"sync"`` steps the copies in this process. ``"async"`` steps each copy in its own process (by
            ``spawn``: a script needs ``if __name__ == "__main__":``). ``"envpool"`` steps all copies of EnvPool's
            environment together in C++. ``None`` uses the value of the :class:`~torchrl_lightning.EnvironmentRecipe`,
            or ``"sync"`` without a recipe. A recipe for EnvPool stays with EnvPool even for ``"sync"`` if Gymnasium
            does not know the id or the recipe has ``env_kwargs``.
        env_kwargs: Keyword arguments for the id or the factory.
        wrappers: Functions that wrap each single environment, innermost first.

    Raises:
        ImportError: A package that the environment needs is not installed.
        ValueError: The id is unknown, the number of environments does not fit, or the autoreset mode would mix reset
            observations into the data.
        TypeError: ``env`` is not an id, a factory or a vector environment.

    Source:
        https://farama.org/Vector-Autoreset-Mode

    Examples:
        >>> env = make_vector_env("CartPole-v1", 2)
        >>> env.num_envs, env.metadata["autoreset_mode"].name
        (2, 'SAME_STEP')
        >>> env.close()
    """
    vectorization = vectorization_of(env, vectorization)
    by_envpool = vectorization == "envpool" and not isinstance(env, VectorEnv)
    if not by_envpool:  # envpool_task checks its own arguments
        check_env_source(env, vectorization, env_kwargs, wrappers)
    if isinstance(env, VectorEnv):
        if env_kwargs or wrappers:
            raise ValueError(
                f"env_kwargs and wrappers must be left out for a ready {type(env).__name__}, got {env_kwargs} and "
                f"{wrappers}. Use them when you build it."
            )
        if num_envs is not None and num_envs != env.num_envs:
            raise ValueError(
                f"num_envs must be {env.num_envs} or None for this ready vector environment, got {num_envs}."
            )
        return env
    num_envs = 1 if num_envs is None else integer(num_envs, "num_envs")
    if by_envpool:
        task, kwargs = envpool_task(env, env_kwargs or {}, wrappers)
        return EnvPoolVectorEnv(task, num_envs, kwargs)
    factory = SingleEnv(env, dict(env_kwargs or {}), tuple(wrappers))
    if vectorization == "async":
        return WorkerVectorEnv([factory] * num_envs, as_recipe(env).step_timeout)
    # copy=False: the caller copies each observation into its own memory immediately.
    return PartialStepVectorEnv([factory] * num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def vectorization_of(env: object, requested: str | None = None) -> str:
    """Return the requested vectorization; if it is None, return the recipe's value, or ``"sync"`` without a recipe.

    A recipe for EnvPool stays with EnvPool even for ``"sync"`` if Gymnasium cannot make its environment.
    """
    default = env.vectorization if isinstance(env, EnvironmentRecipe) else "sync"
    if requested is None:
        return default
    one_of(requested, "vectorization", ("sync", "async", "envpool"))
    if isinstance(env, VectorEnv) and requested != "sync":
        raise ValueError(
            f"vectorization must be 'sync' or None for a ready {type(env).__name__}, which steps itself, got "
            f"{requested!r}. Remove it, or pass an id or a factory."
        )
    if requested == "sync" and default == "envpool" and isinstance(env, EnvironmentRecipe):
        return "envpool" if env.env_kwargs or env.id not in gymnasium.registry else "sync"
    return requested


def check_env_source(
    env: object,
    vectorization: str = "sync",
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
) -> None:
    """Validate an environment as far as possible without building it; raise ValueError for an unknown id.

    Raise TypeError if ``env`` is not an id, a factory or a vector environment, or if an argument has the wrong type.
    Arguments for EnvPool are checked completely.
    """
    if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
        raise TypeError(f"env_kwargs must be a mapping of names and values, got {env_kwargs!r}.")
    if isinstance(wrappers, str | Mapping) or not isinstance(wrappers, Iterable):
        raise TypeError(f"wrappers must be a list of callables, got {wrappers!r}. Write [...] around it.")
    for number, wrapper in enumerate(wrappers if isinstance(wrappers, Sequence) else ()):
        if not callable(wrapper):
            raise TypeError(f"wrappers[{number}] must be a callable that wraps an environment, got {wrapper!r}.")
    if vectorization == "envpool" and not isinstance(env, VectorEnv):
        check_envpool(env, env_kwargs, wrappers)
        return
    if isinstance(env, EnvironmentRecipe) and isinstance(env.id, str):
        env = env.id
    if isinstance(env, str):
        # As in gymnasium.make, ``module:Name-v0`` imports the module that registers the name.
        module, _, name = env.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            gymnasium.spec(name)
        except ImportError as error:
            raise ValueError(
                f"The module before the colon of {env!r} cannot be imported: {error}. Install it and its dependencies, "
                f"or put it in the working directory or in PYTHONPATH.{install_hint(error)}"
            ) from error
        except gymnasium.error.Error as error:
            remedy = None if module else registration_hint(name)
            remedy = remedy or "Check the spelling, or name the module that registers it, as 'module:Name-v0'."
            raise ValueError(f"Gymnasium does not know the environment {env!r}: {error} {remedy}") from error
    elif isinstance(env, gymnasium.Env):
        raise TypeError(
            f"env must be an id or a factory, so that copies can be built, got the ready environment {env}. Pass its "
            f"id, or a factory such as lambda: {type(env.unwrapped).__name__}()."
        )
    elif isinstance(env, VectorEnv):
        autoreset_mode(env)
    elif not callable(env):
        raise TypeError(
            f"env must be an id, a factory of one environment or a gymnasium VectorEnv, got {type(env).__name__}."
        )


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode of a vector environment; raise ValueError if its data contains bogus transitions.

    Mode ``NEXT_STEP`` needs the attribute ``resets`` of
    :class:`~torchrl_lightning.environments.backends.next_step.ResetTrackingVectorEnv`.
    """
    mode = env.metadata.get("autoreset_mode")
    if isinstance(mode, str):
        mode = AutoresetMode(mode)
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"metadata['autoreset_mode'] of {env} must be AutoresetMode.SAME_STEP or AutoresetMode.DISABLED, got "
            f"{mode!r}. " + _FIX
        )
    if mode is AutoresetMode.NEXT_STEP and not tracks_resets(env):
        raise ValueError(
            f"{env} has AutoresetMode.NEXT_STEP, which adds one bogus transition after every episode: its action is "
            "ignored and its reward is 0. ReplayDataModule(env=...) accepts it and does not store these transitions. "
            "Otherwise: " + _FIX
        )
    return mode


class NoGymnasiumEnvironmentError(TypeError):
    """A factory built an object that is not a Gymnasium environment, e.g. a TorchRL one; ``env`` holds the object."""

    def __init__(self, env: Any) -> None:
        super().__init__(
            f"The factory must build one gymnasium.Env, got {type(env).__name__}. "
            "Pass a vector environment itself, not its factory."
        )
        self.env = env


class SingleEnv:
    """A factory of one environment; a class rather than a closure, so that it can be pickled for another process."""

    def __init__(
        self,
        env: Any,
        kwargs: dict[str, Any],
        wrappers: tuple[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]], ...],
    ) -> None:
        self.env, self.kwargs, self.wrappers = env, kwargs, wrappers

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """Make the environment."""
        try:
            with env_errors("make"):
                env = gymnasium.make(self.env, **self.kwargs) if isinstance(self.env, str) else self.env(**self.kwargs)
        except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
            reason = str(error).rstrip(".")
            raise ImportError(
                f"The environment {self.env!r} needs a package that is not installed: {reason}.{install_hint(error)}"
            ) from error
        except gymnasium.error.Error as error:  # from gymnasium.make with the id, or within the factory
            raise ValueError(f"The environment {self.env!r} cannot be made: {error}") from error
        except RuntimeError as error:
            if "keys of one spec collides" not in str(error):
                raise
            raise ValueError(f"The name of an observation is reserved in TorchRL: {error} {RENAME_REMEDY}") from error
        except (AttributeError, TypeError) as error:
            if not extract_tb(error.__traceback__)[-1].filename.endswith("tensor_specs.py"):
                raise
            raise ValueError(
                f"TorchRL's specs do not support the name of an observation: {error}. {RENAME_REMEDY}"
            ) from error
        if not isinstance(env, gymnasium.Env):
            raise NoGymnasiumEnvironmentError(env)
        for wrapper in self.wrappers:
            with env_errors("make"):
                env = wrapper(env)
        copy_beneath_wrappers(env)
        return env
