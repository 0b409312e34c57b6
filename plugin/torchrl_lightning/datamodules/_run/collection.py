"""Build the collector of a run, pass its arguments, and divide environments among workers and ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl.envs import EnvBase

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.validators import integer
from torchrl_lightning.collectors import GymnasiumCollector, TorchRLCollector
from torchrl_lightning.environments.backends.torchrl_batch import as_batch_vector_env


def build_default_collector(env: Any, policy: Any, num_envs: int, **options: Any) -> Any:
    """Build our collector for a Gymnasium or TorchRL environment."""
    if isinstance(env, EnvBase):
        # With a reset at each batch, TorchRLCollector checks that the seed determines the first state of an episode.
        vector_env = None if options["reset_at_each_batch"] else as_batch_vector_env(env)
        if vector_env is None:
            return TorchRLCollector(env, policy, **options)  # a TorchRL environment has its own number of environments
        env = vector_env
    return GymnasiumCollector(env, policy, num_envs=num_envs, **options)


def call_with_policy(make_collector: Callable[..., Any], policy: Any, **options: Any) -> Any:
    """Call a collector factory with the policy, by name if it has a parameter ``policy``."""
    if "policy" in inspect.signature(make_collector).parameters:
        return make_collector(policy=policy, **options)
    return make_collector(policy, **options)


def clips_by_default(make_collector: Callable[..., Any] | None) -> bool | None:
    """Return whether a collector factory has ``clip_actions=True``; None if it does not have this parameter.

    Examples:
        >>> clips_by_default(partial(GymnasiumCollector, clip_actions=True)), clips_by_default(GymnasiumCollector)
        (True, False)
        >>> clips_by_default(lambda policy: ...)
    """
    if make_collector is None:
        return False
    parameter = inspect.signature(make_collector).parameters.get("clip_actions")
    return None if parameter is None or parameter.default is parameter.empty else bool(parameter.default)


def collector_options(
    make_collector: Callable[..., Any],
    world_size: int,
    seed: int,
    reset_at_each_batch: bool,
    replay: Any = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Return the arguments for a collector factory: ``seed`` and ``reset_at_each_batch``, if it has these parameters.

    The result also contains ``replay`` if it is not None, and the sizes if ``frames_per_batch`` is not bound yet. On a
    single rank, a seed in the user's partial has priority. A ValueError is raised if all ranks would collect
    the same data, or if collector and DataModule have different values of ``reset_at_each_batch``.

    Examples:
        >>> collector_options(lambda policy, seed: ..., 2, seed=7, reset_at_each_batch=False)
        {'seed': 7}
    """
    parameters = inspect.signature(make_collector).parameters
    bound = make_collector.keywords if isinstance(make_collector, partial) else {}
    options: dict[str, Any] = {}
    bound_seed = bound.get("seed")
    if world_size > 1 and bound_seed is not None:
        raise ValueError(
            f"the seed of collector= must be unbound on {world_size} ranks, got seed={bound_seed}, with which all "
            "ranks would collect the same data. Leave it out: each rank's collector receives its own seed."
        )
    if bound_seed is None and "seed" in parameters:
        options["seed"] = seed
    elif bound_seed is None and world_size > 1:
        raise ValueError(
            f"collector= must have a parameter `seed` on {world_size} ranks, because all ranks would collect the same "
            "data without it. Add one, e.g. def collector(policy, seed): result = Collector(...); "
            "result.set_seed(seed); return result."
        )
    bound_reset = bound.get("reset_at_each_batch", reset_at_each_batch)
    if bound_reset != reset_at_each_batch:
        raise ValueError(
            f"reset_at_each_batch of collector= must be {reset_at_each_batch}, as in the DataModule, got "
            f"{bound_reset}. Set it only in the DataModule, which passes it to the collector."
        )
    if "reset_at_each_batch" in parameters:
        options["reset_at_each_batch"] = reset_at_each_batch
    elif reset_at_each_batch:
        raise ValueError(
            "reset_at_each_batch must be False if collector= has no parameter `reset_at_each_batch`, got True: its "
            "rollouts would not begin with a seeded reset. Add the parameter, or leave reset_at_each_batch out."
        )
    if replay is not None:
        options["replay"] = replay
    collectors = collectors_of_rank(make_collector, world_size)
    divided_sizes = {} if collectors is None else {"num_collectors": collectors}
    return options | divided_sizes | unbound_arguments(make_collector, **sizes)


def envs_per_worker(make_collector: Callable[..., Any] | None, num_envs: int) -> int:
    """Return the number of environments per worker; ``num_envs`` if the factory lacks workers or size arguments.

    Examples:
        >>> from torchrl_lightning import AsynchronousCollector
        >>> envs_per_worker(partial(AsynchronousCollector, num_workers=4), 16)
        4
    """
    if make_collector is None or not unbound_arguments(make_collector, num_envs=num_envs):
        return num_envs
    parameters = inspect.signature(make_collector).parameters
    for name in ("num_workers", "num_collectors"):
        if name in parameters:
            workers = integer(parameters[name].default, name)
            if num_envs % workers:
                raise ValueError(
                    f"num_envs must be a multiple of {name}={workers}, got {num_envs}. "
                    f"Set num_envs={-(-num_envs // workers) * workers}."
                )
            return num_envs // workers
    return num_envs


def collectors_of_rank(make_collector: Callable[..., Any] | None, world_size: int) -> int | None:
    """Return how many of a cluster's collectors each rank has; None if ranks do not divide the collectors.

    Each collector keeps its share of the environments. Worker processes of a machine are not divided among ranks.

    Raises:
        UserError: The collectors cannot be divided evenly.

    Examples:
        >>> from torchrl_lightning import AsynchronousCollector, RayCollector
        >>> collectors_of_rank(partial(RayCollector, num_collectors=4), 2)
        2
        >>> collectors_of_rank(AsynchronousCollector, 2)
    """
    if world_size == 1 or make_collector is None or not unbound_arguments(make_collector, num_envs=1):
        return None
    parameter = inspect.signature(make_collector).parameters.get("num_collectors")
    if parameter is None:
        return None
    if parameter.default % world_size:
        raise UserError(
            f"num_collectors must be a multiple of the number of ranks, {world_size}, got {parameter.default}. "
            f"Set num_collectors={-(-parameter.default // world_size) * world_size}."
        )
    return integer(parameter.default // world_size, "num_collectors")


def envs_of_rank(make_collector: Callable[..., Any] | None, num_envs: int, world_size: int) -> int:
    """Return a rank's number of environments: ``num_envs``, or the sum over the rank's collectors on a cluster."""
    collectors = collectors_of_rank(make_collector, world_size)
    return num_envs if collectors is None else envs_per_worker(make_collector, num_envs) * collectors


def unbound_arguments(make_collector: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not bound to a collector factory yet; empty if ``frames_per_batch`` is bound."""
    parameters = inspect.signature(make_collector).parameters
    frames = parameters.get("frames_per_batch")
    if frames is None or frames.default is not frames.empty:
        return {}
    bound = make_collector.keywords if isinstance(make_collector, partial) else {}
    return {name: value for name, value in arguments.items() if name in parameters and name not in bound}
