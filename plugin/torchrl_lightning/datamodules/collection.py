"""Collectors of a run: our own, or what a factory of the user's builds, and what it is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl.envs import EnvBase

from torchrl_lightning.collectors import GymnasiumCollector, TorchRLCollector
from torchrl_lightning.datamodules.shares import collectors_of_rank, still_asked
from torchrl_lightning.environments.torchrl_batch import stepped_together


def own_collector(env: Any, policy: Any, num_envs: int, **options: Any) -> Any:
    """Build our collector of Gymnasium's or of TorchRL's environments."""
    if isinstance(env, EnvBase):
        # A reset at each batch looks whether the environment's seed makes it begin alike.
        together = None if options["reset_at_each_batch"] else stepped_together(env)
        if together is None:
            return TorchRLCollector(env, policy, **options)  # which has its own number
        env = together
    return GymnasiumCollector(env, policy, num_envs=num_envs, **options)


def call_with_policy(make_collector: Callable[..., Any], policy: Any, **options: Any) -> Any:
    """Call a collector factory with the policy, by name where it has such a parameter."""
    if "policy" in inspect.signature(make_collector).parameters:
        return make_collector(policy=policy, **options)
    return make_collector(policy, **options)


def clipping_of(make_collector: Callable[..., Any] | None) -> bool | None:
    """Return whether a collector factory has ``clip_actions=True``; None if it has no such parameter.

    Examples:
        >>> clipping_of(partial(GymnasiumCollector, clip_actions=True)), clipping_of(GymnasiumCollector)
        (True, False)
        >>> clipping_of(lambda policy: ...)
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
    """Return what a collector factory is told: ``seed`` and ``reset_at_each_batch``, if it has such parameters.

    Moreover a ``replay``, and the sizes, if it still asks for ``frames_per_batch``. A seed that the user has bound to a
    partial stays, on a single rank. A ValueError if all ranks would collect the same data, or if the collector would
    not reset as the DataModule says.

    Examples:
        >>> collector_options(lambda policy, seed: ..., 2, seed=7, reset_at_each_batch=False)
        {'seed': 7}
    """
    parameters = inspect.signature(make_collector).parameters
    bound = make_collector.keywords if isinstance(make_collector, partial) else {}
    options: dict[str, Any] = {}
    own_seed = bound.get("seed")
    if world_size > 1 and own_seed is not None:
        raise ValueError(
            f"collector= has seed={own_seed}, with which all {world_size} ranks would collect the same data. Leave the "
            "seed out: each rank's collector is given one of its own."
        )
    if own_seed is None and "seed" in parameters:
        options["seed"] = seed
    elif own_seed is None and world_size > 1:
        raise ValueError(
            f"collector= takes no `seed`, so all {world_size} ranks would collect the same data. Give it such a "
            "parameter, e.g. def collector(policy, seed): made = Collector(...); made.set_seed(seed); return made."
        )
    own_reset = bound.get("reset_at_each_batch", reset_at_each_batch)
    if own_reset != reset_at_each_batch:
        raise ValueError(
            f"collector= has reset_at_each_batch={own_reset}, but the DataModule {reset_at_each_batch}. "
            "Give it to the DataModule alone, which passes it on."
        )
    if "reset_at_each_batch" in parameters:
        options["reset_at_each_batch"] = reset_at_each_batch
    elif reset_at_each_batch:
        raise ValueError(
            "reset_at_each_batch=True, but collector= takes no `reset_at_each_batch`, so its rollouts would not begin "
            "with a seeded reset. Give it such a parameter, or leave reset_at_each_batch out."
        )
    if replay is not None:
        options["replay"] = replay
    collectors = collectors_of_rank(make_collector, world_size)
    divided = {} if collectors is None else {"num_collectors": collectors}
    return options | divided | still_asked(make_collector, **sizes)
