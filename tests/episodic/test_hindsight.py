"""Hindsight equals ALF's recorded batches and a brute-force twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kit.golden import arrays
from kit.rings import ring
from kit.statistics import chi_square
from torchrl_lightning import (
    ExperienceBuffer,
    HindsightRelabel,
    RingStorage,
    RingWriter,
    SequenceSampler,
)

FIRST, LAST = 0, 2


class GivenDraws(HindsightRelabel):
    """HindsightRelabel with injected random numbers."""

    def inject(self, *draws):
        self.draws = [torch.as_tensor(values, dtype=torch.float64) for values in draws]
        return self

    def draw(self, count):
        drawn = self.draws.pop(0)
        assert len(drawn) == count
        return drawn


@pytest.fixture(scope="module")
def golden():
    data = arrays("alf_frame_stack_and_her", "her_")
    data["straddles"] = data["step_type"][data["positions"], data["env_ids"]] == LAST
    relabelled = data["u_select"] < float(data["proportion"])
    data["relabelled"] = relabelled & ~data["straddles"]
    data["u_future"] = data["u_future"][~data["straddles"][relabelled]]  # ALF also relabels pairs that cross episodes
    data["achieved"] = np.arange(len(data["step_type"]))[:, None] / 10 + 100.0 * np.arange(2)
    return data


def test_windows_of_two_time_steps_equal_golden_draws(golden):
    step_types = torch.from_numpy(golden["step_type"])
    length = int(golden["config_E_L_n_B"][1])
    relabel = GivenDraws(her_proportion=float(golden["proportion"]), reward_key="reward")
    storage = RingStorage(2 * length)
    buffer = ExperienceBuffer(storage=storage, writer=RingWriter(2, done_key="last"), transform=relabel)
    for step, achieved in zip(step_types, golden["achieved"], strict=True):
        flags = {"last": (step == LAST).unsqueeze(-1), "is_init": (step == FIRST).unsqueeze(-1)}
        goals = {"achieved_goal": torch.tensor(achieved).float().unsqueeze(-1), "desired_goal": torch.zeros(2, 1)}
        buffer.extend(TensorDict({**flags, **goals, "reward": torch.full((2, 1), -1.0)}, [2]))
    env, position = torch.from_numpy(golden["env_ids"]), torch.from_numpy(golden["positions"])
    cells = buffer.writer.cell(env.unsqueeze(1), position.unsqueeze(1) + torch.arange(2))
    batch = storage.get(cells).set("index", cells)
    relabel.inject(golden["u_select"], golden["u_future"])(batch)
    expected = np.where(golden["relabelled"][:, None], golden["goal"], 0.0)
    np.testing.assert_allclose(batch["desired_goal"].squeeze(-1).numpy(), expected, rtol=1e-6)
    kept = ~golden["straddles"]
    np.testing.assert_array_equal(batch["reward"].squeeze(-1).numpy()[kept], golden["reward"][kept])
    assert (batch["reward"].squeeze(-1).numpy()[~kept] == -1).all()


def test_single_steps_equal_golden_draws(golden):
    step_types, achieved = golden["step_type"], golden["achieved"]
    relabel = GivenDraws(her_proportion=float(golden["proportion"]))
    storage = RingStorage(2 * 31)
    buffer = ExperienceBuffer(storage=storage, num_envs=2, transform=relabel)
    cell_of = {}
    for t in range(len(step_types) - 1):
        env = np.flatnonzero(step_types[t] != LAST)
        achieved_goal, next_achieved_goal = (torch.tensor(achieved[s, env]).float().unsqueeze(-1) for s in (t, t + 1))
        done = torch.tensor(step_types[t + 1, env] == LAST).unsqueeze(-1)
        next_data = {"achieved_goal": next_achieved_goal, "reward": torch.full((len(env), 1), -1.0), "done": done}
        if len(env):
            step = TensorDict(
                {"achieved_goal": achieved_goal, "desired_goal": torch.zeros(len(env), 1), "next": next_data},
                [len(env)],
            )
            cells = buffer.extend(step, env_ids=torch.from_numpy(env))
            cell_of.update({(int(e), t): int(c) for e, c in zip(env, cells, strict=True)})
    is_one_episode = ~golden["straddles"]
    pairs = zip(golden["env_ids"][is_one_episode], golden["positions"][is_one_episode], strict=True)
    index = torch.tensor([cell_of[int(e), int(p)] for e, p in pairs])
    batch = storage.get(index).set("index", index)
    relabel.inject(golden["u_select"][is_one_episode], golden["u_future"])(batch)
    goals = np.where(golden["relabelled"], golden["goal"][:, 0], 0.0)[is_one_episode]
    np.testing.assert_allclose(batch["desired_goal"].squeeze(-1).numpy(), goals, rtol=1e-6)
    np.testing.assert_array_equal(batch["next", "reward"].squeeze(-1).numpy(), golden["reward"][is_one_episode, 1])


def walk(lengths: list[int], goal: float = -5.0) -> TensorDict:
    """Return episodes in which step ``i``, counted over all episodes, starts at place ``i``."""
    position = torch.arange(float(sum(lengths))).unsqueeze(-1)
    done = torch.zeros_like(position, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    goals = torch.full_like(position, goal)
    next_data = {
        "achieved_goal": position + 1,
        "desired_goal": goals,
        "reward": -torch.ones_like(position),
        "done": done,
    }
    next_data |= {"terminated": torch.zeros_like(done), "truncated": done}
    return TensorDict({"achieved_goal": position, "desired_goal": goals, "next": next_data}, [len(position)])


def relabelling(length: int, lengths: list[int], batch_size: int, sampler=None, **options) -> ExperienceBuffer:
    transform = HindsightRelabel(**{"her_proportion": 1.0, **options})
    return ring(length, sampler=sampler, transform=transform, batch_size=batch_size, data=walk(lengths))


def test_future_goals_are_uniform_over_the_remaining_episode():
    buffer = relabelling(32, [3, 8, 5], 40_000)
    batch = buffer.sample()
    step = batch["index"]
    goal = batch["desired_goal"].squeeze(-1).long() - 1
    for first, end in ((0, 3), (3, 11), (11, 16)):
        for begin in range(first, end):
            likely = dict.fromkeys(range(begin, end), 1.0)
            assert chi_square(goal[step == begin], likely) < len(likely) + 5 * (2 * len(likely)) ** 0.5


def test_episode_goals_are_uniform_and_final_goals_are_the_last():
    buffer = relabelling(32, [3, 8, 5], 40_000, strategy="episode")
    batch = buffer.sample()
    step, goal = batch["index"], batch["desired_goal"].squeeze(-1).long() - 1
    for first, end in ((0, 3), (3, 11), (11, 16)):
        for begin in range(first, end):
            likely = dict.fromkeys(range(first, end), 1.0)
            assert chi_square(goal[step == begin], likely) < len(likely) + 5 * (2 * len(likely)) ** 0.5
    batch = relabelling(32, [3, 8, 5], 100, strategy="final").sample()
    last = torch.tensor([2, 10, 15])
    ends = last[torch.bucketize(batch["index"], last)]
    assert torch.equal(batch["desired_goal"].squeeze(-1).long() - 1, ends)
    reached = batch["next", "achieved_goal"] == batch["desired_goal"]
    assert torch.equal(batch["next", "reward"], reached.float() - 1)


@pytest.mark.parametrize("strategy", ["future", "episode", "final"])
@pytest.mark.parametrize("sampler", [None, SequenceSampler(3)])
def test_goals_of_each_strategy_equal_brute_force(strategy, sampler):
    lengths = [3, 8, 5]
    transform = GivenDraws(1.0, strategy=strategy)
    buffer = ring(32, 1, sampler, transform=transform, batch_size=200, data=walk(lengths))
    numbers = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # the transform validates the first batch
        transform.inject(torch.zeros(200), numbers)
        batch = buffer.sample()
    bounds = [(0, 3), (3, 11), (11, 16)]
    for row, cells in enumerate(batch["index"].view(200, -1).tolist()):
        (first, end), draw = next(pair for pair in bounds if pair[0] <= cells[0] < pair[1]), float(numbers[row])
        choices = {"future": range(cells[-1], end), "episode": range(first, end), "final": [end - 1]}[strategy]
        goal = choices[int(draw * len(choices))] + 1
        assert (batch["desired_goal"][row] == goal).all()


def test_her_proportion_sets_the_fraction_of_relabelled_samples():
    buffer = relabelling(32, [3, 8, 5], 10_000, her_proportion=0.25)
    batch = buffer.sample()
    relabelled = batch["desired_goal"].squeeze(-1) != -5
    assert abs(int(relabelled.sum()) - 2500) < 5 * (10_000 * 0.25 * 0.75) ** 0.5
    assert (batch["next", "reward"].squeeze(-1)[~relabelled] == -1).all()
    reached = batch["next", "achieved_goal"] == batch["desired_goal"]
    assert torch.equal(batch["next", "reward"][relabelled], reached[relabelled].float() - 1)
    assert torch.equal(batch["next", "desired_goal"], batch["desired_goal"])


@pytest.mark.parametrize("strategy", ["future", "episode", "final"])
@pytest.mark.parametrize("sampler", [None, SequenceSampler(3)])
@pytest.mark.parametrize("n_steps", [1, 2])
def test_skip_reached_excludes_goals_already_reached(strategy, sampler, n_steps):
    data = walk([12])
    moved = torch.tensor([0.0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3]).unsqueeze(-1)  # rests, moves, rests, moves, rests
    data["achieved_goal"], data["next", "achieved_goal"] = moved[:-1], moved[1:]
    numbers = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    goals = {}
    for skips in (False, True):
        transform = GivenDraws(1.0, strategy=strategy, skip_reached=skips)
        steps = {"n_steps": n_steps, "gamma": 0.9}
        made = ring(32, 1, sampler, transform=transform, batch_size=300, data=data, seed=0, **steps)
        transform.inject(torch.zeros(300), numbers)
        batch = made.sample()
        goals[skips] = batch["desired_goal"].view(300, -1)[:, 0]
    shown = batch["achieved_goal"].view(300, -1)[:, 0]
    reached = goals[False] == shown
    assert 0 < reached.sum() < 300
    assert torch.equal(goals[True], torch.where(reached, -5.0, goals[False]))
    rewards = batch["next", "reward"].view(300, -1)[:, 0]
    assert (rewards[reached] <= -1).all()
    assert (rewards[~reached] > -2).all()


def test_stored_steps_never_change():
    buffer = relabelling(32, [3, 8, 5], 100, compute_terminated=lambda achieved, desired, _: achieved == desired)
    buffer.sample()
    assert (buffer.storage.get(torch.arange(16)) == walk([3, 8, 5])).all()


@pytest.mark.parametrize("ends", ["across", "inside", "pad"])
def test_window_has_one_goal_unless_it_crosses_an_episode_end(ends):
    sampler = SequenceSampler(4, episode_ends=ends)
    batch = relabelling(32, [3, 8, 5], 500, sampler).sample()
    goal, step = batch["desired_goal"].squeeze(-1), batch["index"]
    episode = torch.bucketize(step, torch.tensor([2, 10, 15]))
    whole = (episode == episode[:, :1]).all(1)
    assert whole.any()
    assert whole.all() == (ends != "across")
    assert (goal[~whole] == -5).all()
    assert (goal[whole] == goal[whole][:, :1]).all()
    assert (goal[whole, 0] > step[whole, -1]).all()
    reached = batch["next", "achieved_goal"] == batch["desired_goal"]
    assert torch.equal(batch["next", "reward"][whole], reached[whole].float() - 1)


@pytest.mark.parametrize("strategy", ["future", "episode", "final"])
def test_partial_episodes_count_as_far_as_they_are_stored(strategy):
    buffer = relabelling(8, [6], 1000, strategy=strategy)
    buffer.extend(walk([6, 6])[6:10])  # overwrites two steps of the first episode; the second has four steps so far
    batch = buffer.sample()
    place, goal = batch["achieved_goal"].squeeze(-1), batch["desired_goal"].squeeze(-1)
    assert set(place.tolist()) == set(range(2, 10))
    assert set(goal[place < 6].tolist()) == ({6.0} if strategy == "final" else {3.0, 4.0, 5.0, 6.0})
    assert set(goal[place >= 6].tolist()) == ({10.0} if strategy == "final" else {7.0, 8.0, 9.0, 10.0})


@pytest.mark.parametrize("strategy", ["future", "episode", "final"])
@pytest.mark.parametrize("ends_at_goal", [False, True])
@pytest.mark.parametrize("sampler", [None, SequenceSampler(3)])
def test_n_step_returns_equal_brute_force(strategy, ends_at_goal, sampler):
    def reward(achieved, desired, info):
        return (achieved - desired).abs() * 0.1

    def terminated(achieved, desired, info):
        return achieved == desired

    lengths, n_steps, gamma = [3, 8, 5], 4, 0.9
    data = walk(lengths)
    data["next", "reward"] = reward(data["next", "achieved_goal"], data["desired_goal"], {})
    data["next", "terminated"][10] = not ends_at_goal  # a stored termination that does not depend on goals
    functions = {"compute_reward": reward, "compute_terminated": terminated if ends_at_goal else None}
    transform = HindsightRelabel(0.7, strategy=strategy, **functions)
    steps = {"n_steps": n_steps, "gamma": gamma}
    buffer = ring(32, 1, sampler, transform=transform, batch_size=60, data=data, **steps)
    for _ in range(2):
        batch = buffer.sample().flatten()
        end = torch.tensor([3, 11, 16])[torch.bucketize(batch["index"], torch.tensor([2, 10, 15]))]
        relabelled = batch["desired_goal"].squeeze(-1) != -5
        assert 0.4 < relabelled.float().mean() < 0.95
        for row, cell in enumerate(batch["index"].tolist()):
            goal = float(batch["desired_goal"][row])
            total, discount, count, over = 0.0, 1.0, 0, False
            while count < n_steps and cell + count < int(end[row]) and not over:
                place = cell + count + 1
                total += discount * abs(place - goal) * 0.1
                over = place == goal if ends_at_goal else place == 11
                discount, count = discount * gamma, count + 1
            found = batch[row]
            assert float(found["next", "reward"]) == pytest.approx(total, abs=1e-5)
            assert int(found["steps_to_next_obs"]) == count
            assert float(found["gamma"]) == pytest.approx(discount)
            assert float(found["next", "achieved_goal"]) == cell + count
            assert float(found["achieved_goal"]) == cell
            assert float(found["next", "desired_goal"]) == goal
            assert bool(found["next", "terminated"]) == over
            assert bool(found["next", "done"]) == (over or cell + count == int(end[row]))
    assert (buffer.storage.get(torch.arange(16)) == data).all()


def test_flags_stay_or_are_recomputed():
    plain = relabelling(32, [3, 8, 5], 300).sample()
    assert torch.equal(plain["next", "done"].squeeze(-1), torch.isin(plain["index"], torch.tensor([2, 10, 15])))
    batch = relabelling(32, [3, 8, 5], 300, compute_terminated=lambda a, d, _: (a == d).numpy()).sample()
    reached = batch["next", "achieved_goal"] == batch["desired_goal"]
    assert reached.any()
    assert not reached.all()
    assert torch.equal(batch["next", "terminated"], reached)
    assert torch.equal(batch["next", "done"], reached)


def test_goal_function_converts_complete_observations():
    def reward(achieved, desired, info):
        assert info == {}
        assert achieved.shape == desired.shape == (50, 1)
        return (achieved > desired).numpy().astype(np.float32).squeeze(-1)

    options = {"achieved_goal_key": "state", "goal": lambda state: state[..., 1:], "compute_reward": reward}
    buffer = ring(16, transform=HindsightRelabel(1.0, **options), batch_size=50)
    data = walk([6]).exclude("achieved_goal", ("next", "achieved_goal"))
    data["state"], data["next", "state"] = torch.rand(6, 2), torch.rand(6, 2)
    data["next", "reward"] = torch.ones(6, 1)  # all are above their goal
    buffer.extend(data)
    batch = buffer.sample()
    assert torch.isin(batch["desired_goal"], data["next", "state"][:, 1:]).all()
    higher = batch["next", "state"][:, 1:] > batch["desired_goal"]
    assert torch.equal(batch["next", "reward"], higher.float())


def test_data_that_cannot_be_relabelled_is_rejected():
    transform = HindsightRelabel(1.0)
    with pytest.raises(ValueError, match="ExperienceBuffer"):
        transform(walk([4]).set("index", torch.arange(4)))
    buffer = ring(32, transform=transform, batch_size=4)
    with pytest.raises(ValueError, match="episode index"):
        transform(walk([4]).set("index", torch.arange(4)))
    buffer.extend(walk([4]))
    with pytest.raises(KeyError, match="the cells that a batch was read from"):
        transform(walk([4]))
    with pytest.raises(KeyError, match="desired_goal"):
        transform(walk([4]).exclude("desired_goal").set("index", torch.arange(4)))
    three = HindsightRelabel(1.0, compute_reward=lambda achieved, desired, info: torch.zeros(3))
    ring(32, transform=three).extend(walk([4]))
    with pytest.raises(ValueError, match=r"\[4, 1\], got \[3\]"):
        three(walk([4]).set("index", torch.arange(4)))


def test_n_step_rewards_without_single_steps_are_rejected():
    folded = walk([4]).set("steps_to_next_obs", torch.ones(4, dtype=torch.long)).set("gamma", torch.full((4,), 0.99))
    buffer = ring(32, transform=HindsightRelabel(1.0), batch_size=4, data=folded)
    with pytest.raises(ValueError, match=r"single steps.*n_steps=1"):
        buffer.sample()
    other = walk([4])
    other["next", "other"] = other["next", "reward"]
    transform = HindsightRelabel(1.0, reward_key=("next", "other"))
    buffer = ring(32, transform=transform, batch_size=4, n_steps=2, data=other)
    with pytest.raises(ValueError, match="n_steps="):
        buffer.sample()
