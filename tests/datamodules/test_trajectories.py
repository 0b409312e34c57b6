"""Trajectories that a user's collector cuts without a flag are not joined in any kind of storage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv

from kit.fake_ray import FakeRay, fake_ray
from kit.replay import fit, replay_data
from torchrl_lightning import ExperienceBuffer, ReplayService, RingStorage, RingWriter, UniformSampler
from torchrl_lightning.environments.env_ids import TrajectorySplitter

STEPS = 5


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray() as fake:
        yield fake


class Kept(ReplayService):
    """Store the buffers for the test at the shutdown."""

    shards_of: list[ExperienceBuffer]

    def shutdown(self) -> None:
        if self.running:
            self.settle()
            type(self).shards_of = [actor.buffer for actor in self._actors]
        super().shutdown()

    def settle(self) -> None:
        self._send_pending()


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def collector(policy: Any, envs: int) -> Collector:
    env = cart_pole() if envs == 1 else SerialEnv(envs, cart_pole)
    options = {"total_frames": -1, "reset_at_each_iter": True, "auto_register_policy_transforms": False}
    return Collector(env, policy, frames_per_batch=STEPS * envs, **options)


def make_buffer(num_envs: int, checks: bool) -> ExperienceBuffer:
    writer = RingWriter(num_envs, check_successors=checks)
    return ExperienceBuffer(storage=RingStorage(400), sampler=UniformSampler(), writer=writer)


def begins_of(buffer: ExperienceBuffer) -> list[tuple[list[int], list[bool]]]:
    """Return the begin of the episode and the done flag of each step, for each environment with steps."""
    found = []
    for env, filled in enumerate(buffer.writer.filled.tolist()):
        if not filled:  # an environment of another shard
            continue
        position = torch.arange(filled)
        ids = torch.full_like(position, env)
        rows = buffer.storage.get(buffer.writer.cell(ids, position))
        found.append((buffer.writer.index.begin(ids, position).tolist(), rows["next", "done"].flatten().tolist()))
    return found


@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("shards", [0, 1, 2])
def test_torchrls_collector_that_resets_at_each_batch(envs, checks, shards, ray, tmp_path) -> None:
    if shards == 2 and envs == 1:
        envs = 4
    settings: dict[str, Any] = {"source": partial(Kept, name="it", shards=shards)} if shards else {}
    settings |= {"collector": partial(collector, envs=envs), "num_envs": envs, "frames_per_batch": STEPS * envs}
    data = replay_data(partial(make_buffer, checks=checks), **settings)
    fit(tmp_path, data, max_epochs=1)
    buffers = Kept.shards_of if shards else [data.buffer]
    assert sum(len(begins_of(buffer)) for buffer in buffers) == envs
    for buffer in buffers:
        for begins, done in begins_of(buffer):
            assert len(begins) >= 10
            expected, begin = [], 0
            for step in range(len(begins)):
                begin = step if step % STEPS == 0 or (step and done[step - 1]) else begin
                expected.append(begin)
            assert begins == expected


def rollout(ids: list[list[int]], done: list[list[int]] | None = None) -> TensorDict:
    trajectories = torch.tensor(ids)
    flags = torch.zeros(*trajectories.shape, 1, dtype=torch.bool)
    if done is not None:
        flags = torch.tensor(done).bool().unsqueeze(-1)
    entries = {"collector": {"traj_ids": trajectories}, "next": {"done": flags}}
    return TensorDict(entries, trajectories.shape, names=[None, "time"])


@pytest.mark.parametrize("form", [(), (1,)])
def test_rollouts_are_split_where_ids_change_without_a_flag(form: tuple[int, ...]) -> None:
    trajectories, rings = TrajectorySplitter(), torch.tensor([3, 1])

    def split(ids: list[list[int]], done: list[list[int]] | None = None) -> Any:
        data = rollout(ids, done)
        data["collector", "traj_ids"] = data["collector", "traj_ids"].view(*data.shape, *form)
        return trajectories.split(data, rings)

    assert split([[0, 0, 0], [1, 1, 1]]) == [(0, 3, [])]
    assert split([[0, 0, 0], [2, 2, 2]]) == [(0, 3, [1])]
    assert split([[0, 4, 4], [2, 2, 5]]) == [(0, 1, []), (1, 2, [3]), (2, 3, [1])]
    assert split([[4, 4, 6], [5, 7, 7]], [[0, 1, 0], [1, 0, 0]]) == [(0, 3, [])]
    assert trajectories.split(TensorDict({}, [2, 3]), rings) == [(0, 3, [])]


@pytest.mark.parametrize("shards", [1, 2])
def test_service_cuts_trajectories_on_request(shards: int, ray: FakeRay) -> None:
    service = Kept(
        ExperienceBuffer(storage=RingStorage(80), sampler=UniformSampler(), num_envs=4), name="it", shards=shards
    )
    rows = rollout([[0] * 2] * 4).exclude("collector")
    service.extend(rows)
    service.cut(torch.tensor([1, 2]))
    service.extend(rows)
    service.extend(rows)
    service.cut()
    service.extend(rows[:2], torch.tensor([0, 3]))
    service.extend(rows)
    service.shutdown()
    begins = [part for buffer in Kept.shards_of for part, _ in begins_of(buffer)]
    often, later = [0] * 2 + [2] * 4 + [6] * 2, [0] * 6 + [6] * 4
    assert begins == [later, often, often, later]


@pytest.mark.parametrize("checks", [False, True])
def test_service_compares_successors_as_its_buffer_would(checks: bool, ray: FakeRay) -> None:
    writer = RingWriter(1, check_successors=checks)
    service = Kept(ExperienceBuffer(storage=RingStorage(80), sampler=UniformSampler(), writer=writer), name="it")
    for start in (0, 3, 20):
        number = torch.arange(start, start + 3.0).view(1, 3, 1)
        rows = rollout([[0] * 3]).exclude("collector")
        rows["n"], rows["next", "n"] = number, number + 1
        service.extend(rows)
    service.shutdown()
    ((begins, _),) = begins_of(Kept.shards_of[0])
    assert begins == [0] * 6 + [6 if checks else 0] * 3


def test_trajectory_ids_cut_rows_in_a_service(ray: FakeRay) -> None:
    service = Kept(ExperienceBuffer(storage=RingStorage(80), sampler=UniformSampler(), num_envs=2), name="it")
    for ids in ([[0, 0], [1, 1]], [[0, 0], [2, 3]]):
        service.extend(rollout(ids))
    service.shutdown()
    assert [begins for begins, _ in begins_of(Kept.shards_of[0])] == [[0] * 4, [0, 0, 2, 3]]
