"""Demonstrations take the place of episodes: which steps a collector sees, and what it stores of them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from kit.demonstrations import check_golden, demo, golden_replay, names, stored
from kit.files import through_file
from kit.lines import Line, Scripted, actor_of, line_collector, line_demo
from torchrl_lightning import (
    Demonstration,
    DemonstrationMiner,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    DemonstrationWriter,
    EnvironmentRecipe,
    GymnasiumCollector,
    PPODBuffer,
)
from torchrl_lightning.collectors import make_vector_env
from torchrl_lightning.demonstrations import record_demonstrations
from torchrl_lightning.demonstrations.recording import demonstration_specs
from torchrl_lightning.learn import RecurrentNetwork


def test_golden_sequence() -> None:
    golden, demonstration = golden_replay()
    replay = DemonstrationReplay(stored(demonstration), Scripted(None, 0), 1)
    row = line_collector(replay).rollout()[0]
    check_golden(row, golden)
    # The first observation of the run begins an episode too, which theirs did not know.
    assert row["is_init"].flatten().tolist() == [True, *golden["done_before"][1:].bool().tolist()]
    ends = golden["done_before"][1:].bool().tolist()
    assert row["next", "terminated"].flatten().tolist()[:-1] == ends
    assert row["next", "observation"].flatten().tolist()[:7] == [1, 2, 3, 101, 102, 103, 103]


def test_environments_that_replay_are_not_stepped() -> None:
    env = make_vector_env(Line, 3)
    replay = DemonstrationReplay(stored(line_demo(5)), Scripted(None, 0, 0, None, None, None, 0, None), 3)
    batch = line_collector(replay, 3, env=env).rollout()
    replayed = batch["demo", "mask"].sum((1, 2))
    assert replayed.sum() > 5
    assert [each.steps for each in env.envs] == (12 - replayed).tolist()


RECORDED = [
    ({}, (True, False)),
    ({"terminated": True, "truncated": False}, (True, False)),
    ({"terminated": False, "truncated": True}, (False, True)),
    ({"terminated": False, "truncated": False}, (False, True)),
]


def test_demonstrations_end_as_they_were_recorded_side_by_side() -> None:
    demonstrations = [line_demo(last=7.0, **options) for options, _ in RECORDED]
    replay = DemonstrationReplay(stored(*demonstrations), Scripted(*range(4), None), 4)
    batch = line_collector(replay, 4, steps=5).rollout()
    for name, of_each in zip(
        ("terminated", "truncated"), zip(*(ends for _, ends in RECORDED), strict=True), strict=True
    ):
        assert batch["next", name][:, 3, 0].tolist() == [*of_each]
        assert not batch["next", name][:, :3].any()
    assert batch["next", "done"][:, 3].all()


def test_a_truncated_expert_is_not_taught_as_an_end() -> None:
    critic = TensorDictModule(lambda x: 100.0 + 0 * x[..., :1], in_keys=["observation"], out_keys=["state_value"])
    shown = line_demo(last=7.0, terminated=False, truncated=True)
    targets = {}
    for ends in (None, "recorded", "terminated", "truncated"):
        options = {} if ends is None else {"ends": ends}
        buffer = PPODBuffer(4, rho=1.0, phi=0.0, gamma=0.5, gae_lambda=0.0, critic=critic, **options)
        buffer.attach(Line, 1)
        buffer.demonstrations.replace([shown], [])
        buffer.insert_data_slice(line_collector(buffer.replay, steps=4).rollout())
        buffer.before_gradients()
        targets[ends] = buffer.rollout["value_target"][-1].item()
    assert targets == {None: 51.0, "recorded": 51.0, "terminated": 1.0, "truncated": 51.0}


@pytest.mark.parametrize(("last", "expected"), [(7.0, 7.0), (None, 103.0)])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_the_end_of_a_demonstration(last: float | None, expected: float, ends: Any) -> None:
    replay = DemonstrationReplay(stored(line_demo(last=last)), Scripted(0), 1, ends=ends)
    row = line_collector(replay, steps=4).rollout()[0]
    assert row["next", "observation"].flatten().tolist() == [101.0, 102.0, 103.0, expected]
    for name in ("terminated", "truncated"):
        assert row["next", name].flatten().tolist() == [False, False, False, name == ends]


def test_one_that_gives_way_is_played_to_its_end() -> None:
    storage = stored(line_demo(6))
    replay = DemonstrationReplay(storage, Scripted(0), 1)
    made = line_collector(replay, steps=3)
    made.rollout()
    storage.replace([line_demo(2, first=500.0)], [])
    restored = DemonstrationReplay(DemonstrationStorage(), Scripted(None), 1)
    restored.load_state_dict(replay.state_dict())
    row = made.rollout()[0]
    assert row["observation"].flatten().tolist() == [103.0, 104.0, 105.0]
    again = [restored(np.zeros(1, bool)).observation["observation"].item() for _ in range(3)]
    assert again == [103.0, 104.0, 105.0]
    assert made.rollout()["demo", "serial"].flatten().tolist() == [1, 1, 1]


def test_a_step_is_seen_before_it_is_made() -> None:
    replay = DemonstrationReplay(stored(line_demo(3)), Scripted(0), 2)
    assert replay.peek() is None
    replay.begin(np.ones(2, bool))

    def seen() -> list[float]:
        rows = replay.peek()
        assert rows is not None
        assert replay.peek() is rows
        return rows.observation["observation"].flatten().tolist()

    assert seen() == [100.0, 100.0]
    replay.advance(np.array([True, False]))
    assert seen() == [101.0, 100.0]
    replay.begin(np.array([True, False]))
    assert seen() == [100.0, 100.0]
    restored = DemonstrationReplay(DemonstrationStorage(), Scripted(None), 2)
    restored.load_state_dict(replay.state_dict())
    for _ in range(2):
        restored.advance(np.array([False, True]))
    rows = restored(np.zeros(2, bool))
    assert rows is not None
    assert rows.observation["observation"].flatten().tolist() == [100.0, 102.0]
    assert restored.playing.tolist() == [True, False]


def test_dict_observations_keep_their_shapes_and_dtypes() -> None:
    storage = stored(demo(0.0, 0.0, 1.0, name="a"), demo(1.0, 0.0, name="b"))
    replay = DemonstrationReplay(storage, Scripted(1, None, 0), 3)
    rows = replay(np.ones(3, bool))
    assert rows is not None
    assert (rows.mask.tolist(), rows.serial.tolist()) == ([True, False, True], [1, 0])
    assert (rows.observation["image"].shape, rows.observation["image"].dtype) == ((2, 2, 2), np.uint8)
    assert rows.next_observation["inner", "vector"].tolist() == [[1.0] * 3] * 2
    assert (rows.action.dtype, rows.reward.tolist()) == (np.int64, [1.0, 0.0])
    rows = replay(np.zeros(3, bool))
    assert (rows.terminated.tolist(), replay.playing.tolist()) == ([True, False], [False, False, True])
    assert names(storage.reward_demonstrations) == ["a", "b"]


def test_scalars_are_shaped_like_the_environment() -> None:
    replay = DemonstrationReplay(stored(line_demo(3)), Scripted(None, 0), 2)
    row = line_collector(replay, 2, 3, env=lambda: Line(())).rollout()
    assert row["observation"].flatten().tolist() == [0, 1, 2, 100, 101, 102]
    assert row["action"][1].flatten().tolist() == [50, 51, 52]


@pytest.mark.parametrize("normalised", [False, True])
def test_the_log_probability_of_the_current_policy(normalised: bool) -> None:
    env = make_vector_env(Line, 2)
    policy = actor_of(env, normalised=normalised)
    for choice in ("current", "deterministic"):
        replay = DemonstrationReplay(stored(line_demo(4)), Scripted(None, 0, None), 2, log_prob=choice)
        batch = line_collector(replay, 2, 6, policy, env=env, seed=0).rollout()
        mask = batch["demo", "mask"].squeeze(-1)
        expected = policy.get_dist(batch.flatten()).log_prob(batch["action"].flatten(0, 1)).view(2, 6)
        assert mask.sum() == 4
        torch.testing.assert_close(batch["action_log_prob"][~mask], expected[~mask])
        replayed = batch["action_log_prob"][mask]
        torch.testing.assert_close(replayed, expected[mask] if choice == "current" else torch.zeros(4))


def test_a_policy_without_a_distribution_is_refused() -> None:
    replay = DemonstrationReplay(stored(line_demo()), Scripted(0), 1, log_prob="current")
    with pytest.raises(TypeError, match=r"must offer get_dist.*log_prob='deterministic'"):
        line_collector(replay).rollout()


@pytest.mark.parametrize("log_prob", ["deterministic", "current"])
def test_recurrent_states_follow_the_demonstration(log_prob: Any) -> None:
    env = make_vector_env(lambda: Line(start=1.0), 2)
    policy = actor_of(env, RecurrentNetwork(hidden_size=4))
    replay = DemonstrationReplay(
        stored(line_demo(4, first=2.0)), Scripted(None, 0, None, 0, None), 2, log_prob=log_prob
    )
    batch = line_collector(replay, 2, 9, policy, env=env, seed=0).rollout()
    states, starts = batch["recurrent_state"], batch["is_init"][..., 0]
    assert batch["demo", "mask"].any()
    assert not states[starts].any()
    assert states[~starts].abs().sum(-1).all()
    # What a policy that saw these observations alone would remember, step by step.
    state = torch.zeros_like(states[:, 0])
    for t in range(9):
        state = state * ~starts[:, t, None, None]
        assert torch.equal(state, states[:, t])
        step = TensorDict(
            {"observation": batch["observation"][:, t], "recurrent_state": state, "is_init": starts[:, t, None]}, [2]
        )
        if log_prob == "current":
            expected = policy.get_dist(step).log_prob(batch["action"][:, t])
            torch.testing.assert_close(batch["action_log_prob"][:, t], expected)
        state = policy(step)["next", "recurrent_state"]


class Pictures(gymnasium.Env[Any, Any]):
    """Shows random images with or without channels, and a vector, for five steps."""

    action_space = spaces.Discrete(3)

    def __init__(self, shape: tuple[int, ...], alone: bool = False) -> None:
        image, vector = spaces.Box(0, 255, shape, np.uint8), spaces.Box(0, 1, (2,), np.float32)
        self.observation_space: Any = image if alone else spaces.Dict({"image": image, "vector": vector})

    def _shown(self) -> Any:
        self.t += 1
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = -1
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._shown(), float(self.t), self.t == 5, False, {}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 6, 6), (6, 6, 3), (5, 5, 2)])
def test_stacks_of_frames_are_those_of_the_episode(shape: tuple[int, ...], count: int, alone: bool) -> None:
    recipe = EnvironmentRecipe(partial(Pictures, shape, alone), frame_stack=count)
    specs, _ = demonstration_specs(recipe)
    torch.manual_seed(0)
    own = GymnasiumCollector(recipe, num_envs=2, frames_per_batch=20, seed=3)
    episodes = own.rollout()
    writer = DemonstrationWriter(DemonstrationStorage(), reward_threshold=-1.0, cut_after_reward=False)
    miner = DemonstrationMiner(writer, 2, specs=specs)
    miner.mine(episodes)
    mined = writer.storage.reward_demonstrations
    assert [each.length for each in mined] == [5] * 4
    for demonstration in mined:
        demonstration.fits(specs)
    # The four episodes end in the order of their ends, one of each environment after the other.
    again = GymnasiumCollector(
        recipe,
        num_envs=2,
        frames_per_batch=20,
        replay=DemonstrationReplay(writer.storage, Scripted(0, 1, 2, 3, None), 2, frame_stack=count),
    ).rollout()
    assert again["demo", "mask"].all()
    for key in (*specs.keys, *(("next", key) for key in specs.keys), "action", ("next", "reward"), ("next", "done")):
        assert torch.equal(again[key], episodes[key]), key
    mined_again = DemonstrationWriter(DemonstrationStorage(), reward_threshold=-1.0, cut_after_reward=False)
    again["demo", "serial"].fill_(-1)
    DemonstrationMiner(mined_again, 2, specs=specs).mine(again)
    for one, other in zip(mined, mined_again.storage.reward_demonstrations, strict=True):
        assert (one.steps == other.steps).all()
        assert (one.last_observation == other.last_observation).all()


def test_a_recorded_stack_is_replayed_and_mined_as_it_was() -> None:
    recipe = EnvironmentRecipe(partial(Pictures, (6, 6, 3)), frame_stack=3)
    specs, _ = demonstration_specs(recipe)

    def act(vector: torch.Tensor) -> torch.Tensor:
        return (vector.sum(-1) * 3).long() % 3

    policy = TensorDictModule(act, in_keys=["vector"], out_keys=["action"])
    (recorded,) = record_demonstrations(recipe, policy, 1, seed=0)
    replay = DemonstrationReplay(stored(recorded), Scripted(0, None), 1, frame_stack=3)
    rollout = GymnasiumCollector(recipe, policy, frames_per_batch=5, replay=replay).rollout()
    assert rollout["image"].shape == (1, 5, 6, 6, 9)
    rollout["demo", "serial"].fill_(-1)
    writer = DemonstrationWriter(DemonstrationStorage(), reward_threshold=-1.0, cut_after_reward=False)
    DemonstrationMiner(writer, 1, specs=specs).mine(rollout)
    (mined,) = writer.storage.reward_demonstrations
    assert (mined.steps == recorded.steps).all()
    assert (mined.last_observation == recorded.last_observation).all()


@pytest.mark.parametrize("log_prob", ["deterministic", "current"])
def test_a_resumed_run_goes_on_within_a_demonstration(log_prob: Any) -> None:
    storage = stored(line_demo(10), line_demo(7, first=20.0))
    policy = actor_of(make_vector_env(Line, 2), RecurrentNetwork(hidden_size=4))

    def fresh() -> tuple[Any, Any]:
        replay = DemonstrationReplay(storage, DemonstrationSampler(1.0, 0.0), 2, log_prob=log_prob)
        return line_collector(replay, 2, 4, policy, seed=1), replay

    (whole, replay), (resumed, restored) = fresh(), fresh()
    whole.rollout()
    restored.load_state_dict(through_file(replay.state_dict()))
    resumed.load_state_dict(through_file(whole.state_dict()))
    assert repr(through_file(resumed.state_dict())) == repr(through_file(whole.state_dict()))
    for _ in range(4):
        one, other = whole.rollout(), resumed.rollout()
        assert (one == other).all()
    assert repr(through_file(resumed.state_dict())) == repr(through_file(whole.state_dict()))


def test_recurrent_states_go_on_only_where_a_demonstration_does() -> None:
    env = make_vector_env(lambda: Line(start=1.0), 2)
    policy = actor_of(env, RecurrentNetwork(hidden_size=4))

    def fresh() -> Any:
        replay = DemonstrationReplay(stored(line_demo(9)), Scripted(None, 0, None), 2)
        return replay, line_collector(replay, 2, 4, policy, seed=0, env=lambda: Line(start=1.0))

    (replay, first), (restored, resumed) = fresh(), fresh()
    first.rollout()
    restored.load_state_dict(replay.state_dict())
    state = through_file(first.state_dict())
    resumed.load_state_dict(state)
    on, batch = first.rollout(), resumed.rollout()
    assert on["recurrent_state"][:, 0].abs().sum(-1).all()
    assert batch["is_init"][:, 0, 0].tolist() == [True, False]
    assert not batch["recurrent_state"][0, 0].any()
    assert (batch[1] == on[1]).all()
    for change, message in (
        ({"recurrent_states": {}}, "lacks recurrent_state"),
        ({"recurrent_states": {"recurrent_state": torch.zeros(3, 1, 4)}}, r"a tensor \[3, 1, 4\]"),
        ({"trajectory_ids": [0, 1]}, "'trajectory_ids' is a list"),
    ):
        before = repr(through_file(resumed.state_dict()))
        with pytest.raises(ValueError, match=message):
            resumed.load_state_dict({**state, **change})
        assert repr(through_file(resumed.state_dict())) == before
    assert "recurrent_states" not in line_collector(None, 2, 4, policy, seed=0, env=env).state_dict()


def test_another_number_of_environments_is_refused() -> None:
    with pytest.raises(ValueError, match="for 2 environments, asked for the steps of 3"):
        DemonstrationReplay(DemonstrationStorage(), DemonstrationSampler(), 2)(np.ones(3, bool))


def test_a_copy_follows_its_original() -> None:
    storage = stored(line_demo(4, value=1.0), line_demo(9, first=30.0, value=2.0))
    replay = DemonstrationReplay(storage, DemonstrationSampler(1.0, 0.0), 2)
    replay(np.ones(2, bool))
    copies = [pickle.loads(pickle.dumps(replay.for_worker(seed))) for seed in (0, 0, 1)]
    assert not copies[0].playing.any()
    drawn = [[each(np.ones(2, bool)).serial.tolist() for _ in range(20)] for each in copies]
    assert drawn[0] == drawn[1] != drawn[2]
    before = replay.contents()
    assert replay.contents() == before
    first, second = storage.reward_demonstrations
    storage.replace([second.labelled(value=5.0, serial=second.serial), line_demo(3)], [first], 7, 0.5)
    replay.sampler.rho = 0.25
    news = replay.news(before)
    assert [type(each) for each in (*news.reward, *news.value)] == [tuple, Demonstration, tuple]
    copy = copies[0]
    copy.follow(pickle.loads(pickle.dumps(news)))
    assert copy.sampler.rho == 0.25
    assert repr(copy.storage.state_dict()) == repr({**storage.state_dict(), "next_serial": 2})
    assert copy.playing.all()  # what was being played goes on
    assert before != replay.contents()
