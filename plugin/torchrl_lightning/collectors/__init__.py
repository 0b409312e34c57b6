"""Collectors: environments, and rollouts of a policy in them.

Names are imported when they are asked for: a process that only steps an environment then needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_lightning.collectors.asynchronous import AsynchronousCollector
    from torchrl_lightning.collectors.episodes import play_episodes
    from torchrl_lightning.collectors.factory import EnvironmentFactory, SelectObservation
    from torchrl_lightning.collectors.gymnasium import GymnasiumCollector
    from torchrl_lightning.collectors.specs import EnvironmentSpecs, environment_specs
    from torchrl_lightning.collectors.vector_env import make_vector_env

__all__ = [
    "AsynchronousCollector",
    "EnvironmentFactory",
    "EnvironmentSpecs",
    "GymnasiumCollector",
    "SelectObservation",
    "environment_specs",
    "make_vector_env",
    "play_episodes",
]

_MODULE_OF = {
    "AsynchronousCollector": "asynchronous",
    "EnvironmentFactory": "factory",
    "EnvironmentSpecs": "specs",
    "GymnasiumCollector": "gymnasium",
    "SelectObservation": "factory",
    "environment_specs": "specs",
    "make_vector_env": "vector_env",
    "play_episodes": "episodes",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
