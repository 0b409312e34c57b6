"""EnvPool's environments: what is collected from them, how they are seeded, and what they refuse."""

from __future__ import annotations

import re

import gymnasium
import numpy as np
import pytest
import torch

from kit.extras import need_extra

need_extra("envpool")

from torchrl_lightning.collectors import GymnasiumCollector, play_episodes  # noqa: E402
from torchrl_lightning.datamodules import OnPolicyDataModule  # noqa: E402
from torchrl_lightning.environments import EnvironmentRecipe, make_vector_env  # noqa: E402
from torchrl_lightning.environments.backends.envpool_env import EnvPoolVectorEnv  # noqa: E402

POLES = EnvironmentRecipe("CartPole-v1", time_limit=15, vectorization="envpool")


def rollouts(seed: int, count: int = 2):
    collector = GymnasiumCollector(POLES, num_envs=6, frames_per_batch=240, seed=seed)
    batches = [collector.rollout() for _ in range(count)]
    collector.shutdown()
    return torch.cat(batches, 1)


def test_rows_are_steps_of_cart_pole() -> None:
    rows = rollouts(0)
    assert rows["next", "truncated"].any()
    assert rows["next", "terminated"].any()
    pole = gymnasium.make("CartPole-v1").unwrapped
    pole.reset()
    for row in rows.flatten():
        pole.steps_beyond_terminated = None
        pole.state = row["observation"].double().numpy()
        after, _, terminated, _, _ = pole.step(int(row["action"]))
        np.testing.assert_allclose(row["next", "observation"], after, atol=1e-5)
        assert bool(row["next", "terminated"]) == (terminated and not row["next", "truncated"])  # as EnvPool has it
    done = rows["next", "done"][:, :-1, 0]
    starts, successors = rows["observation"][:, 1:], rows["next", "observation"][:, :-1]
    assert (starts[~done] == successors[~done]).all()
    assert (starts[done].abs() <= 0.05).all()


def test_seed_of_a_run_is_that_of_its_environments() -> None:
    first, same, other = rollouts(3, 1), rollouts(3, 1), rollouts(4, 1)
    assert (first["observation"] == same["observation"]).all()
    assert (first["observation"][:, 0] != other["observation"][:, 0]).all()
    assert len(first["observation"][:, 0].unique(dim=0)) == 6
    env = make_vector_env(POLES, 3)
    starts = [env.reset(seed=seed)[0] for seed in ([1, 2, 3], None, [1, 2, 3])]
    env.close()
    np.testing.assert_array_equal(starts[0], starts[2])
    assert (starts[0] != starts[1]).all()


def test_partial_reset_changes_only_its_copies() -> None:
    env = make_vector_env(POLES, 3)
    env.reset(seed=[1, 2, 3])
    before = env.step(np.array([0, 1, 0]))[0]
    after, _ = env.reset(options={"reset_mask": np.array([False, True, False])})
    assert (before != after).any(1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"seed must be None .* got 0"):
        env.reset(seed=0, options={"reset_mask": np.array([False, True, False])})
    env.close()


def test_evaluation_plays_gymnasiums_where_there_is_one() -> None:
    data = OnPolicyDataModule(POLES, num_envs=4, frames_per_batch=16, total_frames=16)
    data.setup("fit")
    data.close()
    assert isinstance(make_vector_env(POLES), EnvPoolVectorEnv)
    assert not isinstance(make_vector_env(POLES, vectorization="sync"), EnvPoolVectorEnv)
    recipe = EnvironmentRecipe("Catch-v0", vectorization="envpool")
    env = make_vector_env(recipe, 2, vectorization="sync")
    assert isinstance(env, EnvPoolVectorEnv)

    def still(step):
        return step.set("action", torch.ones(step.batch_size, dtype=torch.int64))

    assert play_episodes(recipe, still, 4, seed=0)["episode_length"].tolist() == [9] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "CartPoll-v1"}, "does not know .*'CartPoll-v1'; did you mean CartPole-v1[?]"),
        ({"flatten": True, "wrappers": [gymnasium.wrappers.TimeAwareObservation]}, "wrappers, flatten"),
        ({"env_kwargs": {"seed": 3}}, "seed=3.*seeds come from the run"),
        ({"env_kwargs": {"gravity": 3}}, "does not accept env_kwargs=.*gravity"),
        ({"id": lambda: gymnasium.make("CartPole-v1")}, "needs an EnvPool id"),
    ],
)
def test_unsupported_envpool_settings_are_rejected_before_it_is_built(settings, message) -> None:
    recipe = EnvironmentRecipe(**{"id": "CartPole-v1", "vectorization": "envpool", **settings})
    for make in (make_vector_env, lambda env: GymnasiumCollector(env, frames_per_batch=4)):
        with pytest.raises(ValueError, match=message) as raised:
            make(recipe)
        assert not re.search("\n", str(raised.value))
