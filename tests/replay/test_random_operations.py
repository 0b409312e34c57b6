"""Random writes, removals, cuts, loads, late priorities and late flags, compared with plain lists of the steps."""

from __future__ import annotations

import pytest

from kit.operations import run
from kit.replay_settings import EXTRAS, SAMPLERS, SEAMS, Settings

SEEDS = range(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_match_plain_lists(seed: int) -> None:
    run(seed, operations=15)


def test_seeds_cover_all_samplers_transforms_and_seams() -> None:
    drawn = [Settings.of(seed) for seed in SEEDS]
    assert {(one.sampler, one.extra) for one in drawn} == {(one, other) for one in SAMPLERS for other in EXTRAS}
    assert {one.seams for one in drawn} == set(SEAMS)
    assert {one.n_steps for one in drawn} == {1, 3}
