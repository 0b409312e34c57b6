"""The episodic buffer's documented methods equal ALF's recorded results, and TorchRL's methods work."""

from __future__ import annotations

from collections import namedtuple
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_map
from torchrl.data import Bounded, Composite, Unbounded

from kit.golden import arrays, tensors
from kit.seeds import generator
from torchrl_lightning.episodic import EpisodicReplayBuffer
from torchrl_lightning.episodic.batch_info import BatchInfo, make_batch_info
from torchrl_lightning.episodic.time_steps import FIRST, LAST
from torchrl_lightning.replay import SequenceSampler
from torchrl_lightning.replay.positions import MissingStepsError

ROW = TensorDict({"step_type": torch.tensor(0), "reward": torch.tensor(0.0), "discount": torch.tensor(1.0)})


def steps(kind: list[int], reward: list[float] | None = None, discount: list[float] | None = None) -> TensorDict:
    size = len(kind)
    columns = {
        "step_type": torch.tensor(kind),
        "reward": torch.tensor(reward or [0.0] * size),
        "discount": torch.tensor(discount or [float(each != LAST) for each in kind]),
    }
    return TensorDict(columns, [size])


def build(num_environments: int = 2, max_length: int = 4, **options: Any) -> EpisodicReplayBuffer:
    return EpisodicReplayBuffer(ROW, num_environments, max_length, **options)


@pytest.mark.parametrize("case", range(4))
def test_episode_positions_equal_golden_values(case: int) -> None:
    data = arrays("alf_episode_index", f"c{case}_")
    num_envs, length = data["num_envs_max_length"].tolist()
    buffer = build(num_envs, length, keep_episodic_info=True)
    for i, types in enumerate(data["step_type"]):
        env = np.flatnonzero(types >= 0)
        buffer.add_batch(steps(types[env].tolist()), torch.from_numpy(env))
        size = np.minimum(data["current_pos"][i], length)
        ids = torch.from_numpy(np.repeat(np.arange(num_envs), size))
        position = torch.cat([torch.arange(p - min(p, length), p) for p in data["current_pos"][i].tolist()])
        stored = data["begin_pos"][i] >= 0
        assert buffer.total_size == size.sum()
        assert buffer.get_episode_begin_position(position, ids).tolist() == data["begin_pos"][i][stored].tolist()
        assert buffer.steps_to_episode_end(position, ids).tolist() == data["steps_to_end"][i][stored].tolist()


def test_gather_all_equals_golden_values() -> None:
    buffer = EpisodicReplayBuffer(TensorDict({"x": torch.tensor(0.0)}), 4, 9, num_earliest_frames_ignored=2)
    last, golden = [10, 11, 12, 13, 14, 6, 7, 8, 9], tensors("alf_gather_all")
    for step, ignored in product(range(1, 15), (0, 2)):
        if not ignored:
            buffer.add_batch(TensorDict({"x": torch.full((4,), float(step))}, [4]))
        name = f"t{step}_ign{ignored // 2}_"
        if step <= ignored:
            assert f"{name}x" not in golden
            continue
        batch, info = buffer.gather_all(ignore_earliest_frames=ignored > 0)
        recorded, first = golden[f"{name}x"], max(0, step - 9) + ignored
        assert batch["x"].tolist() == [list(range(first + 1, step + 1))] * 4
        if step < 9:  # ALF returned views, so the recording holds the last values written there
            assert recorded.tolist() == [last[first:step]] * 4
        else:
            assert batch["x"].equal(recorded)
        assert info.positions.tolist() == golden[f"{name}positions"].tolist() == [first] * 4
        assert info.env_ids.tolist() == [0, 1, 2, 3]
        assert info.replay_buffer is buffer


def test_batch_info_has_the_origin_of_windows() -> None:
    buffer = build(3, 16, record_episodic_return=True, gamma=0.5, generator=generator(1))
    for t in range(20):
        kind = [FIRST if t % 5 == 0 else LAST if t % 5 == 4 else 1] * 3
        buffer.add_batch(steps(kind, [float(t), t + 100.0, t + 200.0]))
    batch, info = buffer.get_batch(12, 3)
    assert (batch.shape, batch.names) == (torch.Size([12, 3]), [None, "time"])
    assert info.env_ids.bincount().tolist() == [4, 4, 4]
    assert batch["reward"].equal((info.env_ids * 100 + info.positions).unsqueeze(1) + torch.arange(3.0))
    assert info.discounted_return.equal(batch["discounted_return"][:, 0])
    assert info.discounted_return.equal(buffer.get_field("discounted_return", info.env_ids, info.positions))
    assert info.importance_weights is None
    assert info.replay_buffer is buffer
    assert info[3].positions == info.positions[3]
    assert buffer.sample(2).shape == (2,)


@pytest.mark.parametrize("known", [{}, {"importance_weights": torch.ones(3), "discounted_return": torch.zeros(3)}])
def test_fast_batch_info_equals_its_constructor(known: dict[str, torch.Tensor]) -> None:
    buffer, entries = build(), {"env_ids": torch.tensor([0, 1, 0]), "positions": torch.tensor([4, 5, 6]), **known}
    fast, slow = (
        make_batch_info(buffer, entries, torch.Size([3])),
        BatchInfo(**entries, replay_buffer=buffer, batch_size=[3]),
    )
    for info in (fast, fast[1:], fast.clone(False), torch.cat([fast, fast])):
        assert info.replay_buffer is buffer
        assert (info.discounted_return is None) == (info.importance_weights is None) == (not known)
    assert set(fast.keys()) == set(slow.keys())
    assert (fast == slow).all()


def test_torchrl_methods_work() -> None:
    spec = Composite(
        observation=Unbounded((3,)), action=Bounded(-1, 1, (1,)),
        next=Composite(observation=Unbounded((3,)), reward=Unbounded((1,)), done=Bounded(0, 1, (1,), dtype=torch.bool),
                       terminated=Bounded(0, 1, (1,), dtype=torch.bool)),
    )  # fmt: skip
    buffer = EpisodicReplayBuffer(spec, 2, 8, record_episodic_return=True, gamma=1.0, batch_size=4)
    data = spec.expand(2).rand()
    data["next", "done"][:] = data["next", "terminated"][:] = True
    data["next", "reward"][:] = torch.tensor([[1.0], [2.0]])
    assert buffer.extend(data).tolist() == [0, 1]
    assert "discounted_return" not in data.keys()  # noqa: SIM118  # of a TensorDict
    batch = buffer.sample()
    assert batch.shape == (4,)
    assert batch["discounted_return"].shape == (4, 1)
    assert batch["discounted_return"].equal(batch["next", "reward"])
    assert batch["action"].equal(data["action"][batch["index"]])
    info = buffer.get_batch(2, 1)[1]
    assert sorted(info.discounted_return.tolist()) == [1, 2]
    buffer.empty()
    assert buffer.total_size == 0


@pytest.mark.parametrize("recent_data_ratio", [0.0, 0.5])
@pytest.mark.parametrize("length", [None, 1, 3])
def test_torchrl_update_priority_sets_priorities(length: int | None, recent_data_ratio: float) -> None:
    options = {"prioritized_sampling": True, "recent_data_ratio": recent_data_ratio, "priority_key": "loss"}
    buffer = build(2, 6, keep_episodic_info=False, generator=generator(), **options)
    for t in range(6):
        buffer.add_batch(steps([1, 1], [t, t + 10.0]))
    batch = buffer.sample(32) if length is None else buffer.get_batch(32, length)[0]
    batch["loss"] = batch["reward"] + 1  # the priority of a window is the highest loss of its steps, here the last one
    assert batch.batch_size == torch.Size([32] if length is None else [32, length])
    buffer.add_batch(steps([1], [0.0]), torch.tensor([0]))  # overwrites the first step of environment 0
    buffer.update_tensordict_priority(batch)
    expected = {(env, position): 1.0 for env in range(2) for position in range(6)}
    first, reach = batch["reward"].view(32, -1)[:, 0].int().tolist(), (length or 1) - 1
    expected |= {divmod(reward, 10): reward + reach + 1.0 for reward in first}
    expected = {step: value for step, value in expected.items() if step != (0, 0)} | {(0, 6): 1.0}
    assert buffer.initial_priority == max(expected.values())
    _, info = buffer.get_batch(64, 1)
    mean = sum(expected.values()) / len(expected)
    drawn = zip(info.env_ids.tolist(), info.positions.tolist(), info.importance_weights.tolist(), strict=True)
    for env, position, weight in drawn:
        recent = recent_data_ratio and position == buffer.writer.positions[env] - 1
        assert weight == pytest.approx(expected[env, position] / mean) or (recent and weight == 1)


def test_episode_methods_without_index_are_rejected() -> None:
    buffer = build(keep_episodic_info=False)
    buffer.add_batch(steps([FIRST, FIRST]))
    with pytest.raises(RuntimeError, match="keep_episodic_info=False"):
        buffer.steps_to_episode_end(torch.tensor([0]), torch.tensor([0]))
    assert buffer.get_batch(2, 1)[0].shape == (2, 1)


def test_initial_priority_exists_without_priorities() -> None:
    assert build().initial_priority == 1.0
    assert build(prioritized_sampling=True, initial_priority=3.0).initial_priority == 3.0


def test_equal_priorities_give_exactly_equal_counts() -> None:
    buffer = build(prioritized_sampling=True)
    buffer.add_batch(steps([1, 1]))
    assert buffer.get_batch(1000, 1)[1].env_ids.bincount().tolist() == [500, 500]


def test_gather_all_rejects_empty_and_uneven_environments() -> None:
    buffer = build()
    with pytest.raises(RuntimeError, match="more than 0 steps, got 0"):
        buffer.gather_all()
    buffer.add_batch(steps([1]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"must be equal, got \[1, 0\]"):
        buffer.gather_all()


SAMPLERS: dict[str, dict[str, Any]] = {
    "even": {},
    "recent": {"recent_data_ratio": 0.5},
    "prioritized": {"prioritized_sampling": True},
    "prioritized and recent": {"prioritized_sampling": True, "recent_data_ratio": 0.5},
    "ignoring": {"num_earliest_frames_ignored": 2},
    "with replacement": {"with_replacement": True},
    "windows inside of episodes": {"sampler": SequenceSampler(1)},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("filled", [[], [0], [0, 1]], ids=["empty", "one", "both"])
def test_missing_steps_raise_one_error_in_all_methods(name: str, filled: list[int]) -> None:
    buffer = build(**SAMPLERS[name])
    for env in filled:
        buffer.add_batch(steps([1]), torch.tensor([env]))
    calls = [lambda: buffer.get_batch(4, 3), lambda: buffer.dequeue(n=2), lambda: buffer.dequeue(n=9)]
    calls += [lambda: buffer.gather_all()] if len(filled) < 2 else []
    calls += [lambda: buffer.get_batch(4, 1), lambda: buffer.sample(2)] if not filled else []
    for call in calls:
        with pytest.raises(MissingStepsError) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, AssertionError)
        assert "Collect" in str(caught.value) or "hold" in str(caught.value) or "stored" in str(caught.value)
    assert len(buffer) == len(filled)


def test_zero_priorities_are_rejected_when_sampling() -> None:
    buffer = build(prioritized_sampling=True)
    buffer.add_batch(steps([1, 1]))
    buffer.update_priority(torch.arange(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="priorities are zero"):
            buffer.get_batch(2, 1)


def test_blocking_dequeue_of_too_many_steps_is_rejected() -> None:
    buffer = build(allow_multiprocess=True)
    with pytest.raises(MissingStepsError, match="max_length=4, got 5"):
        buffer.dequeue(n=5, blocking=True)
    with pytest.raises(ValueError, match="at least"):
        buffer.get_batch(-1, 1)


def test_nested_names_return_nested_fields() -> None:
    buffer = EpisodicReplayBuffer(TensorDict({"a": {"b": torch.tensor(0)}, "c": torch.tensor(0)}), 2, 4)
    buffer.add_batch(TensorDict({"a": {"b": torch.tensor([1, 2])}, "c": torch.tensor([3, 4])}, [2]))
    pair = namedtuple("pair", "first second")
    steps = torch.tensor([0, 1]), torch.tensor([[0]])
    for names, expected in (
        (("a", "b"), [[1, 2]]),  # a key
        (("c", "a.b"), ([[3, 4]], [[1, 2]])),
        (["c", ("a", "b")], [[[3, 4]], [[1, 2]]]),
        ({"x": "c", "y": [pair("c", "a.b")]}, {"x": [[3, 4]], "y": [pair([[3, 4]], [[1, 2]])]}),
    ):
        fields = tree_map(torch.Tensor.tolist, buffer.get_field(names, *steps))
        assert fields == expected
        assert type(fields) is type(expected)
    with pytest.raises(KeyError, match=r"no entry \('d',\); it has \['a', 'c'\]"):
        buffer.get_field(["c", ("c", "d")], *steps)


def test_batch_info_is_indexed_by_rows_and_not_unpacked() -> None:
    buffer = build()
    buffer.add_batch(steps([1, 1]))
    info = buffer.get_batch(2, 1)[1]
    assert [info[row].env_ids.item() for row in range(len(info))] == info.env_ids.tolist()
    assert torch.stack([info, info]).shape == (2, 2)
    with pytest.raises(TypeError, match=r"env_ids.*importance_weights, replay_buffer"):
        tuple(info)
