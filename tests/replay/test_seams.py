"""Trajectories cut without a flag (by ids, by other successors, after loads), and data without cuts."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv

from torchrl_lightning import (
    EpisodicReplayBuffer,
    ExperienceBuffer,
    FrameStorage,
    GymnasiumCollector,
    MBReplayBuffer,
    RecurrentReplayBuffer,
    ReplayDataModule,
    RingStorage,
    RingWriter,
    SequenceSampler,
)
from torchrl_lightning._core.protocols import CollectorApi
from torchrl_lightning.datamodules._run.step_writer import PreparedWrite
from torchrl_lightning.replay.successors import equal_rows

SEAM = "do not continue their stored trajectories"


def rows(count: int, start: float = 0, **extra: Any) -> TensorDict:
    """Return steps of one environment that count up from ``start``."""
    now = torch.arange(count, dtype=torch.float32).view(-1, 1) + start
    never = torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": now + 1, "reward": torch.ones(count, 1), "done": never, "terminated": never.clone()}
    return TensorDict({"observation": now, **extra, "next": following}, [count])


def with_ids(data: TensorDict, ids: list[int]) -> TensorDict:
    return data.set(("collector", "traj_ids"), torch.tensor(ids))


def replay(num_envs: int = 1, length: int = 50, **settings: Any) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(num_envs * length), num_envs=num_envs, n_steps=3, **settings)


def begins(buffer: Any, env: int = 0) -> list[int]:
    """Return the first position of the episode of each stored step."""
    position = torch.arange(int(buffer.writer.oldest[env]), int(buffer.writer.positions[env]))
    found: list[int] = buffer.writer.index.begin(torch.full_like(position, env), position).tolist()
    return found


# ---------------------------------------------------------------------- ids of trajectories


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_ids_cut_environments_independently(shape: tuple[int, ...]) -> None:
    buffer = replay(2)
    for ids in ([0, 1], [0, 1], [0, 2], [3, 2]):
        data = rows(2)
        data["collector", "traj_ids"] = torch.tensor(ids).view(shape)
        buffer.extend(data)
    assert (begins(buffer, 0), begins(buffer, 1)) == ([0, 0, 0, 3], [0, 0, 2, 2])


def test_torchrls_collector_that_resets_at_each_batch() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(100), sampler=SequenceSampler(2), batch_size=200)
    for data in Collector(GymEnv("Pendulum-v1"), None, frames_per_batch=5, total_frames=20, reset_at_each_iter=True):
        buffer.extend(data)
    ids = buffer.sample()["collector", "traj_ids"]
    assert ids[:, 0].equal(ids[:, 1])
    assert begins(buffer) == [0] * 5 + [5] * 5 + [10] * 5 + [15] * 5


# ---------------------------------------------------------------------- successors


def test_rollouts_in_a_row_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    env, buffer = GymEnv("Pendulum-v1"), replay()
    for _ in range(4):
        buffer.extend(env.rollout(5))
    assert begins(buffer) == [0] * 5 + [5] * 5 + [10] * 5 + [15] * 5
    told = [record.getMessage() for record in caplog.records if SEAM in record.getMessage()]
    assert len(told) == 1
    assert all(word in told[0] for word in ("writer.cut()", "check_successors=False", "observation"))


def test_cut_step_bootstraps_from_its_stored_successor() -> None:
    buffer = replay(batch_size=200)
    for start in (0, 100):
        buffer.extend(rows(5, start))
    batch = buffer.sample()
    last = batch["observation"].flatten() == 4
    assert last.any()
    assert set(batch["steps_to_next_obs"][last].tolist()) == {1}
    assert set(batch["next", "observation"][last].flatten().tolist()) == {5.0}
    assert not batch["next", "done"].any()


def test_nested_entries_and_images_are_compared() -> None:
    def data(start: int) -> TensorDict:
        count = torch.arange(start, start + 3)
        image = count.to(torch.uint8).view(-1, 1, 1, 1).expand(3, 1, 4, 4)
        after = {"agent": {"image": image + 1}, "reward": torch.ones(3, 1), "done": torch.zeros(3, 1).bool()}
        return TensorDict({"agent": {"image": image.clone()}, "next": after}, [3])

    buffer = replay()
    for start in (0, 3, 60):
        buffer.extend(data(start))
    assert begins(buffer) == [0] * 6 + [6] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_all_dtypes_are_compared(dtype: torch.dtype) -> None:
    def data(bits: list[int]) -> TensorDict:
        data = rows(len(bits) - 1).exclude("observation", ("next", "observation"))
        values = torch.tensor(bits).to(dtype)
        return data.set("bit", values[:-1]).set(("next", "bit"), values[1:])

    buffer = replay()
    buffer.extend(data([0, 1, 1, 0]))
    buffer.extend(data([0, 1]))
    buffer.extend(data([0, 1]))
    assert begins(buffer) == [0, 0, 0, 0, 4]


def test_nan_equals_nan() -> None:
    nan, other = torch.full((2, 1), torch.nan), torch.zeros(2, 1)
    buffer = replay()
    for start, values in ((0, nan), (2, nan), (4, other)):
        data = rows(2, start).set("speed", values)
        buffer.extend(data.set(("next", "speed"), nan.clone() if start < 4 else other))
    assert begins(buffer) == [0] * 4 + [4] * 2
    assert equal_rows(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, -0.0])).tolist() == [True, True]


def test_flagged_ends_and_beginnings_need_no_comparison(caplog: pytest.LogCaptureFixture) -> None:
    buffer = replay()
    first, second = rows(3), rows(3, 50)
    first["next", "done"][-1] = True
    buffer.extend(first)
    buffer.extend(second)
    buffer.writer.cut()
    buffer.extend(rows(3, 80))
    assert begins(buffer) == [0] * 3 + [3] * 3 + [6] * 3
    assert SEAM not in caplog.text


def test_entry_that_differed_inside_a_write_is_never_compared_again() -> None:
    buffer = replay()
    buffer.extend(rows(3))
    buffer.extend(torch.cat([rows(2, 3), rows(2, 60)]))
    buffer.extend(rows(3, 90))
    buffer.extend(rows(3, 300))
    assert begins(buffer) == [0] * 13


def test_comparison_can_be_turned_off() -> None:
    for buffer in (
        replay(check_successors=False),
        ExperienceBuffer(storage=RingStorage(50), writer=RingWriter(check_successors=False)),
        EpisodicReplayBuffer(None, 1, 50, check_successors=False),
    ):
        buffer.extend(rows(3))
        buffer.extend(rows(3, 50))
        assert begins(buffer) == [0] * 6
    with pytest.raises(ValueError, match="check_successors"):
        ExperienceBuffer(storage=RingStorage(50), writer=RingWriter(), check_successors=False)


def test_successors_of_a_torchrl_storage_are_compared() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), writer=RingWriter())
    for start in (0, 3, 50):
        buffer.extend(rows(3, start))
    assert begins(buffer) == [0] * 6 + [6] * 3


# ---------------------------------------------------------------------- other buffers


def test_recurrent_buffer_is_cut() -> None:
    buffer = RecurrentReplayBuffer(50, 1, 1, 1)
    for start in (0.0, 1.0, 2.0, 50.0, 51.0):
        buffer.add([start], [0.0], 1.0, [start + 1], False, [0.0])
    assert begins(buffer) == [0, 0, 0, 3, 3]


def test_episodic_buffer_is_cut() -> None:
    buffer = EpisodicReplayBuffer(None, 2, 50, record_episodic_return=True, gamma=1.0)
    for start in (0, 1, 2, 70, 71):
        data = torch.cat([rows(1, start), rows(1, 10 + min(start, 3))])
        data["next", "terminated"][0] = data["next", "done"][0] = start == 71
        buffer.add_batch(data)
    assert (begins(buffer, 0), begins(buffer, 1)) == ([0, 0, 0, 3, 3], [0, 0, 0, 0, 4])
    returns = buffer.get_field("discounted_return", torch.tensor([0]), torch.arange(5)).flatten().tolist()
    assert returns == [-1000.0] * 3 + [2.0, 1.0]


def test_model_based_buffer_keeps_cuts_when_its_size_changes() -> None:
    buffer = MBReplayBuffer(20)
    for start in (0, 3, 50):
        buffer.extend(rows(3, start).set("action", torch.zeros(3, 1)))
    assert begins(buffer) == [0] * 6 + [6] * 3
    buffer.update_storage_parameter("max_size", 30)
    assert begins(buffer) == [0] * 6 + [6] * 3
    buffer.extend(rows(3, 53).set("action", torch.zeros(3, 1)))
    assert begins(buffer)[-3:] == [6] * 3


def write_with_a_seam(buffer: Any, env: int) -> None:
    for start in (0, 3, 70):
        buffer.extend(rows(3, start), torch.tensor([env]))


def test_processes_of_a_shared_buffer_cut_only_their_trajectories() -> None:
    buffer = replay(2)
    buffer.extend(torch.cat([rows(1), rows(1, 40)]))
    buffer.empty()
    buffer.share()
    process = multiprocessing.get_context("fork").Process(target=write_with_a_seam, args=(buffer, 1))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    write_with_a_seam(buffer, 0)
    assert [begins(buffer, env) for env in (0, 1)] == [[0] * 6 + [6] * 3] * 2
    version = buffer.writer.rings.version
    process = multiprocessing.get_context("fork").Process(target=buffer.writer.cut)
    process.start()
    process.join(60)
    assert buffer.writer.rings.version > version


# ---------------------------------------------------------------------- data that are not cut


def changed(kind: str, count: int, start: int, generator: torch.Generator) -> TensorDict:
    """Return rows of one trajectory in which no entry equals the stored successor."""
    data = rows(count, start)
    noise = [torch.randn(count, 1, generator=generator) for _ in range(2)]
    if kind == "noisy":
        data["observation"] += noise[0]
        data["next", "observation"] += noise[1]
    elif kind == "normalised":
        for level in (data, data["next"]):
            level["observation"] = (level["observation"] - level["observation"].mean()) / (start + 1 + count)
    elif kind == "relabelled":
        goal = noise[0].repeat(1, 2)
        data["desired_goal"] = data["next", "desired_goal"] = goal
        data["observation"], data["next", "observation"] = noise
    elif kind == "stacked":
        frames = data["observation"].view(-1, 1, 1).expand(-1, 3, 1)
        data["observation"] = frames - torch.arange(3).view(1, 3, 1)
    elif kind == "folded":
        data["next", "observation"] += 2
    return data


@pytest.mark.parametrize("kind", ["noisy", "normalised", "relabelled", "stacked", "folded"])
@pytest.mark.parametrize("sizes", [[4] * 5, [1] * 12, [1, 3, 1, 5]])
def test_changed_data_are_not_cut(kind: str, sizes: list[int], caplog: pytest.LogCaptureFixture) -> None:
    buffer, generator, start = replay(), torch.Generator().manual_seed(0), 0
    for count in sizes:
        buffer.extend(changed(kind, count, start, generator))
        start += count
    assert begins(buffer) == [0] * start
    assert SEAM not in caplog.text


def test_stored_frames_are_not_compared() -> None:
    buffer = ExperienceBuffer(storage=FrameStorage(50, 3))
    for start in (0, 4, 60):
        frames = torch.arange(start, start + 7).to(torch.uint8).view(-1, 1, 1).expand(-1, 8, 8).unfold(0, 3, 1)
        stacks = frames.movedim(-1, 1).contiguous()
        data = rows(4).set("observation", stacks[:4])
        buffer.extend(data.set(("next", "observation"), stacks[1:]))
    assert begins(buffer) == [0] * 12


def test_rewritten_successor_is_not_compared() -> None:
    buffer = replay()
    state = torch.zeros(3, 1)
    buffer.extend(rows(3).set("hidden", state).set(("next", "hidden"), state.clone()))
    buffer.storage.write_entry(("next", "hidden"), torch.tensor([2]), torch.ones(1, 1))
    buffer.extend(rows(3, 3).set("hidden", state).set(("next", "hidden"), state.clone()))
    assert begins(buffer) == [0] * 6
    buffer.extend(rows(3, 80).set("hidden", state).set(("next", "hidden"), state.clone()))
    assert begins(buffer)[-3:] == [6] * 3  # the observation still reveals the cut


def test_rewritten_row_of_the_same_values_is_compared() -> None:
    buffer = replay()
    buffer.extend(rows(3))
    buffer[torch.tensor([2])] = buffer[:][2:3].clone()
    buffer.extend(rows(3, 70))
    assert begins(buffer) == [0] * 3 + [3] * 3


# ---------------------------------------------------------------------- loads


def loaded(buffer: Any, **settings: Any) -> Any:
    other = replay(buffer.writer.num_envs, **settings)
    other.load_state_dict(buffer.state_dict())
    return other


def test_load_does_not_cut_trajectories() -> None:
    buffer = replay(batch_size=32)
    buffer.extend(rows(6))
    other = loaded(buffer, batch_size=32)
    assert (other.sample() == buffer.sample()).all()
    other.extend(rows(2, 6))
    assert begins(other) == [0] * 8


def test_another_episode_after_a_load_is_cut() -> None:
    buffer = replay()
    buffer.extend(rows(4))
    other = loaded(loaded(buffer))
    other.extend(rows(4, 100))
    assert begins(other) == [0] * 4 + [4] * 4


def test_environments_are_compared_in_their_first_write_after_a_load() -> None:
    buffer = replay(2)
    buffer.extend(torch.stack([rows(3), rows(3, 20)], 1), time_dim=0)
    other = loaded(buffer)
    other.extend(rows(2, 3), torch.tensor([0]))
    other.extend(rows(2, 90), torch.tensor([1]))
    assert (begins(other, 0), begins(other, 1)) == ([0] * 5, [0] * 3 + [3] * 2)


@pytest.mark.parametrize(
    ("ids", "start", "expected"),
    [
        ([0, 0], 90, [0] * 3 + [3] * 2),  # a new collector counts from 0 again
        ([0, 0], 3, [0] * 5),
        ([7, 7], 3, [0] * 5),
        ([7, 7], 90, [0] * 3 + [3] * 2),
    ],
)
def test_load_lets_successors_decide_over_ids(ids: list[int], start: int, expected: list[int]) -> None:
    buffer = replay()
    buffer.extend(with_ids(rows(3), [0, 0, 0]))
    other = loaded(buffer)
    other.extend(with_ids(rows(2, start), ids))
    assert begins(other) == expected
    other.extend(with_ids(rows(1, start + 2), [ids[0] + 1]))
    assert begins(other)[-1] == 5


def test_compared_entries_are_saved() -> None:
    buffer = replay()
    buffer.extend(torch.cat([rows(2), rows(2, 50)]))  # the second part does not follow the first part
    other = loaded(buffer)
    other.extend(rows(2, 90))
    assert begins(other) == [0] * 6


@pytest.mark.parametrize("entry", ["matched", "differed"])
@pytest.mark.parametrize("value", [3, ["observation"], [[]], [[1]]])
def test_foreign_state_is_refused(entry: str, value: Any) -> None:
    buffer = replay()
    buffer.extend(rows(3))
    state = buffer.state_dict()
    state["writer"]["successors"][entry] = value
    with pytest.raises(ValueError, match=entry):
        replay().load_state_dict(state)


def test_older_state_version_is_rejected() -> None:
    buffer = replay()
    state = buffer.state_dict()
    state["writer"]["schema_version"] = 3
    with pytest.raises(ValueError, match="version 3"):
        replay().load_state_dict(state)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_keep_the_compared_entries(through: Callable[[Any], Any]) -> None:
    buffer = replay()
    buffer.extend(rows(3))
    other = through(buffer)
    other.extend(rows(2, 50))
    assert begins(other) == [0] * 3 + [3] * 2


def must_not_compare(*_: Any) -> None:
    raise AssertionError("rows were compared")


def test_rows_of_our_collectors_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_lightning.replay.successors.equal_rows", must_not_compare)
    buffer = replay(2, length=200)
    for data in GymnasiumCollector("CartPole-v1", None, num_envs=2, frames_per_batch=20, total_frames=200):
        buffer.extend(data)
    for env in (0, 1):
        done = buffer[:]["next", "done"].flatten()[env::2]
        assert begins(buffer, env) == [int(done[:p].nonzero().max() + 1) if done[:p].any() else 0 for p in range(100)]
    one = data[:, 0].clone()
    prepared = PreparedWrite(buffer, one)
    prepared.write()


@pytest.mark.parametrize("frames", [2, 8])
def test_data_module_disables_comparison_for_our_collector(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_lightning.replay.successors.equal_rows", must_not_compare)
    module = ReplayDataModule(
        "CartPole-v1", buffer=replay, num_envs=2, warmup_frames=8, updates_per_epoch=8, frames_per_batch=frames,
        batch_size=4,
    )  # fmt: skip
    module.setup("fit")
    checks = module.buffer.writer.check_successors
    collector = GymnasiumCollector("CartPole-v1", None, num_envs=2, frames_per_batch=frames)
    stream = module._rollouts(CollectorApi.of(collector))
    assert not module.buffer.writer.check_successors
    assert next(iter(stream)) is not None
    module.close()
    assert module.buffer.writer.check_successors is checks is True


def test_first_cut_warns_once_for_each_writer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        buffer = replay()
        for start in (0, 50, 100, 150):
            buffer.extend(rows(3, start))
    assert caplog.text.count(SEAM) == 2
