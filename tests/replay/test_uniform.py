from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from kit.rings import HOUSES, UNEVEN, house, uneven
from kit.rows import numbered
from kit.seeds import generator
from kit.statistics import chi_square
from torchrl_lightning.replay.uniform import UniformSampler


def draw(buffer: Any, batches: int, size: int) -> Tensor:
    """Draw many batches from the sampler, then read all their cells in one call."""
    cells = [buffer.sampler.sample(buffer.storage, size)[0] for _ in range(batches)]
    return buffer.storage.get(torch.cat(cells))["number"]


@pytest.mark.parametrize("kind", HOUSES)
@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize("stratified", [True, False])
def test_uniform_over_stored_cells(kind: str, with_replacement: bool, stratified: bool) -> None:
    sampler = UniformSampler(with_replacement, stratified=stratified, generator=generator(1))
    buffer = house(kind, sampler, numbered(13))
    values = draw(buffer, 1000, 6)
    # Without replacement or with strata, the counts vary less than the statistic assumes.
    assert chi_square(values, dict.fromkeys(range(13), 1.0)) < 32.9  # 12 degrees of freedom, p = 0.001
    buffer.extend(numbered(15, start=13))
    drawn = torch.cat([buffer.sample(6)["number"] for _ in range(50)])
    assert set(drawn.tolist()) <= set(range(8, 28))


@pytest.mark.parametrize("with_replacement", [True, False])
def test_uniform_over_uneven_rings(with_replacement: bool) -> None:
    values = draw(uneven(UniformSampler(with_replacement)), 1500, 4)
    assert chi_square(values, dict.fromkeys(UNEVEN, 1.0)) < 29.6  # 10 degrees of freedom, p = 0.001


def test_stratified_draws_equally_from_environments() -> None:
    buffer = uneven(UniformSampler(stratified=True))
    values = draw(buffer, 1500, 4)
    expected = {value: 1.0 / {0: 5, 2: 2, 3: 4}[value // 100] for value in UNEVEN}
    assert chi_square(values, expected) < 29.6
    for _ in range(20):
        counts = torch.bincount(buffer.sample(7)["number"] // 100, minlength=4)
        assert counts[1] == 0
        assert sorted(counts[[0, 2, 3]].tolist()) == [2, 2, 3]


def test_stratified_spreads_over_the_steps() -> None:
    sampler = UniformSampler(stratified=True, generator=generator(3))
    buffer = house("torchrl", sampler, numbered(20))
    for _ in range(20):
        values = buffer.sample(10)["number"].sort().values
        gaps = (torch.cat([values, values[:1] + 20])).diff()
        assert gaps.min() >= 1
        assert gaps.max() <= 3


def test_stratified_without_replacement_draws_missing_steps_elsewhere() -> None:
    buffer = uneven(UniformSampler(False, stratified=True))
    for size in (3, 8, 11):
        values = buffer.sample(size)["number"].tolist()
        assert len(set(values)) == size
    assert sorted(values) == UNEVEN


@pytest.mark.parametrize("size", [1, 5, 11])
def test_draws_without_replacement_are_distinct(size: int) -> None:
    buffer = uneven(UniformSampler(False))
    for _ in range(50):
        assert len(set(buffer.sample(size)["number"].tolist())) == size


def test_order_without_replacement_is_random() -> None:
    buffer = house("torchrl", UniformSampler(False, generator=generator(5)), numbered(20))
    first = draw(buffer, 2000, 3).view(2000, 3)[:, 0]
    assert chi_square(first, dict.fromkeys(range(20), 1.0)) < 43.8  # 19 degrees of freedom, p = 0.001


def test_several_dimensions() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=UniformSampler(generator=generator()),
        batch_size=500,
        dim_extend=0,
    )
    buffer.extend(TensorDict({"number": torch.arange(6).view(2, 3)}, [2, 3]))
    assert set(buffer.sample()["number"].tolist()) == set(range(6))
