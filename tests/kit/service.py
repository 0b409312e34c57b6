"""Rows for replay services, and the rows that their shards store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from kit.fake_ray import FakeRay
from torchrl_lightning import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    SequenceSampler,
    UniformSampler,
)

ENVS, STEPS = 4, 2
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": UniformSampler,
    "prioritized": PrioritizedSampler,
    "sequences": partial(SequenceSampler, batch_length=5),
    "prioritized windows": partial(PrioritizedSampler, batch_length=5),
}


def service_buffer(sampler: str = "uniform", size: int = 400, **settings: Any) -> ExperienceBuffer:
    """Return an empty buffer of four environments."""
    generator = torch.Generator().manual_seed(0)
    settings = {"num_envs": ENVS, "generator": generator, **settings}
    return ExperienceBuffer(storage=RingStorage(size), sampler=SAMPLERS[sampler](), **settings)


def service_rows(number: int, steps: int = STEPS, envs: int = ENVS, first: int = 0) -> TensorDict:
    """Return rollout number ``number`` ``[N, T]``. Each row stores its environment, from ``first`` on, and its step."""
    time_of = torch.arange(number * steps, (number + 1) * steps).expand(envs, steps)
    env_ids = torch.arange(first, first + envs).unsqueeze(1).expand(envs, steps)
    flags = torch.zeros(envs, steps, 1, dtype=torch.bool)
    following = {"reward": flags.float(), "done": flags, "terminated": flags, "truncated": flags}
    entries = {"time": time_of.clone(), "env": env_ids.clone(), "is_init": flags, "next": following}
    return TensorDict(entries, [envs, steps], names=[None, "time"])


def service_arrays(number: int, envs: list[int]) -> dict[Any, Any]:
    """Return the arrays ``[T, N, *F]`` of some environments of a rollout, for a service's writer."""
    rows = service_rows(number)[torch.tensor(envs)].transpose(0, 1)
    return {key: value.contiguous().numpy() for key, value in rows.items(True, True)}


def shard_of(ray: FakeRay, number: int = 0, name: str = "it") -> Any:
    """Return the actor of a shard."""
    return ray.get_actor(f"{name}/{number}", "torchrl_lightning")


def stored_times(ray: FakeRay, number: int = 0) -> dict[int, list[int]]:
    """Return the stored steps of each environment, in their order in the ring."""
    stored = shard_of(ray, number).buffer
    if not len(stored):
        return {}
    rows = stored.storage.get(stored.writer.rings.filled_cells())
    return {env: rows["time"][rows["env"] == env].tolist() for env in rows["env"].unique().tolist()}
