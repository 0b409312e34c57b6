from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mutations import check_mutants
from torchrl_lightning.datamodules.episodes import EpisodeTracker, FinishedEpisodes


def brute_force(rollouts):
    """Steps through every environment on its own; gives (return, length) of each finished episode by rollout."""
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
def test_tracker_equals_its_brute_force_twin(data):
    num_envs = data.draw(st.integers(1, 4))
    rollouts = []
    for _ in range(data.draw(st.integers(1, 4))):
        steps = data.draw(st.integers(1, 6))
        cells = steps * num_envs
        reward = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=cells, max_size=cells)))
        done = torch.tensor(data.draw(st.lists(st.booleans(), min_size=cells, max_size=cells)))
        rollouts.append((reward.float().view(steps, num_envs), done.view(steps, num_envs)))
    tracker = EpisodeTracker(num_envs)
    for (reward, done), expected in zip(rollouts, brute_force(rollouts), strict=True):
        returns, lengths = tracker.update(reward, done)
        assert list(zip(returns.tolist(), lengths.tolist(), strict=True)) == expected


def test_tracker_resumes_in_the_middle_of_an_episode():
    tracker, other = EpisodeTracker(2), EpisodeTracker(2)
    tracker.update(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool))
    other.load_state_dict(tracker.state_dict())
    done = torch.tensor([[True, False]])
    assert other.update(torch.ones(1, 2), done)[0].tolist() == tracker.update(torch.ones(1, 2), done)[0].tolist() == [4]


def test_a_state_is_taken_wholly_or_not_at_all() -> None:
    one, other = FinishedEpisodes(2), FinishedEpisodes(2)
    one.add(torch.ones(2, 3, 1), torch.zeros(2, 3, 1, dtype=torch.bool))
    check_mutants(other, one.state_dict(), lambda episodes: episodes.summary())
