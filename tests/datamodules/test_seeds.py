"""Every seed of a run is spawned from the run's seed, so ranks and neighbouring runs do not share seeds."""

from __future__ import annotations

from kit.actor_critic import fit, rollouts
from kit.counting import SeedKeepingEnv
from kit.ranks import of_rank
from torchrl_lightning import GymnasiumCollector


def test_runs_ranks_and_evaluations_share_no_environment_seed(tmp_path) -> None:
    SeedKeepingEnv.kept.clear()
    runs, ranks = 7, 2
    sizes = {"frames_per_batch": 8, "mini_batch_size": 8, "num_epochs": 1, "reset_at_each_batch": True}
    for seed in range(runs):
        for rank in range(ranks):
            data = rollouts(env=SeedKeepingEnv, seed=seed, **sizes)
            fit(tmp_path, data, limit_val_batches=1, strategy=of_rank(rank, ranks))
    assert len(SeedKeepingEnv.kept) == runs * ranks * 2 * (4 + 2)
    assert len(set(SeedKeepingEnv.kept)) == len(SeedKeepingEnv.kept)


def test_buffers_and_collectors_of_neighbouring_runs_draw_differently(tmp_path) -> None:
    seeds = []

    def collector(policy, seed):
        seeds.append(seed)
        return GymnasiumCollector("CartPole-v1", policy, num_envs=4, frames_per_batch=64, seed=seed)

    for seed in range(5):
        data = rollouts(seed=seed, collector=collector)
        fit(tmp_path, data, max_epochs=1)
        seeds.append(data.buffer.generator.initial_seed())
    assert len(set(seeds)) == len(seeds) == 10
