"""Collectors: environments, and rollouts of a policy in them."""

from __future__ import annotations

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
