"""A replay service without a folder begins empty when its actor dies; writers and readers continue."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.fake_ray import FakeRay, RayActorError, sent
from kit.replay import dqn, fit, replay_data
from kit.service import (
    ENVS,
    SAMPLERS,
    STEPS,
    service_arrays,
    service_buffer,
    service_rows,
    shard_of,
    stored_times,
)
from torchrl_lightning import DQNModule, ExperienceBuffer, ReplayService, RingStorage, SequenceSampler
from torchrl_lightning.ray.cluster import ServiceFault

ONE_BY_ONE: dict[str, Any] = {"batches_per_call": 1, "calls_in_flight": 1}
ROWS = ENVS * STEPS


def lost_rows(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the numbers of lost rows in the warnings so far, and forget the warnings."""
    found = re.findall(r"begins empty: (\d+) rows of writer", caplog.text)
    caplog.clear()
    return [int(number) for number in found]


def wait_until_written(service: ReplayService) -> None:
    """Wait until a service has confirmed its rows."""
    assert service._writer is not None
    service._writer.wait_until_written()


@pytest.mark.parametrize("has_folder", [False, True])
def test_writer_that_was_sent_to_another_process_writes(has_folder: bool, ray: FakeRay, tmp_path: Path) -> None:
    folder = tmp_path if has_folder else None
    writer = sent(ReplayService(service_buffer(), name="it", folder=folder, unacknowledged=2).writer("a"))
    for number in range(5):
        writer.write(service_arrays(number, list(range(ENVS))), list(range(ENVS)))
    writer.wait_until_written()
    assert stored_times(ray) == {env: list(range(5 * STEPS)) for env in range(ENVS)}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_writer_and_reader_continue_after_a_death(
    sampler: str, shards: int, ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    service = ReplayService(service_buffer(sampler), name="it", shards=shards, **ONE_BY_ONE)
    for number in range(10):
        service.extend(service_rows(number))
    service.draw(4)
    shard_of(ray, shards - 1).die()
    for number in range(10, 20):
        service.extend(service_rows(number))
    for _ in range(2 * shards):
        assert service.draw(4).shape[0] == 4
    assert lost_rows(caplog) == [10 * ROWS // shards]
    assert stored_times(ray, shards - 1) == {
        env: list(range(10 * STEPS, 20 * STEPS)) for env in range(ENVS - ENVS // shards, ENVS)
    }
    assert service.metrics()["replay/size"] == (10 if shards == 1 else 15) * ROWS


def test_overwritten_rows_do_not_count_as_lost(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    service = ReplayService(service_buffer(size=40), name="it")
    for number in range(10):
        service.extend(service_rows(number))
    service.extend(service_rows(0)[:1], torch.tensor([0]))
    wait_until_written(service)
    shard_of(ray).die()
    service.extend(service_rows(10))
    service.extend(service_rows(11))
    assert lost_rows(caplog) == [40]
    wait_until_written(service)
    shard_of(ray).die()
    service.extend(service_rows(12))
    service.extend(service_rows(13))
    assert lost_rows(caplog) == [2 * ROWS]
    wait_until_written(service)
    assert stored_times(ray) == {env: list(range(12 * STEPS, 14 * STEPS)) for env in range(ENVS)}


@pytest.mark.parametrize("seed", range(10))
def test_each_lost_row_is_counted_once(seed: int, ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    coin, shards = random.Random(seed), 1 + seed % 2
    service = ReplayService(service_buffer(size=4000), name="it", shards=shards, unacknowledged=3)
    writers = [service.writer(f"worker {number}") for number in range(2)]
    written, lost = [0, 0], 0
    for _ in range(80):
        kind = coin.random()
        worker = coin.randrange(2)
        if kind < 0.75:
            envs = [worker, worker + 2]  # in both shards
            writers[worker].write(service_arrays(written[worker], envs), envs)
            written[worker] += 1
        elif kind < 0.9:
            shard_of(ray, coin.randrange(shards)).die()
        else:
            writers[worker].wait_until_written()
        lost += sum(lost_rows(caplog))
    for writer in writers:
        writer.wait_until_written()
    lost += sum(lost_rows(caplog))
    times: dict[int, list[int]] = {}
    for number in range(shards):
        times |= stored_times(ray, number)
    for env, steps in times.items():
        assert steps == list(range(steps[0], written[env % 2] * STEPS))  # the newest rows, once and in order
    assert sum(map(len, times.values())) + lost == sum(written) * 2 * STEPS


def test_reader_waits_for_writers_and_logs_its_last_size(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    reader = ReplayService(service_buffer("sequences"), name="it", **ONE_BY_ONE)
    writer = reader.writer("worker 0")
    for number in range(4):
        writer.write(service_arrays(number, [0, 1, 2, 3]), [0, 1, 2, 3])
    writer.wait_until_written()
    for _ in range(2):
        reader.draw(4)
    shard_of(ray).die()
    batches: list[Any] = []
    drawing = threading.Thread(target=lambda: batches.extend(reader.draw(4) for _ in range(3)))
    drawing.start()
    for number in range(4, 8):  # the first rollouts are shorter than a window
        writer.write(service_arrays(number, [0, 1, 2, 3]), [0, 1, 2, 3])
    writer.wait_until_written()
    drawing.join(20)
    assert not drawing.is_alive()
    assert all(int(batch["time"].min()) >= 4 * STEPS for batch in batches[1:])
    assert f"begins empty: its rows are lost, {4 * ROWS} at the last draw" in caplog.text
    assert lost_rows(caplog) == [4 * ROWS]


@pytest.mark.parametrize("sampler", ["prioritized", "prioritized windows"])
def test_updates_of_lost_rows_are_dropped(sampler: str, ray: FakeRay) -> None:
    service = ReplayService(service_buffer(sampler), name="it", **ONE_BY_ONE)
    for number in range(4):
        service.extend(service_rows(number))
    batch = service.draw(8)
    shard_of(ray).die()
    for number in range(4, 8):
        service.extend(service_rows(number))
    batch["td_error"] = torch.full(batch.shape, 7.0)
    batch["time"] += 1000
    service.update_tensordict_priority(batch)
    service.write_back(batch, ["time"])
    for _ in range(3):
        service.draw(8)
    assert 7.0 not in shard_of(ray).buffer.sampler.table.priorities.tolist()
    assert stored_times(ray) == {env: list(range(4 * STEPS, 8 * STEPS)) for env in range(ENVS)}


def test_returns_over_several_steps_contain_new_rows_only(ray: FakeRay) -> None:
    service = ReplayService(service_buffer(n_steps=3, gamma=0.5), name="it", **ONE_BY_ONE)
    for number in range(6):
        rows = service_rows(number)
        rows["next", "reward"] += 100.0 if number < 3 else 1.0
        service.extend(rows)
        if number == 2:
            wait_until_written(service)
            shard_of(ray).die()
    rewards = service.draw(64)["next", "reward"]
    assert set(rewards.flatten().tolist()) <= {1.75, 1.5, 1.0}


def test_thread_that_only_draws_from_its_lost_rows_gets_an_error(
    ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    service = ReplayService(service_buffer(), name="it", **ONE_BY_ONE)
    for number in range(3):
        service.extend(service_rows(number))
    wait_until_written(service)
    service.draw(4)  # the next one is already requested
    shard_of(ray).die()
    with pytest.raises(ServiceFault, match=r"^A process that writes and draws waits for itself: at min_size=1 .*\.$"):
        [service.draw(4) for _ in range(3)]
    assert lost_rows(caplog) == [3 * ROWS]
    service.extend(service_rows(3))
    batch = service.draw(4)
    assert int(batch["time"].min()) >= 3 * STEPS


@pytest.mark.parametrize("has_folder", [False, True])
def test_kept_rollouts_are_written_before_a_draw_waits(has_folder: bool, ray: FakeRay, tmp_path: Path) -> None:
    service = ReplayService(service_buffer(), name="it", folder=tmp_path if has_folder else None, **ONE_BY_ONE)
    actor = service.writer("nobody")._writers[0]._shard.actor
    actor._ended = "it died"  # the request is lost
    service.extend(service_rows(0))
    actor._ended = ""
    assert service.draw(4).shape == (4,)


def test_service_that_began_with_another_runs_snapshot_cuts_its_trajectories(
    ray: FakeRay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = ReplayService(service_buffer("sequences"), name="it", folder=tmp_path)
    for number in range(4):
        first.extend(service_rows(number))
    state = first.state_dict()
    first.shutdown()
    second = ReplayService(service_buffer("sequences"), name="it", **ONE_BY_ONE)
    second.load_state_dict(state)
    for number in range(4, 10):
        second.extend(service_rows(number))
        if number == 6:
            wait_until_written(second)
            shard_of(ray).die()
    wait_until_written(second)
    assert f"begins with an earlier snapshot: {3 * ROWS} rows of writer" in caplog.text
    assert stored_times(ray)[0] == [*range(4 * STEPS), *range(7 * STEPS, 10 * STEPS)]
    for _ in range(20):
        batch = second.draw(16)
        steps = torch.where(batch["mask"][:, 1:], batch["time"].diff(dim=1), 1)
        assert (steps == 1).all()


def test_damaged_snapshot_is_an_error_for_writers_and_readers(ray: FakeRay, tmp_path: Path) -> None:
    service = ReplayService(service_buffer(), name="it", folder=tmp_path, unacknowledged=1)
    for number in range(4):
        service.extend(service_rows(number))
    for binary in tmp_path.glob("shard_0/*/*.bin"):
        binary.write_bytes(binary.read_bytes()[:-8])
    shard_of(ray).die()
    for call in (partial(service.extend, service_rows(4)), partial(service.draw, 4), service.state_dict):
        with pytest.raises(ServiceFault, match=r"snapshot .* cannot be read"):
            call()


def test_checkpoint_contains_all_rows_although_its_shard_died(ray: FakeRay, tmp_path: Path) -> None:
    service = ReplayService(service_buffer(), name="it", folder=tmp_path, **ONE_BY_ONE)
    for number in range(4):
        service.extend(service_rows(number))
    actor = shard_of(ray)

    snapshot, deaths = actor.snapshot, []

    def die_first(kind: str) -> Any:
        if deaths:
            return snapshot.remote(kind)
        deaths.append(kind)
        actor.die()  # before it has written the snapshot
        failed: Future[Any] = Future()
        failed.set_exception(RayActorError("it died"))
        return failed

    actor.snapshot = SimpleNamespace(remote=die_first)
    state = service.state_dict()
    service.shutdown()
    resumed = ReplayService(service_buffer(), name="it", folder=tmp_path)
    resumed.load_state_dict(state)
    resumed.writer("nobody")
    assert stored_times(ray) == {env: list(range(4 * STEPS)) for env in range(ENVS)}


# ---------------------------------------------------------------------- as the source of a run


def windows(num_envs: int) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(400), sampler=SequenceSampler(8), num_envs=num_envs)


def data_of(module: Any) -> Any:
    return module.trainer.datamodule


class Killing(DQNModule):
    """Ends the shard's process after each of these updates."""

    kill: Callable[[], None]
    killed_at: tuple[int, ...] = ()

    def on_train_batch_end(self, *args: Any, **settings: Any) -> None:
        if data_of(self).updates in self.killed_at:
            self.kill()


@pytest.mark.parametrize("buffer", ["uniform", "prioritized", "three steps", windows])
@pytest.mark.parametrize("frames_per_update", [2.0, 0.25])
def test_run_collects_new_rows_after_a_death(
    frames_per_update: float,
    buffer: Any,
    ray: FakeRay,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = partial(ReplayService, name="it", folder=None, **ONE_BY_ONE)
    data = replay_data(buffer, source=source, frames_per_update=frames_per_update, updates_per_step=1)
    module = dqn(Killing)
    module.kill, module.killed_at = lambda: shard_of(ray).die(), (3, 11, 16)
    fit(tmp_path, data, module, max_epochs=2)
    assert data.updates == 20
    assert len(lost_rows(caplog)) == 3
    assert data.metrics()["replay/size"] < 40


def test_run_collects_until_the_service_has_its_first_rows(ray: FakeRay, tmp_path: Path) -> None:
    data = replay_data(source=partial(ReplayService, name="it", min_size=50, **ONE_BY_ONE))
    fit(tmp_path, data, max_epochs=1)
    assert data.updates == 10
    assert data.metrics()["replay/size"] >= 50
