"""How much probability moves with a success: golden traces of both schedules, through the writer and alone."""

from __future__ import annotations

import pytest
import torch

from kit.demonstrations import rewarded
from kit.golden import tensors
from torchrl_lightning import DemonstrationAnnealing, DemonstrationSampler, DemonstrationStorage, DemonstrationWriter


# As published, reward demonstrations take no places of value demonstrations but one each; in PyTorchRL they share 51.
@pytest.mark.parametrize(
    ("schedule", "trace", "capacity"),
    [("linear", "trace_rho_phi_nR_nV", 111), ("current", "trace_pytorchrl_ref", 51)],
)
def test_golden_trace(schedule: str, trace: str, capacity: int) -> None:
    golden = tensors("ppod_annealing")
    places, expected, storage = int(golden["value_capacity"]), golden[trace], DemonstrationStorage(capacity)
    sampler = DemonstrationSampler(float(golden["rho0"]), float(golden["phi0"]))
    writer = DemonstrationWriter(storage, reward_threshold=1.0, annealing=schedule, value_capacity=places)
    writer.load([rewarded(is_human=True)])
    for number in range(places):
        assert writer.add(rewarded(0.0, value=float(number))) == "value"
    found = []
    for _ in expected:
        counts = len(storage.reward_demonstrations), len(storage.value_demonstrations)
        found.append((*sampler.probabilities(storage), *counts))
        writer.add(rewarded())
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-12)


def test_phi_lasts_for_all_of_the_value_capacity() -> None:
    # Divided by the number of those that are left, it would be gone after 32 of 50 successes.
    annealing = DemonstrationAnnealing(50)
    assert [annealing.moved(0.0, k, 50 - k) for k in (0, 32, 49, 50, 60)] == [0.0, 0.64, 0.98, 1.0, 1.0]
    assert [annealing.remaining_capacity(k) for k in (0, 32, 49, 50, 60)] == [50, 18, 1, 0, 0]
    assert DemonstrationAnnealing(0).moved(0.0, 1, 0) == 1.0  # nothing is divided by no places
    assert DemonstrationAnnealing(0, "current").moved(0.5, 1, 0) == 0.5


@pytest.mark.parametrize("schedule", ["linear", "current"])
def test_probability_sum_stays_constant_if_rho_starts_at_0(schedule: str) -> None:
    storage = DemonstrationStorage(5)
    sampler = DemonstrationSampler(0, 0.4)
    writer = DemonstrationWriter(storage, reward_threshold=1.0, annealing=schedule)
    for value in (1.0, 2.0):
        writer.add(rewarded(0.0, value=value))
    for _ in range(3):
        before = sampler.probabilities(storage)
        writer.add(rewarded())
        rho, phi = sampler.probabilities(storage)
        assert rho + phi == pytest.approx(0.4)
        assert rho > before[0] or before[0] == 0.4


def test_current_schedule_moves_all_of_phi_after_one_success_per_value_demonstration() -> None:
    """A sum of ten times 0.1 is below 1 as a floating-point number."""
    for number in range(1, 300):
        annealing, moved = DemonstrationAnnealing(number, "current"), 0.0
        for success in range(1, number + 1):
            assert moved < 1.0
            moved = annealing.moved(moved, success, number)
        assert moved == 1.0
