"""Demonstrations take the place of episodes: which steps a collector sees, and what it stores of them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from kit.demonstrations import demo, names, stored
from kit.files import through_file
from kit.images import CountedImages
from kit.lines import Line, Scripted, actor_of, check_memory, line_collector, line_demo
from kit.states import differences
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
from torchrl_lightning.agents import RecurrentNetwork
from torchrl_lightning.demonstrations import record_demonstrations
from torchrl_lightning.demonstrations.io.recording import demonstration_specs
from torchrl_lightning.environments import make_vector_env


def test_truncated_demonstration_does_not_terminate() -> None:
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


def test_dropped_demonstration_is_played_to_its_end() -> None:
    storage = stored(line_demo(6))
    replay = DemonstrationReplay(storage, Scripted(0), 1)
    made = line_collector(replay, steps=3)
    made.rollout()
    storage.replace([line_demo(2, first=500.0)], [])
    assert made.rollout()["observation"].flatten().tolist() == [103.0, 104.0, 105.0]
    assert made.rollout()["demo", "serial"].flatten().tolist() == [1, 1, 1]


def test_peek_returns_the_next_step() -> None:
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


def test_policy_without_a_distribution_is_refused() -> None:
    replay = DemonstrationReplay(stored(line_demo()), Scripted(0), 1, log_prob="current")
    with pytest.raises(TypeError, match=r"get_dist.*log_prob='deterministic'"):
        line_collector(replay).rollout()


@pytest.mark.parametrize("kind", ["plain", "normalised", "recurrent"])
@pytest.mark.parametrize("log_prob", ["deterministic", "current"])
def test_policy_sees_the_demonstration(kind: str, log_prob: Any) -> None:
    env = make_vector_env(lambda: Line(start=1.0), 2)
    network = RecurrentNetwork(hidden_size=4) if kind == "recurrent" else None
    policy = actor_of(env, network, normalised=kind == "normalised")
    shown, script = stored(line_demo(4, first=2.0)), Scripted(None, 0, None, 0, None)
    replay = DemonstrationReplay(shown, script, 2, log_prob=log_prob)
    batch = line_collector(replay, 2, 9, policy, env=env, seed=0).rollout()
    mask, starts = batch["demo", "mask"].squeeze(-1), batch["is_init"].squeeze(-1)
    assert mask.any()
    seen = batch.select("observation", "recurrent_state", "is_init", strict=False).flatten()
    expected = policy.get_dist(seen).log_prob(batch["action"].flatten(0, 1)).view(2, 9)
    torch.testing.assert_close(batch["action_log_prob"], expected * (~mask | (log_prob == "current")))
    if kind == "recurrent":
        assert batch["recurrent_state"].abs().sum((-2, -1)).bool().equal(~starts)
        check_memory(batch, policy, "recurrent_state")


def mined(rollout: Any, specs: Any) -> tuple[Demonstration, ...]:
    """What a miner makes of a rollout, as if nothing in it were replayed."""
    writer = DemonstrationWriter(DemonstrationStorage(), reward_threshold=-1.0, cut_after_reward=False)
    DemonstrationMiner(writer, len(rollout), specs=specs).mine(rollout.exclude("demo"))
    return writer.storage.reward_demonstrations


def check_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.steps == other.steps).all()
        assert (one.last_observation == other.last_observation).all()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 6, 6), (6, 6, 3), (5, 5, 2)])
def test_frame_stacks_contain_only_frames_of_the_demonstration(shape: tuple[int, ...], count: int, alone: bool) -> None:
    recipe = EnvironmentRecipe(partial(CountedImages, shape, drawn=True, alone=alone), frame_stack=count)
    specs, _ = demonstration_specs(recipe)
    collector = partial(GymnasiumCollector, recipe, num_envs=2, frames_per_batch=20)
    torch.manual_seed(0)
    played = collector(seed=3).rollout()
    found = mined(played, specs)
    assert [each.length for each in found] == [5] * 4
    for demonstration in found:
        demonstration.fits(specs)
    # The four episodes end in the order of their ends, one of each environment after the other.
    replay = DemonstrationReplay(stored(*found), Scripted(0, 1, 2, 3, None), 2, frame_stack=count)
    again = collector(replay=replay).rollout()
    assert again["demo", "mask"].all()
    for key in (*specs.keys, *(("next", key) for key in specs.keys), "action", ("next", "reward"), ("next", "done")):
        assert torch.equal(again[key], played[key]), key
    check_same(mined(again, specs), found)


def test_recorded_stack_is_replayed_and_mined_as_it_was() -> None:
    recipe = EnvironmentRecipe(partial(CountedImages, (6, 6, 3), drawn=True), frame_stack=3)
    policy = TensorDictModule(lambda step: step[..., 0].long() % 2, in_keys=["step"], out_keys=["action"])
    (recorded,) = record_demonstrations(recipe, policy, 1, seed=0)
    replay = DemonstrationReplay(stored(recorded), Scripted(0, None), 1, frame_stack=3)
    rollout = GymnasiumCollector(recipe, policy, frames_per_batch=5, replay=replay).rollout()
    assert rollout["image"].shape == (1, 5, 6, 6, 9)
    check_same(mined(rollout, demonstration_specs(recipe)[0]), [recorded])


def test_resumed_run_goes_on_within_a_demonstration() -> None:
    storage = stored(line_demo(10), line_demo(7, first=20.0))
    policy = actor_of(make_vector_env(Line, 2), RecurrentNetwork(hidden_size=4))

    def fresh() -> tuple[Any, Any]:
        replay = DemonstrationReplay(storage, DemonstrationSampler(1.0, 0.0), 2, log_prob="current")
        return line_collector(replay, 2, 4, policy, seed=1), replay

    (whole, replay), (resumed, restored) = fresh(), fresh()
    whole.rollout()
    restored.load_state_dict(through_file(replay.state_dict()))
    resumed.load_state_dict(through_file(whole.state_dict()))
    for _ in range(4):
        assert not differences(resumed.state_dict(), whole.state_dict())
        assert (whole.rollout() == resumed.rollout()).all()


def test_recurrent_states_continue_only_during_a_demonstration() -> None:
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
        before = resumed.state_dict()
        with pytest.raises(ValueError, match=message):
            resumed.load_state_dict({**state, **change})
        assert not differences(resumed.state_dict(), before)
    assert "recurrent_states" not in line_collector(None, 2, 4, policy, seed=0, env=env).state_dict()


def test_copy_follows_its_original() -> None:
    storage = stored(line_demo(4, value=1.0), line_demo(9, first=30.0, value=2.0))
    replay = DemonstrationReplay(storage, DemonstrationSampler(1.0, 0.0), 2)
    replay(np.ones(2, bool))
    copies = [pickle.loads(pickle.dumps(replay.for_worker(seed))) for seed in (0, 0, 1)]
    assert not copies[0].playing.any()
    drawn = [[each(np.ones(2, bool)).serial.tolist() for _ in range(20)] for each in copies]
    assert drawn[0] == drawn[1] != drawn[2]
    before = replay.snapshot()
    assert replay.snapshot() == before
    first, second = storage.reward_demonstrations
    storage.replace([second.with_value(value=5.0, serial=second.serial), line_demo(3)], [first], 7, 0.5)
    replay.sampler.rho = 0.25
    delta = replay.delta(before)
    assert [type(each) for each in (*delta.reward, *delta.value)] == [tuple, Demonstration, tuple]
    copy = copies[0]
    copy.apply_delta(pickle.loads(pickle.dumps(delta)))
    assert copy.sampler.rho == 0.25
    assert not differences(copy.storage.state_dict(), {**storage.state_dict(), "next_serial": 2})
    assert copy.playing.all()  # what was being played goes on
    assert before != replay.snapshot()
