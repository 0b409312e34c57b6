"""What is written into a replay service is in it once and in order, whatever dies; batches are those of its buffer."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict

from kit.fake_ray import FakeRay
from kit.replay import dqn, fit, replay_data
from kit.service import ENVS, SAMPLERS, STEPS, service_buffer, service_rows, shard_of, stored_times
from torchrl_lightning import (
    DQNModule,
    RayCollector,
    ReplayService,
)
from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.rank_metrics import Mean, reduce_metrics
from torchrl_lightning.ray.cluster import ServiceFault


def unacknowledged(writer: Any) -> list[Any]:
    """Return what a writer keeps for each shard."""
    return [item._unacknowledged for item in writer._writers]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_equal_the_buffers_batches(sampler: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    service, reference = ReplayService(service_buffer(sampler), name="it", batches_per_call=3), service_buffer(sampler)
    for number in range(5):
        rows = service_rows(number)
        service.extend(rows)
        reference.extend(rows)
        rows.zero_()  # a collector may reuse its memory
    assert len(service) == 40
    for _ in range(7):
        batch, expected = service.draw(6), reference.draw(6)
        assert batch.names == expected.names
        assert (batch.exclude("source") == expected).all()
        batch["time"].zero_()  # memory of its own
    assert service.metrics()["replay/size"] == 40
    assert reduce_metrics([service.metrics()] * 2)["replay/size"] == 80  # each of two ranks has a service
    with monkeypatch.context() as patch:
        patch.setattr(service, "join", True)  # the ranks share one service
        assert reduce_metrics([service.metrics()] * 2)["replay/size"] == 40
    draws = service.metrics()["replay/samples_per_insert"]
    ranks = [{"draws": draws}, {"draws": Mean(0.0, 3 * draws.weight)}]
    assert reduce_metrics(ranks)["draws"] == pytest.approx(draws / 4)
    service.shutdown()
    assert not ray.actors


def test_batch_age_counts_updates_since_the_request(ray: FakeRay) -> None:
    service = ReplayService(service_buffer(), name="it", batches_per_call=2, calls_in_flight=2)
    service.extend(service_rows(0))
    ages = []
    for _ in range(8):
        service.draw(4)
        ages.append(service.metrics()["replay/batch_age"])
    assert ages == [0, 1, 2, 3, 4, 5, 4, 5]


def test_priorities_are_returned_with_their_write_versions(ray: FakeRay, tmp_path: Path) -> None:
    service = ReplayService(
        service_buffer("prioritized"), name="it", folder=tmp_path, batches_per_call=1, calls_in_flight=1
    )
    service.extend(service_rows(0))
    service.state_dict()

    def give(priority: float, batch: TensorDict) -> list[float]:
        batch["td_error"] = torch.full((16,), priority)
        service.update_tensordict_priority(batch)
        service.draw(16)
        service.draw(16)
        table = shard_of(ray).buffer.sampler.table
        return table.priorities[batch["index"].unique()].unique().tolist()

    batch = service.draw(16)
    assert give(3.0, batch) == [3.0]
    shard_of(ray).die()
    assert give(7.0, batch) != [7.0]  # of an earlier life: a cell may hold another row
    assert give(5.0, service.draw(16)) == [5.0]


@pytest.mark.parametrize("sampler", ["prioritized", "prioritized windows"])
def test_errors_of_several_critics_are_returned_reduced(sampler: str, ray: FakeRay) -> None:
    service = ReplayService(service_buffer(sampler), name="it", batches_per_call=1, calls_in_flight=1)
    for number in range(3):
        service.extend(service_rows(number))
    batch = service.draw(8)
    batch["td_error"] = torch.rand(*batch.shape, 2)
    service.update_tensordict_priority(batch)
    service.draw(8)
    service.draw(8)
    table = shard_of(ray).buffer.sampler.table
    first = batch["index"].reshape(8, -1)[:, 0]
    largest = batch["td_error"].flatten(1).amax(1)
    last = dict(zip(first.tolist(), largest.tolist(), strict=True))
    assert {cell: float(table.priorities[cell]) for cell in last} == pytest.approx(last)


def test_rewritten_entries_are_returned(ray: FakeRay) -> None:
    service = ReplayService(service_buffer(), name="it", batches_per_call=1, calls_in_flight=1)
    service.extend(service_rows(0))
    batch = service.draw(64)
    batch["time"] += 100
    service.write_back(batch, ["time"])
    service.state_dict()
    service.draw(64)
    service.draw(64)
    assert all(step >= 100 for steps in stored_times(ray).values() for step in steps)


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_written_once_and_in_order_after_failures(seed: int, ray: FakeRay, tmp_path: Path) -> None:
    draw, shards = random.Random(seed), 1 + seed % 2
    service = ReplayService(service_buffer(), name="it", shards=shards, folder=tmp_path, unacknowledged=3)
    writers = [service.writer(f"worker {number}") for number in range(2)]
    written, replaced = [0, 0], {-1}
    for _ in range(60):
        kind = draw.random()
        if kind < 0.75:
            worker = draw.randrange(2)
            rows = service_rows(written[worker], envs=2, first=2 * worker).transpose(0, 1)
            arrays = {key: value.contiguous().numpy() for key, value in rows.items(True, True)}
            writers[worker].write(arrays, [2 * worker, 2 * worker + 1])
            written[worker] += 1
            assert all(len(item) <= 3 for item in unacknowledged(writers[worker]))
        elif kind < 0.9:
            shard_of(ray, draw.randrange(shards)).die()
        elif kind < 0.95:
            service.state_dict()
        else:  # its actor has died: what it had kept is lost, unless a snapshot holds it
            worker = draw.randrange(2)
            writers[worker].wait_until_written()
            writers[worker] = service.writer(f"worker {worker}")
            replaced.add(worker)
    for writer in writers:
        writer.wait_until_written()
    assert len(service) <= sum(written) * 2 * STEPS
    steps_of_env: dict[int, list[int]] = {}
    for number in range(shards):
        steps_of_env |= stored_times(ray, number)
    for env, steps in steps_of_env.items():
        assert steps == sorted(set(steps))
        assert set(steps) <= set(range(written[env // 2] * STEPS))
        assert len(steps) == written[env // 2] * STEPS or env // 2 in replaced


def test_acknowledged_rows_are_never_lost(ray: FakeRay, tmp_path: Path) -> None:
    service = ReplayService(service_buffer(), name="it", folder=tmp_path, unacknowledged=2)
    for number in range(9):
        service.extend(service_rows(number))
        shard_of(ray).die()
        ((first, *_),) = unacknowledged(service._writer)
        acknowledged = first[0]
        for steps in stored_times(ray).values():
            assert steps == list(range(len(steps)))
            assert len(steps) >= acknowledged * STEPS
    assert service.state_dict()["snapshots"]
    assert stored_times(ray) == {env: list(range(9 * STEPS)) for env in range(ENVS)}
    assert len(list((tmp_path / "shard_0").iterdir())) <= 4  # the newest two of each kind


@pytest.mark.parametrize("elsewhere", [False, True])
def test_run_continues_from_its_checkpoint(elsewhere: bool, ray: FakeRay, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batches_per_call": 1, "calls_in_flight": 1}
    first = ReplayService(service_buffer("prioritized"), name="it", folder=tmp_path / "first", **settings)
    for number in range(3):
        first.extend(service_rows(number))
    state = first.state_dict()
    expected = [first.draw(8).exclude("source") for _ in range(2)]
    first.extend(service_rows(3))  # of a future that another run does not have
    first.state_dict()
    first.shutdown()
    folder = tmp_path / ("second" if elsewhere else "first")
    second = ReplayService(
        service_buffer("prioritized", generator=torch.Generator().manual_seed(1)), name="it", folder=folder, **settings
    )
    second.load_state_dict(state)
    for batch in expected:
        assert (second.draw(8).exclude("source") == batch).all()
    assert stored_times(ray) == {env: list(range(3 * STEPS)) for env in range(ENVS)}
    shard_of(ray).die()  # before it has a snapshot of its own
    assert stored_times(ray) == {env: list(range(3 * STEPS)) for env in range(ENVS)}
    assert second.state_dict() == {"folder": str(folder), "snapshots": ["checkpoint_00000001"]}
    assert len(list((tmp_path / "first" / "shard_0").iterdir())) == 2
    with pytest.raises(ValueError, match="runs already"):
        second.load_state_dict(state)


def test_writer_waits_for_learners_and_they_for_rows(ray: FakeRay) -> None:
    limits: dict[str, Any] = {"samples_per_insert": 1.0, "error_buffer": 16.0, "min_size": 8}
    service = ReplayService(service_buffer(), name="it", batches_per_call=1, calls_in_flight=1, **limits)
    drawing = threading.Thread(target=service.draw, args=(8,))
    drawing.start()
    other = ReplayService(service_buffer(), name="it", join=True, **limits)
    while not ray.actors or not shard_of(ray).calls:
        time.sleep(0.01)
    other.extend(service_rows(0))
    drawing.join(20)
    assert not drawing.is_alive()
    writer = threading.Thread(target=lambda: [other.extend(service_rows(number)) for number in range(1, 9)])
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    size, inserted, drawn = ray.get(shard_of(ray).status.remote())
    assert -16 <= (inserted - 8) - drawn <= 16
    while writer.is_alive():
        service.draw(8)
        _, inserted, drawn = ray.get(shard_of(ray).status.remote())
        assert -16 <= (inserted - 8) - drawn <= 16
    assert size <= inserted


def test_bound_that_is_too_small_raises_in_waiting_calls(ray: FakeRay) -> None:
    limits: dict[str, Any] = {"samples_per_insert": 1.0, "error_buffer": 8.0, "min_size": 8}
    learner = ReplayService(service_buffer(), name="it", batches_per_call=1, calls_in_flight=1, **limits)
    with pytest.raises(UserError, match="runs in this cluster to join"):
        ReplayService(service_buffer(), name="it", join=True, **limits).extend(service_rows(0))
    learner.extend(service_rows(0))
    writer, refused = ReplayService(service_buffer(), name="it", join=True, **limits), []

    def write() -> None:
        try:
            for number in range(1, 9):
                writer.extend(service_rows(number))
        except UserError as error:
            refused.append(str(error))

    waiting = threading.Thread(target=write)
    waiting.start()
    while not shard_of(ray).instance._condition._waiters:
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"error_buffer=8.*8.*16"):
        learner.draw(16)
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(refused) == 1
    assert "Set at least 12" in refused[0]


def test_shards_divide_the_environments_and_serve_in_turn(ray: FakeRay) -> None:
    service = ReplayService(service_buffer("prioritized"), name="it", shards=2, batches_per_call=1)
    service.extend(service_rows(0))
    service.extend(service_rows(1).exclude("nothing")[torch.tensor([3, 1])], torch.tensor([3, 1]))
    service.state_dict()
    service._send_pending()
    assert stored_times(ray, 0) == {0: [0, 1], 1: [0, 1, 2, 3]}
    assert stored_times(ray, 1) == {2: [0, 1], 3: [0, 1, 2, 3]}
    batches = [service.draw(16) for _ in range(4)]
    assert [sorted({env // 2 for env in batch["env"].tolist()}) for batch in batches] == [[0], [1], [0], [1]]
    for batch in batches:
        batch["td_error"] = torch.full((16,), 2.0 + batch["env"][0] // 2)
        service.update_tensordict_priority(batch)
    service._send_pending()
    for number in range(2):
        priorities = shard_of(ray, number).buffer.sampler.table.priorities
        assert 2.0 + number in priorities.tolist()
        assert 3.0 - number not in priorities.tolist()
    drawing = [shard_of(ray, number).buffer.generator.initial_seed() for number in range(2)]
    assert drawing[0] != drawing[1]


def test_kept_service_continues_with_one_later_run_at_a_time(ray: FakeRay) -> None:
    first = ReplayService(service_buffer(), name="it", keep=True)
    first.extend(service_rows(0))
    with pytest.raises(ServiceFault, match="name='it'"):
        ReplayService(service_buffer(), name="it", keep=True).draw(4)
    first.state_dict()
    first.shutdown()
    second = ReplayService(service_buffer(), name="it", keep=True)
    assert second.draw(4).shape == (4,)
    joined = ReplayService(service_buffer(), name="it", join=True)
    assert joined.draw(4).shape == (4,)
    joined.shutdown()
    second.shutdown()
    assert set(ray.actors) == {("torchrl_lightning", "it/0")}


def torn(folder: Path) -> None:
    (snapshot,) = (folder / "shard_0").iterdir()
    (binary,) = snapshot.glob("*.bin")
    binary.write_bytes(binary.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "it"}, "A replay service name='it' runs in this cluster already. Set another name"),
        ({"name": "other", "join": True}, "No replay service name='other' runs in this cluster to join. Start it"),
        ({"name": "it", "join": True, "size": 800}, "name='it' has max_size 400, but this run has 800"),
        (
            {"name": "it", "join": True, "sampler": "prioritized"},
            "has sampler 'UniformSampler', but this run has 'Prior",
        ),
        ({"name": "new", "folder": True}, r"folder=.*another replay service.*ckpt_path"),
        (
            {"name": "new", "folder": True, "state": "checkpoint_00000007"},
            "0007 cannot be read: .* no saved state",
        ),
        (
            {"name": "new", "folder": True, "state": "checkpoint_00000000", "spoil": torn},
            "cannot be read: .* trunc",
        ),
    ],
)
def test_incompatible_service_is_refused_in_one_line(
    change: dict[str, Any], message: str, ray: FakeRay, tmp_path: Path
) -> None:
    first = ReplayService(service_buffer(), name="it", folder=tmp_path)
    first.extend(service_rows(0))
    first.state_dict()
    parts = {name: change.pop(name) for name in ("size", "sampler") if name in change}
    state, spoil = change.pop("state", None), change.pop("spoil", None)
    if change.pop("folder", False):
        change["folder"] = tmp_path
    second = ReplayService(service_buffer(**parts), **change)
    if spoil is not None:
        spoil(tmp_path)
    if state is not None:
        second.load_state_dict({"folder": str(tmp_path), "snapshots": [state]})
    with pytest.raises(ServiceFault, match=message) as error:
        second.draw(4)
    assert "\n" not in str(error.value)


def test_different_version_is_refused(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ReplayService(service_buffer(), name="it", keep=True).writer("a")
    versions = {"Python": "3.99.0"}
    monkeypatch.setattr("torchrl_lightning.ray.service.installed_versions", lambda: versions)
    with pytest.raises(ServiceFault, match=r"has Python '3\.\S+', but this run has '3.99.0'"):
        ReplayService(service_buffer(), name="it", join=True).draw(4)


def test_error_of_the_start_is_raised(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_lightning.ray.service.zlib.compress", lambda _: b"nothing")
    with pytest.raises(ServiceFault, match="The replay service cannot start: error: "):
        ReplayService(service_buffer(), name="it").draw(4)


def test_rows_with_other_entries_are_refused(ray: FakeRay) -> None:
    service = ReplayService(service_buffer(), name="it")
    service.extend(service_rows(0))
    service.extend(service_rows(1).exclude("env"))
    with pytest.raises(ServiceFault, match=r"The replay service rejected a request: .*env") as error:
        service.extend(service_rows(2))
    assert "\n" not in str(error.value)


def test_killed_service_does_not_restart(ray: FakeRay) -> None:
    service = ReplayService(service_buffer(), name="it")
    service.extend(service_rows(0))
    ray.kill(shard_of(ray))
    with pytest.raises(ServiceFault, match="has ended and did not restart"):
        service.draw(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shards": 3}, "shards.*4.*got 3"),
        ({"keep": True}, "name must be set with keep=True"),
        ({"batches_per_call": 0}, "batches_per_call must"),
        ({"calls_in_flight": 0}, "calls_in_flight must"),
        ({"unacknowledged": 0}, "unacknowledged must"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayService(service_buffer(), **settings)


def test_nonempty_buffer_is_refused() -> None:
    full = service_buffer()
    full.extend(service_rows(0))
    with pytest.raises(ValueError, match=r"buffer must be empty.*8"):
        ReplayService(full)


# ---------------------------------------------------------------------- as the source of a run


def served(folder: Path | None = None, sampler: str = "prioritized", **settings: Any) -> Any:
    """A DataModule whose rows are in a service, and of which each batch is asked for when it is drawn."""
    one_by_one = {"batches_per_call": 1, "calls_in_flight": 1}
    source = partial(ReplayService, name="it", folder=folder, **one_by_one)
    return replay_data(lambda num_envs: service_buffer(sampler, num_envs=num_envs), source=source, **settings)


def test_run_writes_into_the_service_and_learns_from_it(ray: FakeRay, tmp_path: Path) -> None:
    history: list[dict[str, float]] = []

    class Watching(DQNModule):
        def on_train_epoch_end(self) -> None:
            history.append(self.trainer.datamodule.metrics())

    data = served(tmp_path / "service")
    fit(tmp_path, data, dqn(Watching))
    assert (data.frames, data.updates, len(data.buffer)) == (60, 20, 0)
    assert [item["replay/size"] for item in history] == [48.0, 58.0]  # of the batch that was asked for before the last
    assert history[-1]["replay/batch_age"] == 1.0
    assert "train/return" in history[-1]
    assert not ray.actors  # it has ended with the run


def test_run_with_a_service_folder_resumes_with_its_rows(ray: FakeRay, tmp_path: Path) -> None:
    data = served(tmp_path / "service")
    _, run = fit(tmp_path, data, max_epochs=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    resumed = served(tmp_path / "service")
    fit(tmp_path, resumed, ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    assert (resumed.frames, resumed.updates) == (60, 20)
    assert resumed.metrics()["replay/size"] == 58.0


@pytest.mark.parametrize("kept", ["inside", "beside"])
def test_checkpoints_of_one_moment_share_a_snapshot(kept: str, ray: FakeRay, tmp_path: Path) -> None:
    folder, last = tmp_path / "service", tmp_path / "last.ckpt"
    written: list[int] = []

    class SavingOften(Callback):
        """Save three checkpoints after each epoch; the process dies before the second ``last.ckpt`` is written."""

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for name in ("best", "other"):
                trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            written.append(len(list(folder.glob("shard_0/checkpoint_*"))))
            if trainer.current_epoch:
                trainer.datamodule.state_dict()
                raise RuntimeError("died")
            trainer.save_checkpoint(last)

    settings: dict[str, Any] = {"checkpoint_buffer": kept}
    with pytest.raises(RuntimeError, match="died"):
        fit(tmp_path, served(folder, **settings), callbacks=[SavingOften()])
    assert written == [1, 2]
    resumed = served(folder, **settings)
    fit(tmp_path, resumed, ckpt_path=last, max_epochs=2)
    assert (resumed.frames, resumed.updates) == (60, 20)


def test_resumed_run_without_a_service_folder_warns_that_it_starts_empty(
    ray: FakeRay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, run = fit(tmp_path, served(), max_epochs=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    resumed = served()
    fit(tmp_path, resumed, ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    assert "no snapshot of the replay service" in caplog.text
    assert resumed.metrics()["replay/size"] == 8.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "demonstrations"}, "dataset must be None with ReplayService"),
        (
            {"source": partial(ReplayService, samples_per_insert=1.0, error_buffer=9.0)},
            "samples_per_insert must be None, .* frames_per_update",
        ),
        (
            {"normalize_reward": True, "collector": partial(RayCollector, num_collectors=1)},
            "normalize_reward must be False .* ReplayService",
        ),
    ],
)
def test_settings_incompatible_with_a_service_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "dataset" in settings:
        settings = {**settings, "warmup_frames": 0}
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, served(**settings) if "source" not in settings else replay_data(**settings))


def test_programs_that_join_a_service_write_each_rollout_once(ray: FakeRay) -> None:
    first = ReplayService(service_buffer(), name="it")
    programs = [first, *(ReplayService(service_buffer(), name="it", join=True) for _ in range(2))]
    env_ids = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3])]
    for number in range(6):
        for program, ids in zip(programs, env_ids, strict=True):
            program.extend(service_rows(number)[ids], ids)
    for program in programs:
        program._writer.wait_until_written()
    assert stored_times(ray) == {env: list(range(12)) for env in range(ENVS)}


@pytest.mark.parametrize("shards", [1, 2])
def test_rejected_rollout_is_dropped_and_later_rollouts_are_written(shards: int, ray: FakeRay) -> None:
    service = ReplayService(service_buffer("sequences"), name="it", shards=shards)
    refusals = 0
    for number in range(8):
        rows = service_rows(number)
        try:
            service.extend(rows.exclude("env") if number == 2 else rows)
        except ServiceFault:
            refusals += 1
    service._writer.wait_until_written()
    assert refusals == shards
    for shard in range(shards):
        for steps in stored_times(ray, shard).values():
            assert steps == [*range(2 * STEPS), *range((4 + shard) * STEPS, 8 * STEPS)]
    for _ in range(20):  # no window joins the rows around the rejected ones
        batch = service.draw(16)
        assert (torch.where(batch["mask"][:, 1:], batch["time"].diff(dim=1), 1) == 1).all()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("ids", [[4, 5], [-1, 0], [0, 0], [0, 1, 2, 3, 4]])
def test_unknown_environments_are_refused_before_rows_are_sent(ids: list[int], shards: int, ray: FakeRay) -> None:
    service = ReplayService(service_buffer(), name="it", shards=shards)
    with pytest.raises(ValueError, match=r"env_ids must be different numbers in \[0, 4\), got "):
        service.extend(service_rows(0, envs=len(ids)), torch.tensor(ids))
    assert not ray.actors
