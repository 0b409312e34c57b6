"""Every seed of a run is spawned from the run's: ranks and neighbouring runs have nothing in common."""

from __future__ import annotations

from types import SimpleNamespace

from kit.counting import SeedKeepingEnv, still_policy
from torchrl_lightning import ExperienceDataModule


def test_runs_ranks_and_evaluations_share_no_environment_seed() -> None:
    SeedKeepingEnv.kept.clear()
    runs, ranks, policy = 21, 2, still_policy()
    for seed in range(runs):
        for rank in range(ranks):
            data = ExperienceDataModule(
                SeedKeepingEnv, num_envs=4, frames_per_batch=8, eval_episodes=2, reset_at_each_batch=True, seed=seed
            )
            data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks)
            for _ in range(2):
                data._collect(policy)
                data.evaluate(policy)
            data.close()
    assert len(SeedKeepingEnv.kept) == runs * ranks * 2 * (4 + 2)
    assert len(set(SeedKeepingEnv.kept)) == len(SeedKeepingEnv.kept)


def test_buffers_of_neighbouring_runs_draw_differently(make_data) -> None:
    seeds = set()
    for seed in range(5):
        data = make_data(seed=seed)
        data.setup("fit")
        seeds |= {data.buffer.generator.initial_seed(), data._spawn_seed("collector")}
    assert len(seeds) == 10
