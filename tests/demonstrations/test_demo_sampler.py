"""Draws at the start of an episode: how often which demonstration, against exact probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kit.demonstrations import rewarded
from kit.golden import tensors
from kit.seeds import generator
from kit.statistics import chi_square
from torchrl_lightning import DemonstrationSampler, DemonstrationStorage
from torchrl_lightning.demonstrations.demo_sampler import value_probabilities


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
    found = draws(DemonstrationSampler(0.2, 0.4, alpha=2, generator=generator()), filled(annealed=annealed), 2000)
    rho, phi = 0.2 + annealed * 0.4, 0.4 * (1 - annealed)
    expected = {"env": 0.4, "r0": rho / 2, "r1": rho / 2, "v0": phi / 5, "v1": phi * 4 / 5, "v2": 0.0, "v3": 0.0}
    # Of two or four degrees of freedom: exceeded once in a thousand seeds.
    assert chi_square(found, expected) < (13.8 if annealed == 1 else 18.5)


@pytest.mark.parametrize(("share", "human"), [(0.0, 0.2), (0.1, 0.2), (0.5, 0.5), (1.0, 1.0)])
def test_human_share_of_draws_is_human(share: float, human: float) -> None:
    storage = DemonstrationStorage(10)
    storage.replace([replace(rewarded(name="h"), is_human=True), *(rewarded(name=f"r{n}") for n in range(4))], [])
    found = draws(DemonstrationSampler(0.5, 0.0, generator=generator(), human_share=share), storage, 2000)
    expected = {"env": 0.5, "h": human / 2} | {f"r{n}": (1 - human) / 8 for n in range(4)}
    assert chi_square(found, expected) < 20.5  # of five degrees of freedom: exceeded once in a thousand seeds


@pytest.mark.parametrize("human", [True, False])
def test_human_share_changes_nothing_if_all_demonstrations_are_of_one_kind(human: bool) -> None:
    storage = DemonstrationStorage(10)
    storage.replace([replace(rewarded(name=f"r{n}"), is_human=human) for n in range(3)], [])
    found = [draws(DemonstrationSampler(0.5, generator=generator(), human_share=s), storage, 60) for s in (0.0, 0.9)]
    assert found[0] == found[1]


def test_golden_probabilities() -> None:
    golden = tensors("ppod_capacity_and_probs")
    for alpha in (10, 1):
        found = value_probabilities(golden["max_values"].tolist(), alpha)
        torch.testing.assert_close(found, golden[f"value_probs_alpha{alpha}"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("alpha", "values", "expected"),
    [
        # Powers of nothing but zeros add up to zero: all alike where none is positive.
        *((10, values, [0.5, 0.5]) for values in ([0.0, 0.0], [-1.0, -2.0], [float("-inf"), 0.0])),
        # (-2) ** 10 is more than 1 ** 10, and (-2) ** 0.5 is no number: a negative one is never drawn beside others.
        *((alpha, [-2.0, 1.0], [0.0, 1.0]) for alpha in (2, 10, 0.5, 3)),
        # No power overflows or vanishes.
        *((10, [scale, 2 * scale], [1 / 1025, 1024 / 1025]) for scale in (1e300, 1e-300)),
    ],
)
def test_probabilities_of_values(alpha: float, values: list[float], expected: list[float]) -> None:
    assert value_probabilities(values, alpha).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("storage", "kinds"), [(filled(0), "ev"), (filled(2, ()), "er"), (filled(0, ()), "e"), (filled(1, (0.0,)), "erv")]
)
def test_empty_storage_replays_nothing(storage: Any, kinds: str) -> None:
    found = draws(DemonstrationSampler(0.4, 0.4, generator=generator(1)), storage, 60)
    assert {name[0] for name in found} == set(kinds)
    # What the source holds changes no other draw.
    same = draws(DemonstrationSampler(0.4, 0.4, generator=generator(1)), filled(), 60)
    assert all(one == "env" for one, other in zip(found, same, strict=True) if other == "env")


@pytest.mark.parametrize(("rho", "phi", "drawn"), [(1.0, 0.0, "r"), (0.0, 1.0, "v"), (0.0, 0.0, "e"), (0.7, 0.3, "rv")])
def test_probabilities_0_and_1(rho: float, phi: float, drawn: str) -> None:
    found = draws(DemonstrationSampler(rho, phi, generator=generator()), filled(), 200)
    assert {name[0] for name in found} == set(drawn)


def test_global_seed_is_used_without_a_generator() -> None:
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(draws(DemonstrationSampler(0.4, 0.4), filled(), 50))
    assert found[0] == found[1] != found[2]
