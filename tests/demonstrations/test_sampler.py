"""Draws at the start of an episode: how often which demonstration, against exact probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.demonstrations import rewarded
from kit.golden import tensors
from kit.seeds import generator
from torchrl_lightning import DemonstrationSampler, DemonstrationStorage
from torchrl_lightning.demonstrations.sampler import value_probabilities


def filled(rewards: int = 2, values: tuple[float, ...] = (1.0, 2.0, 0.0, -3.0), annealed: float = 0.0) -> Any:
    storage = DemonstrationStorage(10)
    value = [rewarded(0.0, value=each, name=f"v{number}") for number, each in enumerate(values)]
    storage.replace([rewarded(name=f"r{number}") for number in range(rewards)], value, 0, annealed)
    return storage


def draws(sampler: DemonstrationSampler, storage: DemonstrationStorage, count: int) -> list[str]:
    found = (sampler.draw(storage) for _ in range(count))
    return ["env" if each is None else each.name for each in found]


@pytest.mark.parametrize("annealed", [0.0, 0.5, 1.0])
def test_draws_have_their_probabilities(annealed: float) -> None:
    storage, count = filled(annealed=annealed), 2000
    found = draws(DemonstrationSampler(0.2, 0.4, alpha=2, generator=generator()), storage, count)
    rho, phi = 0.2 + annealed * 0.4, 0.4 * (1 - annealed)
    expected = {"env": 0.4, "r0": rho / 2, "r1": rho / 2, "v0": phi / 5, "v1": phi * 4 / 5, "v2": 0.0, "v3": 0.0}
    assert set(found) == {name for name, chance in expected.items() if chance}
    chances = {name: chance for name, chance in expected.items() if chance}
    chi_square = sum((found.count(name) - count * chance) ** 2 / (count * chance) for name, chance in chances.items())
    # Of as many degrees of freedom as there are outcomes, less one: exceeded once in a thousand seeds.
    assert chi_square < {2: 13.8, 4: 18.5}[len(chances) - 1]


def test_golden_probabilities() -> None:
    golden = tensors("ppod_capacity_and_probs")
    for alpha in (10, 1):
        found = value_probabilities(golden["max_values"].tolist(), alpha)
        torch.testing.assert_close(found, golden[f"value_probs_alpha{alpha}"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("values", [[0.0, 0.0], [-1.0, -2.0], [float("-inf"), 0.0]])
def test_all_alike_where_none_is_positive(values: list[float]) -> None:
    # Powers of nothing but zeros add up to zero: no probabilities to divide by.
    assert value_probabilities(values, 10).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("alpha", [2, 10, 0.5, 3])
def test_a_negative_value_is_never_likelier_than_a_positive_one(alpha: float) -> None:
    # (-2) ** 10 is more than 1 ** 10, and (-2) ** 0.5 is no number.
    assert value_probabilities([-2.0, 1.0], alpha).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_no_power_overflows_or_vanishes(scale: float) -> None:
    assert value_probabilities([scale, 2 * scale], 10).tolist() == pytest.approx([1 / 1025, 1024 / 1025])


@pytest.mark.parametrize(
    ("storage", "kinds"), [(filled(0), "ev"), (filled(2, ()), "er"), (filled(0, ()), "e"), (filled(1, (0.0,)), "erv")]
)
def test_an_empty_source_means_the_environment(storage: Any, kinds: str) -> None:
    found = draws(DemonstrationSampler(0.4, 0.4, generator=generator(1)), storage, 60)
    assert {name[0] for name in found} == set(kinds)
    # What the source holds changes no other draw.
    same = draws(DemonstrationSampler(0.4, 0.4, generator=generator(1)), filled(), 60)
    assert all(one == "env" for one, other in zip(found, same, strict=True) if other == "env")


def test_all_of_the_probability_or_none_of_it() -> None:
    assert set(draws(DemonstrationSampler(1.0, 0.0, generator=generator()), filled(1), 50)) == {"r0"}
    assert set(draws(DemonstrationSampler(0.0, 1.0, generator=generator()), filled(1, (1.0,)), 50)) == {"v0"}
    assert set(draws(DemonstrationSampler(0.0, 0.0, generator=generator()), filled(), 50)) == {"env"}
    assert "env" not in draws(DemonstrationSampler(0.7, 0.3, generator=generator()), filled(), 200)


def test_a_seed_decides_the_draws() -> None:
    first, again, other = (
        draws(DemonstrationSampler(0.4, 0.4, generator=generator(s)), filled(), 50) for s in (1, 1, 2)
    )
    assert first == again != other
    torch.manual_seed(5)
    first = draws(DemonstrationSampler(0.4, 0.4), filled(), 50)
    torch.manual_seed(5)
    assert draws(DemonstrationSampler(0.4, 0.4), filled(), 50) == first
