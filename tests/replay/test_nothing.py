"""Empty requests return empty results and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.rings import ring
from kit.rows import numbered
from kit.states import differences
from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, RingWriter, SequenceSampler, UniformSampler


def prioritized(**settings: Any) -> PrioritizedSampler:
    return PrioritizedSampler(8, 1.0, 1.0, **settings)


@pytest.mark.parametrize("filled", [0, 5])
def test_empty_write_returns_no_cells(filled: int) -> None:
    for settings in ({}, {"sampler": prioritized()}, {"writer": RingWriter(1)}):
        ours = ring(8, filled=filled, **settings)
        before = ours.state_dict()
        for write in (ours.extend, ours.writer.extend):
            index = write(numbered(0))
            assert index.tolist() == []
            assert index.dtype == torch.int64
        assert not differences(ours.state_dict(), before)
        assert ours.storage.initialized == bool(filled)
    several = ring(4, 2)
    assert several.extend(TensorDict({"a": torch.zeros(2, 0)}, [2, 0]), time_dim=1).tolist() == []
    assert several.extend(numbered(0), env_ids=[]).tolist() == []


SAMPLERS = {
    "uniform": UniformSampler,
    "each once": lambda: UniformSampler(with_replacement=False),
    "stratified": lambda: UniformSampler(stratified=True),
    "prioritized": prioritized,
    "prioritized, weighed by all": lambda: prioritized(weight_norm="buffer"),
    "windows": lambda: SequenceSampler(2),
    "padded windows": lambda: SequenceSampler(2, episode_ends="pad"),
    "windows across episodes": lambda: SequenceSampler(2, episode_ends="across"),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_batch_size_zero_samples_empty_batches(make: Callable[[], Any]) -> None:
    ours = ring(8, sampler=make(), filled=5)
    nothing, batch = ours.sample(0), ours.sample(2)
    assert len(nothing) == 0
    assert set(batch.keys(True, True)) == set(nothing.keys(True, True))
    assert nothing.shape[1:] == batch.shape[1:]


def test_empty_priority_update_changes_nothing() -> None:
    ours: ExperienceBuffer = ring(8, sampler=prioritized(), filled=5)
    before = ours.sampler.table.priorities.clone()
    ours.update_priority([], torch.zeros(0))
    ours.update_priority([], 1.0)
    ours.sampler.mark_update([])
    ours.update_tensordict_priority(ours.sample(0).set("td_error", torch.zeros(0)))
    assert ours.write_back(ours.sample(2), []).tolist() == []
    assert torch.equal(ours.sampler.table.priorities, before)
