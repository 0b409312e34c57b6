"""The interface of a user's collector, and the errors if the collector does not follow it."""

from __future__ import annotations

from functools import partial

import pytest
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

from kit.actor_critic import fit, rollouts
from kit.counting import RandomEnv
from kit.ranks import of_rank
from torchrl_lightning import GymnasiumCollector

SIZES = {"num_envs": 2, "frames_per_batch": 4}
CLASS = partial(GymnasiumCollector, RandomEnv, **SIZES)


def seeded(policy, seed):
    return CLASS(policy, seed=seed)


def seeded_by_keyword(frames, policy, *, seed=None):
    return GymnasiumCollector(RandomEnv, policy, num_envs=2, frames_per_batch=frames, seed=seed)


def seedless(policy):
    return CLASS(policy, seed=5)


def collected(folder, rank=0, ranks=1, epochs=1, **settings):
    """Return the last rollout ``[T, N]`` of one of several ranks."""
    data = rollouts(env=RandomEnv, mini_batch_size=4, num_epochs=1, **SIZES, **settings)
    fit(folder, data, max_epochs=epochs, strategy=of_rank(rank, ranks))
    return data.buffer.rollout


@pytest.mark.parametrize("collector", [None, seeded, partial(seeded_by_keyword, 4), CLASS, partial(CLASS, seed=None)])
def test_ranks_collect_different_data(collector, tmp_path) -> None:
    first, second = (collected(tmp_path, rank, 2, collector=collector)["observation"] for rank in range(2))
    assert not (first == second).any()


@pytest.mark.parametrize(
    ("collector", "message"), [(seedless, "must have a parameter `seed`"), (partial(CLASS, seed=3), "seed=3")]
)
def test_same_data_on_all_ranks_is_refused(collector, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        collected(tmp_path, 0, 2, collector=collector)
    first, second = (collected(tmp_path, seed=seed, collector=collector)["observation"] for seed in range(2))
    assert first.equal(second)  # the seed of the collector counts


def test_remedy_for_a_collector_without_a_seed_collects_different_data_on_ranks(tmp_path) -> None:
    def collector(policy, seed):
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        options = {"frames_per_batch": 8, "total_frames": -1, "auto_register_policy_transforms": False}
        result = Collector(env, policy, **options)
        result.set_seed(seed)
        return result

    def first_rollout(rank):
        data = rollouts(num_envs=1, frames_per_batch=8, mini_batch_size=8, num_epochs=1, collector=collector)
        fit(tmp_path, data, max_epochs=1, strategy=of_rank(rank, 2))
        return data.buffer.rollout["observation"]

    assert not (first_rollout(0) == first_rollout(1)).any()


def test_resets_at_each_batch_reach_the_collector(tmp_path) -> None:
    assert collected(tmp_path, epochs=3, collector=CLASS, reset_at_each_batch=True)["is_init"][0].all()


def test_resets_that_the_collector_would_not_do_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="reset_at_each_batch must be False"):
        collected(tmp_path, collector=seeded, reset_at_each_batch=True)
    with pytest.raises(ValueError, match="reset_at_each_batch of collector= must be False"):
        collected(tmp_path, collector=partial(CLASS, reset_at_each_batch=True))
