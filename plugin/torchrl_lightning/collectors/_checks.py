"""Checks and small computations that both collectors share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import VectorEnv
from torch import nn

from torchrl_lightning.collectors.specs import EnvironmentSpecs, environment_specs
from torchrl_lightning.collectors.vector_env import make_vector_env
from torchrl_lightning.ranges import integer


def check_frames(frames_per_batch: int, num_envs: int, total_frames: int) -> None:
    """Check the sizes of a collector.

    Raises:
        ValueError: A batch is not a whole number of steps, or there are no frames.
    """
    integer(num_envs, "num_envs")
    integer(frames_per_batch, "frames_per_batch")
    if frames_per_batch % num_envs:
        nearest = max(1, round(frames_per_batch / num_envs)) * num_envs
        raise ValueError(
            f"frames_per_batch={frames_per_batch} is not a multiple of num_envs={num_envs}; the nearest is {nearest}."
        )
    if total_frames < 1 and total_frames != -1:
        raise ValueError(f"total_frames must be positive, or -1 for no end, got {total_frames}.")


def number_of_batches(total_frames: int, frames_per_batch: int) -> int:
    """Return how many batches a whole run has.

    Raises:
        RuntimeError: The collector never stops.
    """
    if total_frames < 0:
        raise RuntimeError("A collector with total_frames=-1 never stops, so it has no length.")
    return -(total_frames // -frames_per_batch)


def read_specs(env: Any, num_envs: int, env_args: Mapping[str, Any]) -> EnvironmentSpecs:
    """Read the specs of a ready environment, or of a single one that is built for this and closed again."""
    if isinstance(env, VectorEnv):
        return environment_specs(env)
    if env_args["vectorization"] == "async":
        env_args = {**env_args, "vectorization": "sync"}
    probe = make_vector_env(env, 1, **env_args)
    try:
        specs = environment_specs(probe)
    finally:
        probe.close()
    return EnvironmentSpecs(specs.observation, specs.action, num_envs)


def check_policy(policy: object) -> None:
    """Refuse a policy that cannot act on a TensorDict.

    Raises:
        TypeError: The policy is not callable, or a plain module from tensors to tensors.
    """
    if policy is not None and not callable(policy):
        raise TypeError(f"policy must map a TensorDict to a TensorDict, got {type(policy).__name__}.")
    # A policy may lack in_keys, but plain torch layers without any module that has them cannot read a TensorDict.
    bare = isinstance(policy, nn.Linear | nn.Sequential)
    if isinstance(policy, nn.Module) and bare and not any(hasattr(part, "in_keys") for part in policy.modules()):
        raise TypeError(
            f"policy is a bare {type(policy).__name__}, which knows no TensorDict; wrap it in "
            "tensordict.nn.TensorDictModule(policy, in_keys=['observation'], out_keys=['action'])."
        )
