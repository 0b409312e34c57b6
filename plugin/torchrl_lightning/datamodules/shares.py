"""How the environments of a run are shared out among the workers of its collectors, and these among its ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl_lightning.fitting import Fault
from torchrl_lightning.ranges import integer


def share_of(make_collector: Callable[..., Any] | None, num_envs: int) -> int:
    """Return how many of ``num_envs`` environments each worker of a collector gets; all, if it has none or is not told.

    Examples:
        >>> from torchrl_lightning import AsynchronousCollector
        >>> share_of(partial(AsynchronousCollector, num_workers=4), 16)
        4
    """
    if make_collector is None or not still_asked(make_collector, num_envs=num_envs):
        return num_envs
    parameters = inspect.signature(make_collector).parameters
    for name in ("num_workers", "num_collectors"):
        if name in parameters:
            workers = integer(parameters[name].default, name)
            if num_envs % workers:
                raise ValueError(
                    f"num_envs={num_envs} cannot be shared out evenly among {name}={workers}; "
                    f"take {-(-num_envs // workers) * workers}."
                )
            return num_envs // workers
    return num_envs


def collectors_of_rank(make_collector: Callable[..., Any] | None, world_size: int) -> int | None:
    """Return how many of a cluster's collectors each of several ranks has; None with one rank, or where it has its own.

    Those of a cluster are a parameter ``num_collectors`` of what is told of the stream; each comes with its share of
    the environments. The worker processes of a machine are not divided.

    Raises:
        Fault: They cannot be divided evenly.

    Examples:
        >>> from torchrl_lightning import AsynchronousCollector, RayCollector
        >>> collectors_of_rank(partial(RayCollector, num_collectors=4), 2)
        2
        >>> collectors_of_rank(AsynchronousCollector, 2)
    """
    if world_size == 1 or make_collector is None or not still_asked(make_collector, num_envs=1):
        return None
    parameter = inspect.signature(make_collector).parameters.get("num_collectors")
    if parameter is None:
        return None
    if parameter.default % world_size:
        raise Fault(
            f"num_collectors={parameter.default} cannot be divided evenly among {world_size} ranks; "
            f"take {-(-parameter.default // world_size) * world_size}."
        )
    return integer(parameter.default // world_size, "num_collectors")


def envs_of_rank(make_collector: Callable[..., Any] | None, num_envs: int, world_size: int) -> int:
    """Return how many of ``num_envs`` environments the collector of a rank has: all, or those of its collectors."""
    collectors = collectors_of_rank(make_collector, world_size)
    return num_envs if collectors is None else share_of(make_collector, num_envs) * collectors


def still_asked(make_collector: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Return what a collector factory is told of the stream; nothing where it has its ``frames_per_batch``."""
    parameters = inspect.signature(make_collector).parameters
    frames = parameters.get("frames_per_batch")
    if frames is None or frames.default is not frames.empty:
        return {}
    bound = make_collector.keywords if isinstance(make_collector, partial) else {}
    return {name: value for name, value in given.items() if name in parameters and name not in bound}
