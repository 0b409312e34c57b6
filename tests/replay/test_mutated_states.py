"""An edited state is refused before anything changes, or it is one that the buffer can go on from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import SamplerWithoutReplacement
from torchrl.envs.transforms import ObservationNorm

from mutations import check_mutants
from torchrl_lightning import (
    MaxSegmentTree,
    PrioritizedSampler,
    SequenceSampler,
    SumSegmentTree,
    UniformSampler,
)
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

ENVS, SIZE = 2, 6


def rows(count: int, start: int = 0) -> TensorDict:
    value = torch.arange(start, start + count).float()
    return TensorDict({"a": value, "next": {"done": (value % 4 == 3).unsqueeze(-1)}}, [count])


def uneven(**kwargs: Any) -> ExperienceBuffer:
    ours = ExperienceBuffer(storage=RingStorage(SIZE), num_envs=ENVS, batch_size=3, **kwargs)
    for step in range(4):
        ours.extend(rows(ENVS, step * ENVS))
    ours.empty()
    ours.extend(rows(ENVS, 2))
    ours.extend(rows(1, 7), env_ids=torch.tensor([1]))
    return ours


BUFFERS = {
    "uniform": lambda: uneven(sampler=UniformSampler()),
    "prioritized": lambda: uneven(sampler=PrioritizedSampler(SIZE, 0.6, 0.4)),
    "sequences": lambda: uneven(sampler=SequenceSampler(1)),
    "even": lambda: ExperienceBuffer(
        storage=RingStorage(SIZE),
        batch_size=2,
        prefetch=1,
        sampler=SamplerWithoutReplacement(),
        transform=ObservationNorm(loc=torch.zeros(1), scale=torch.ones(1), in_keys=["a"]),
    ),
}


# What another kind has shown already is left out.
PARTS = {
    "prioritized": ("sampler",),
    "sequences": ("sampler",),
    "even": ("sampler", "transform", "prefetched"),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_takes_a_state_wholly_or_not_at_all(kind: str) -> None:
    one, other = BUFFERS[kind](), BUFFERS[kind]()
    for ours in (one, other):
        ours.extend(rows(ENVS, 20 if ours is one else 40))
        ours.sample()
    check_mutants(
        other,
        one.state_dict(),
        lambda ours: (ours.sample(), ours.extend(rows(ENVS)), ours.sample()),
        PARTS.get(kind, ()),
    )


@pytest.mark.parametrize("tree", [SumSegmentTree, MaxSegmentTree])
def test_a_tree_takes_a_state_wholly_or_not_at_all(tree: type) -> None:
    one, other = tree(5), tree(5)
    one[[1, 3]] = [2.0, 1.0]
    other[0] = 4.0
    check_mutants(other, one.state_dict(), lambda ours: ours.summary())


def test_a_generator_of_a_missing_device_changes_nothing() -> None:
    one, other = uneven(), uneven()
    state = one.state_dict()
    state["generator"]["device"] = "cuda:93"
    one.extend(rows(ENVS, 30))
    before = other.storage.get(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="cuda:93"):
        other.load_state_dict(state)
    assert (other.storage.get(torch.tensor([0, 1])) == before).all()


def test_a_state_that_lacks_a_transform_changes_nothing() -> None:
    one, other = uneven(), uneven(transform=ObservationNorm(loc=torch.zeros(1), scale=torch.ones(1), in_keys=["a"]))
    one.extend(rows(ENVS, 30))
    with pytest.raises(ValueError, match=r"transform.*loc"):
        other.load_state_dict(one.state_dict())
    assert len(other) == 3
