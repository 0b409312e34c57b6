from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lightning.datamodules._run.episode_statistics import FinishedEpisodes


def brute_force(rollouts):
    """Compute (return, length) of the finished episodes of each rollout in a plain loop."""
    num_envs = rollouts[0][0].shape[1]
    returns, lengths = [0.0] * num_envs, [0] * num_envs
    finished = []
    for reward, done in rollouts:
        ended = []
        for env in range(num_envs):
            for t in range(len(reward)):
                returns[env] += float(reward[t, env])
                lengths[env] += 1
                if done[t, env]:
                    ended.append((returns[env], lengths[env]))
                    returns[env], lengths[env] = 0.0, 0
        finished.append(ended)
    return finished


@settings(deadline=None)
@given(st.data())
def test_means_equal_brute_force(data):
    num_envs = data.draw(st.integers(1, 4))
    rollouts = []
    for _ in range(data.draw(st.integers(1, 4))):
        steps = data.draw(st.integers(1, 6))
        cells = steps * num_envs
        reward = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=cells, max_size=cells)))
        done = torch.tensor(data.draw(st.lists(st.booleans(), min_size=cells, max_size=cells)))
        rollouts.append((reward.float().view(steps, num_envs), done.view(steps, num_envs)))
    episodes = FinishedEpisodes(num_envs)
    for (reward, done), expected in zip(rollouts, brute_force(rollouts), strict=True):
        episodes.add(reward.t().unsqueeze(-1), done.t().unsqueeze(-1))
        found = episodes.summary()
        assert found.get("train/episodes", 0) == len(expected)
        if expected:
            returns, lengths = zip(*expected, strict=True)
            assert found["train/return"] == pytest.approx(sum(returns) / len(returns))
            assert found["train/length"] == pytest.approx(sum(lengths) / len(lengths))
