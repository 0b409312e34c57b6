"""No two environments of neighbouring runs, ranks or workers start alike, in training or evaluation."""

from __future__ import annotations

from collections import Counter

import pytest

from kit.counting import CountingEnv, SeedKeepingEnv, still_policy
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector, play_episodes
from torchrl_lightning.environments.seeds import spawn_seed, spawn_seeds


@pytest.fixture
def kept() -> list[int]:
    SeedKeepingEnv.kept.clear()
    return SeedKeepingEnv.kept


def assert_distinct(seeds: list[int], count: int) -> None:
    assert len(seeds) == count
    assert [seed for seed, times in Counter(seeds).items() if times > 1] == []


def test_neighbouring_runs_share_no_environment_seed(kept) -> None:
    for seed in range(21):
        GymnasiumCollector(SeedKeepingEnv, num_envs=8, frames_per_batch=8, seed=seed).rollout()
        play_episodes(SeedKeepingEnv, still_policy(), 8, seed=seed)
    assert_distinct(kept, 21 * 16)


def test_resets_at_each_batch_share_no_environment_seed(kept) -> None:
    for seed in range(5):
        collector = GymnasiumCollector(
            SeedKeepingEnv, num_envs=4, frames_per_batch=4, seed=seed, reset_at_each_batch=True
        )
        for _ in range(4):
            collector.rollout()
    assert_distinct(kept, 5 * 16)


def test_workers_of_neighbouring_runs_share_no_environment_seed() -> None:
    # A run tells the seed of its last environment, which the same worker and environment of a larger run has.
    seeds = [
        AsynchronousCollector(CountingEnv, num_workers=workers, num_envs=envs, frames_per_batch=2).set_seed(seed)
        for seed in range(21)
        for workers in range(1, 5)
        for envs in (1, 2)
    ]
    assert_distinct(seeds, 21 * 8)


def test_seeds_of_different_paths_differ() -> None:
    paths = [("a",), ("b",), ("a", 0), ("a", 1), ("a", 0, 1), ("a", 1, 0), ("a", "b")]
    assert len({spawn_seed(seed, *path) for seed in range(3) for path in paths}) == 3 * len(paths)
    assert spawn_seeds(3, "a", count=5)[:2] == spawn_seeds(3, "a", count=2)
    assert spawn_seed(2**40, "a") < 2**31
    with pytest.raises(ValueError, match="-1"):
        spawn_seed(-1, "a")
