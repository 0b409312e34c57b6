"""What a collector that the user hands over is asked for, and what is refused."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from kit.counting import RandomEnv, still_policy
from torchrl_lightning import ExperienceDataModule, GymnasiumCollector


def of_rank(rank: int, world_size: int, **settings) -> ExperienceDataModule:
    data = ExperienceDataModule(RandomEnv, num_envs=2, frames_per_batch=4, **{"seed": 0, **settings})
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, precision="32-true")
    data.setup("fit")
    return data


def seeded(policy, seed):
    return GymnasiumCollector(RandomEnv, policy, num_envs=2, frames_per_batch=4, seed=seed)


def seeded_by_keyword(frames, policy, *, seed=None):
    return GymnasiumCollector(RandomEnv, policy, num_envs=2, frames_per_batch=frames, seed=seed)


def seedless(policy):
    return GymnasiumCollector(RandomEnv, policy, num_envs=2, frames_per_batch=4, seed=5)


CLASS = partial(GymnasiumCollector, RandomEnv, num_envs=2, frames_per_batch=4)


@pytest.mark.parametrize("collector", [None, seeded, partial(seeded_by_keyword, 4), CLASS, partial(CLASS, seed=None)])
def test_every_rank_collects_data_of_its_own(collector) -> None:
    rollouts = []
    for rank in range(2):
        data = of_rank(rank, 2, collector=collector)
        rollouts.append(data._collect(still_policy())["observation"])
        data.close()
    assert not (rollouts[0] == rollouts[1]).any()


@pytest.mark.parametrize(("collector", "message"), [(seedless, "takes no `seed`"), (partial(CLASS, seed=3), "seed=3")])
def test_the_same_data_on_all_ranks_is_refused(collector, message) -> None:
    with pytest.raises(ValueError, match=f"{message}.*all 2 ranks would collect the same data"):
        of_rank(0, 2, collector=collector)
    data = of_rank(0, 1, collector=collector)
    data._collect(still_policy())
    assert data.collector.seed in (3, 5)
    data.close()


def test_resets_at_each_batch_reach_the_collector() -> None:
    data = of_rank(0, 1, collector=CLASS, reset_at_each_batch=True)
    for _ in range(3):
        assert data._collect(still_policy())["is_init"][:, 0].all()
    data.close()


def test_resets_that_the_collector_would_not_do_are_refused() -> None:
    with pytest.raises(ValueError, match="takes no `reset_at_each_batch`"):
        of_rank(0, 1, collector=seeded, reset_at_each_batch=True)
    with pytest.raises(ValueError, match="has reset_at_each_batch=True, but the DataModule False"):
        of_rank(0, 1, collector=partial(CLASS, reset_at_each_batch=True))
