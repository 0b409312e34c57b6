"""Settings with which a run finds a replay service that another run has started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.fake_ray import FakeRay, fake_ray
from torchrl_lightning import ExperienceBuffer, ReplayService, RingStorage
from torchrl_lightning.ray.cluster import ServiceFault

ENVS, STEPS = 4, 4
LIMITS: dict[str, Any] = {"samples_per_insert": 1.0, "error_buffer": 64.0, "min_size": 8}


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray() as fake:
        yield fake


def service(**settings: Any) -> ReplayService:
    return ReplayService(ExperienceBuffer(storage=RingStorage(400), num_envs=ENVS), name="it", **settings)


def rollout() -> TensorDict:
    flags = torch.zeros(ENVS, STEPS, 1, dtype=torch.bool)
    following = {"reward": flags.float(), "done": flags, "terminated": flags, "truncated": flags}
    return TensorDict({"is_init": flags, "next": following}, [ENVS, STEPS], names=[None, "time"])


@pytest.mark.parametrize("how", ["keep", "join"])
@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({}, None),
        (LIMITS, None),
        ({"min_size": 8}, None),
        ({"min_size": 9}, "has min_size=8, but this run has 9"),
        ({**LIMITS, "samples_per_insert": 2.0}, r"has samples_per_insert=1\.0, but this run has 2\.0"),
        ({**LIMITS, "error_buffer": 65.0}, r"has error_buffer=64\.0, but this run has 65\.0"),
    ],
)
def test_limits_that_differ_from_a_running_service_are_refused(
    ray: FakeRay, how: str, settings: dict[str, Any], refusal: str | None
) -> None:
    first = service(keep=True, **LIMITS)
    first.extend(rollout())
    first.state_dict()
    if how == "keep":
        first.shutdown()
    other = service(**{how: True}, **settings)
    if refusal is None:
        assert other.draw(4).shape == (4,)
    else:
        with pytest.raises(ServiceFault, match=refusal) as fault:
            other.draw(4)
        assert "\n" not in str(fault.value)
    other.shutdown()
    first.shutdown()


def test_service_with_more_shards_is_refused(ray: FakeRay) -> None:
    first = service(keep=True, shards=2)
    first.extend(rollout())
    with pytest.raises(ServiceFault, match=r"shards=1\."):
        service(join=True).draw(4)
    assert service(join=True, shards=2).draw(4).shape == (4,)
    first.shutdown()
