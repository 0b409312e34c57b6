"""TorchRL's collectors fill our buffers: they call ``extend`` and ``add`` without our extra arguments."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torchrl._utils
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv

from kit.counting import CountingEnv
from torchrl_lightning import EpisodicReplayBuffer, MBReplayBuffer, PrioritizedSampler, RolloutBuffer, SequenceSampler
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

ENVS, LENGTH, STEPS, GAMMA = 2, 60, 3, 0.5
WORKERS = {Collector: 1, MultiSyncCollector: 2, MultiAsyncCollector: 2}
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore::UserWarning:torchrl")


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Fork the workers, because spawned workers import all modules again."""
    with mock.patch.object(torchrl._utils, "_get_default_mp_start_method", return_value="fork"):
        yield


def single(identity: int, length: int = 5) -> EnvBase:
    """Return an environment with its id, the episode number and the step number in every row."""
    return GymWrapper(CountingEnv(identity, length + identity))


def batched(cls: Any, first: int, envs: int = ENVS) -> EnvBase:
    makers = [partial(single, first + env) for env in range(envs)]
    return cls(envs, makers, **({"mp_start_method": "fork"} if cls is ParallelEnv else {}))


@contextmanager
def collecting(collector: Any, makers: list[Callable[[], EnvBase]], buffer: Any, **settings: Any) -> Iterator[Any]:
    settings = {"frames_per_batch": 16, "total_frames": 96, "replay_buffer": buffer, **settings}
    made = collector(makers[0]() if collector is Collector else makers, None, **settings)
    try:
        yield made
    finally:
        made.shutdown()


def fill(collector: Any, kind: Any, buffer: Any, envs: int = ENVS, **settings: Any) -> None:
    makers = [partial(batched, kind, worker * envs, envs) for worker in range(WORKERS[collector])]
    with collecting(collector, makers, buffer, **settings) as run:
        for _ in run:
            pass


def make(num_envs: int, sampler: Any = None, **settings: Any) -> ExperienceBuffer:
    settings = {"n_steps": STEPS, "gamma": GAMMA, "time_dim": -1, **settings}
    settings = {"generator": torch.Generator().manual_seed(0), "sampler": sampler, **settings}
    return ExperienceBuffer(storage=RingStorage(LENGTH * num_envs), num_envs=num_envs, **settings)


def streams(buffer: ExperienceBuffer) -> list[TensorDictBase]:
    """Return the stored steps of each ring, oldest first."""
    writer = buffer.writer
    rings = []
    for env, (first, end) in enumerate(zip(writer.oldest.tolist(), writer.positions.tolist(), strict=True)):
        rings.append(buffer.storage.get(writer.cell(torch.tensor(env), torch.arange(first, end))))
    return rings


def numbers(rows: TensorDictBase) -> list[tuple[int, int, int]]:
    return [tuple(map(int, row)) for row in rows["observation"]]  # type: ignore[misc]


def check_streams(buffer: ExperienceBuffer, identities: int) -> None:
    """Check that each ring holds all steps of one environment, and that each environment has one ring."""
    seen = []
    for rows in streams(buffer):
        stream = numbers(rows)
        assert len({identity for identity, _, _ in stream}) == 1
        seen.append(stream[0][0])
        ends = rows["next", "done"].flatten().tolist()
        for (_, episode, step), (_, after, then), end in zip(stream[:-1], stream[1:], ends, strict=False):
            assert (after, then) == ((episode + 1, 0) if end else (episode, step + 1))
    assert sorted(seen) == list(range(identities))


def check_returns(buffer: ExperienceBuffer, may_cut: bool = False) -> None:
    """Compare sampled returns with returns computed from the stored steps of each environment."""
    stored = {number: row for rows in streams(buffer) for number, row in zip(numbers(rows), rows, strict=True)}
    batch = buffer.sample(256)
    for row, (identity, episode, step) in zip(batch, numbers(batch), strict=True):
        folded = []
        for ahead in range(STEPS):
            following = stored.get((identity, episode, step + ahead))
            if following is None:
                break
            folded.append(following)
            if following["next", "done"]:
                break
        count = int(row["steps_to_next_obs"])
        assert 1 <= count <= len(folded) if may_cut else count == len(folded)
        rewards = [float(each["next", "reward"]) for each in folded[:count]]
        expected = sum(GAMMA**power * reward for power, reward in enumerate(rewards))
        assert float(row["next", "reward"]) == pytest.approx(expected)
        assert row["next", "observation"].equal(folded[count - 1]["next", "observation"])
        assert bool(row["next", "done"]) == bool(folded[count - 1]["next", "done"])


def check_windows(buffer: ExperienceBuffer) -> None:
    """Check that every window has successive steps of one environment."""
    for window in buffer.sample(128):
        stream = [number for number, valid in zip(numbers(window), window["mask"].tolist(), strict=True) if valid]
        identity, episode, step = stream[0]
        assert stream == [(identity, episode, step + ahead) for ahead in range(len(stream))]


@pytest.mark.parametrize("extends", [True, False])
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize("collector", WORKERS)
def test_collectors_fill_a_ring_of_each_environment(collector: Any, kind: Any, extends: bool) -> None:
    num_envs = ENVS * WORKERS[collector]
    buffer = make(num_envs)
    fill(collector, kind, buffer, extend_buffer=extends)
    check_streams(buffer, num_envs)
    check_returns(buffer)
    assert buffer.shared == (collector is not Collector)


@pytest.mark.parametrize("collector", WORKERS)
def test_windows_of_collected_steps_join_no_workers(collector: Any) -> None:
    buffer = make(ENVS * WORKERS[collector], SequenceSampler(4, episode_ends="pad"), n_steps=1)
    fill(collector, SerialEnv, buffer)
    check_windows(buffer)


@pytest.mark.parametrize("extends", [True, False])
@pytest.mark.parametrize("collector", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_that_share_rings_are_not_joined(collector: Any, extends: bool) -> None:
    buffer = make(ENVS)
    fill(collector, SerialEnv, buffer, extend_buffer=extends)
    check_returns(buffer, may_cut=True)
    windows = make(ENVS, SequenceSampler(4, episode_ends="pad"), n_steps=1)
    fill(collector, SerialEnv, windows, extend_buffer=extends)
    check_windows(windows)


@pytest.mark.parametrize("collector", WORKERS)
def test_environments_without_a_batch_fill_one_ring_each(collector: Any) -> None:
    workers = WORKERS[collector]
    for extends, frames in itertools.product(
        [True, False], [workers * workers, 16]
    ):  # the number of steps equals the number of rings, or is larger
        buffer = make(workers)
        makers = [partial(single, worker) for worker in range(workers)]
        with collecting(collector, makers, buffer, extend_buffer=extends, frames_per_batch=frames) as run:
            for _ in run:
                pass
        check_streams(buffer, workers)
        check_returns(buffer)


def test_workers_with_different_numbers_of_environments_fill_rings_of_their_own() -> None:
    buffer = make(5)
    makers = [partial(batched, SerialEnv, 0, 2), partial(batched, SerialEnv, 2, 3)]
    with collecting(MultiSyncCollector, makers, buffer, frames_per_batch=24) as run:
        for _ in run:
            pass
    check_streams(buffer, 5)
    check_returns(buffer)


@pytest.mark.parametrize("envs", [1, 3])
def test_other_numbers_of_environments_and_uneven_batches_are_collected(envs: int) -> None:
    buffer = make(envs)
    fill(Collector, SerialEnv, buffer, envs, frames_per_batch=7 * envs, total_frames=40)
    check_streams(buffer, envs)
    check_returns(buffer)


@pytest.mark.parametrize("extends", [True, False])
def test_nested_batches_are_collected(extends: bool) -> None:
    buffer = make(4)
    env = SerialEnv(2, [partial(batched, SerialEnv, 0), partial(batched, SerialEnv, 2)])
    with collecting(Collector, [lambda: env], buffer, extend_buffer=extends) as run:
        for _ in run:
            pass
    check_streams(buffer, 4)
    check_returns(buffer)


@pytest.mark.parametrize("collector", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("envs", [1, ENVS])
def test_split_trajectories_are_joined_again(envs: int, collector: Any) -> None:
    num_envs = envs * WORKERS[collector]
    buffer = make(num_envs)
    fill(collector, SerialEnv, buffer, envs, split_trajs=True)
    assert ("collector", "mask") not in buffer.storage.data.keys(True)
    check_streams(buffer, num_envs)
    check_returns(buffer)


def test_complete_trajectories_are_stored_as_episodes() -> None:
    buffer = make(1)
    fill(Collector, SerialEnv, buffer, trajs_per_batch=2)
    check_returns(buffer)
    ends = streams(buffer)[0]["next", "done"].flatten()
    assert ends[-1]
    shared = make(2)
    fill(MultiSyncCollector, SerialEnv, shared, trajs_per_batch=2)
    check_returns(shared)
    assert [len({number[0] // ENVS for number in numbers(rows)}) for rows in streams(shared)] == [1, 1]


@pytest.mark.parametrize("collector", WORKERS)
def test_collectors_that_were_started_fill_the_buffer_meanwhile(collector: Any) -> None:
    num_envs = ENVS * WORKERS[collector]
    buffer = make(num_envs)
    makers = [partial(batched, SerialEnv, worker * ENVS) for worker in range(WORKERS[collector])]
    with collecting(collector, makers, buffer, total_frames=-1) as run:
        run.start()
        deadline = time.monotonic() + 60
        while buffer.write_count < 96 or not (buffer.writer.positions > 8).all():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with buffer.lock_if_shared():  # the collector still runs
            if buffer.shared:
                check_streams(buffer, num_envs)
                check_returns(buffer)
        run.async_shutdown()
    check_streams(buffer, num_envs)
    check_returns(buffer)


def test_second_collector_takes_over_the_rings_of_the_first() -> None:
    buffer = make(4)
    for _ in range(2):
        fill(MultiSyncCollector, SerialEnv, buffer, total_frames=32)
    positions = buffer.writer.positions.tolist()
    assert positions == [16] * 4
    begins = [buffer.writer.index.begin(torch.tensor([env]), torch.tensor([8])).item() for env in range(4)]
    assert begins == [8] * 4
    assert all(len({number[0] // ENVS for number in numbers(rows[:8])}) == 1 for rows in streams(buffer))


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_that_were_filled_or_built_shared_are_collected_into(shared: bool) -> None:
    buffer = make(4, PrioritizedSampler(4 * LENGTH, 0.7, 0.5), shared=shared)
    fill(MultiSyncCollector, SerialEnv, buffer)
    check_streams(buffer, 4)
    check_returns(buffer)
    again = make(4, PrioritizedSampler(4 * LENGTH, 0.7, 0.5))
    again.load_state_dict(buffer.state_dict())
    fill(MultiSyncCollector, SerialEnv, again, total_frames=32)
    check_returns(again, may_cut=True)


@pytest.mark.parametrize("kind", ["episodic", "model-based"])
def test_other_buffers_are_told_the_time_dimension_too(kind: str) -> None:
    buffer: Any = MBReplayBuffer(LENGTH, time_dim=1)
    if kind == "episodic":
        buffer = EpisodicReplayBuffer(None, ENVS, LENGTH, record_episodic_return=True, gamma=0.9, time_dim=1)
    fill(Collector, SerialEnv, buffer)
    check_streams(buffer, ENVS)


def test_buffer_without_a_time_dimension_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="time_dim=-1"):
        fill(Collector, SerialEnv, make(ENVS, time_dim=None))
    with pytest.raises(ValueError, match="num_envs="):
        fill(Collector, SerialEnv, make(ENVS + 1))
    fill(Collector, SerialEnv, make(ENVS, time_dim=None), total_frames=8, extend_buffer=False)


def first_action() -> TensorDictModule:
    return TensorDictModule(lambda seen: (torch.arange(3) == 0).expand(seen.shape).long(), ["observation"], ["action"])


def test_collector_with_only_a_policy_factory_needs_an_example() -> None:
    example = make(ENVS)
    fill(Collector, SerialEnv, example)
    buffer = make(4)
    with pytest.raises(ValueError, match=r"share\(example=row\)"):
        fill(MultiSyncCollector, SerialEnv, buffer, policy_factory=first_action)
    copy.deepcopy(buffer).share(example=example.storage.get(torch.tensor([0])))
    buffer.share(example=example.storage.get(torch.tensor([0])))
    fill(MultiSyncCollector, SerialEnv, buffer, policy_factory=first_action)
    check_streams(buffer, 4)
    check_returns(buffer)


def test_rollout_buffer_is_not_filled_by_several_workers() -> None:
    buffer = RolloutBuffer(8, num_envs=ENVS, time_dim=1)
    fill(Collector, SerialEnv, buffer, total_frames=16)
    assert buffer.storage.num_steps == 8
    with pytest.raises(ValueError, match="ExperienceBuffer"):
        fill(MultiSyncCollector, SerialEnv, RolloutBuffer(8, num_envs=ENVS, time_dim=1))
