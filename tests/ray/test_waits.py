"""A wait for an answer that takes long is logged, with the answer and the resources that an actor lacks."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import torchrl_lightning.ray
from kit.counting import RandomEnv
from kit.fake_ray import Actor, FakeRay, GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError, fake_ray
from kit.worked import constant_policy
from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, RayCollector, ReplayService, RingStorage
from torchrl_lightning.ray._service_actor import ServiceActor
from torchrl_lightning.ray._waits import WaitWarning, demand_of, describe_lack, wait_for
from torchrl_lightning.ray.cluster import ServiceFault, connect

INTERVAL = "torchrl_lightning.ray._waits.WARNING_INTERVAL"


@contextmanager
def on_warning(text: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Call a function as soon as a message with this text is logged; yield all messages."""
    messages: list[str] = []

    class Acting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            if re.search(text, messages[-1]):
                act()

    logger, handler = logging.getLogger("torchrl_lightning"), Acting()
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def test_package_waits_only_in_the_module_that_logs_waits() -> None:
    folder = Path(torchrl_lightning.ray.__path__[0])
    waiting = {path.name for path in folder.glob("*.py") if re.search(r"\bray\.(get|wait)\(", path.read_text())}
    assert waiting == {"_waits.py"}


# ---------------------------------------------------------------------- one answer


def test_each_interval_of_a_wait_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(INTERVAL, 0.0)
    answers: list[Any] = [GetTimeoutError(), GetTimeoutError(), 7]

    def get(ref: str, timeout: float) -> Any:
        assert (ref, timeout) == ("the request", 0.0)
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    ray = SimpleNamespace(get=get, exceptions=FakeRay.exceptions)
    assert wait_for(ray, "the request", WaitWarning(ray, "an answer")) == 7
    assert caplog.messages == ["waiting for an answer for 0 s."] * 2


def test_time_limit_error_of_an_actor_is_not_a_long_wait() -> None:
    class Both(RayTaskError, GetTimeoutError):  # Ray derives the class of an actor's error from both
        pass

    def get(ref: str, timeout: float) -> None:
        raise Both(TimeoutError())

    with pytest.raises(Both):
        wait_for(SimpleNamespace(get=get, exceptions=FakeRay.exceptions), "it", WaitWarning(None, "it"))


@pytest.mark.parametrize(
    ("remote_configs", "lack"),
    [
        ({}, "A has not started and needs 1 CPU; free in the cluster: 0.5 CPU of 4 CPU."),
        ({"num_cpus": 0}, "A has not started; it reserves no resources."),
        (
            {"num_cpus": 0.5, "num_gpus": 1, "memory": 2**30, "resources": {"moon": 2}},
            "A has not started and needs 0.5 CPU and 1 GPU and memory 1 GiB and 2 moon; free in the cluster: 0.5 CPU "
            "of 4 CPU and 0 GPU of 0 GPU and memory 512 MiB of memory 8 GiB and 0 moon of 1 moon.",
        ),
    ],
)
def test_demand_and_free_resources_are_described(remote_configs: Any, lack: str) -> None:
    ray = SimpleNamespace(
        cluster_resources=lambda: {"CPU": 4.0, "memory": 2.0**33, "moon": 1.0},
        available_resources=lambda: {"CPU": 0.5, "memory": 2.0**29},
    )
    assert describe_lack(ray, "A", demand_of(remote_configs)) == lack


def test_cluster_that_does_not_answer_ends_no_wait() -> None:
    def fail() -> None:
        raise RuntimeError("no connection")

    assert "needs 1 CPU; the cluster does not" in describe_lack(
        SimpleNamespace(cluster_resources=fail), "A", {"CPU": 1}
    )


def test_slow_start_of_a_cluster_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray, started = pytest.importorskip("ray"), threading.Event()
    monkeypatch.setattr(INTERVAL, 0.01)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: started.wait(20))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with on_warning("waiting for a new Ray cluster", started.set):
        connect({})
    assert started.is_set()


# ---------------------------------------------------------------------- a replay service


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    monkeypatch.setattr("torchrl_lightning.ray._service_writer._RETRY_INTERVAL", 0.0)
    monkeypatch.setattr("torchrl_lightning.ray._service_writer._WAIT_CHECK_DELAY", 0.0)
    monkeypatch.setattr(INTERVAL, 0.01)
    with fake_ray() as fake:
        yield fake


def rows() -> TensorDict:
    flags = torch.zeros(2, 2, 1, dtype=torch.bool)
    following = {"reward": flags.float(), "done": flags, "terminated": flags, "truncated": flags}
    return TensorDict({"step": torch.zeros(2, 2), "is_init": flags, "next": following}, [2, 2], names=[None, "time"])


def make_service(folder: Path | None = None, **settings: Any) -> ReplayService:
    buffer = ExperienceBuffer(storage=RingStorage(64), sampler=PrioritizedSampler(), num_envs=2)
    return ReplayService(buffer, name="it", folder=folder, **settings)


def write_twice(service: ReplayService) -> None:
    for _ in range(2):
        service.extend(rows())


def give_priorities(service: ReplayService) -> None:
    batch = service.draw(4)
    batch["td_error"] = torch.ones(4)
    service.update_tensordict_priority(batch)
    service.state_dict()


CALLS: dict[str, tuple[str, Callable[[ReplayService], object]]] = {
    "describe": ("the start", lambda service: service.writer("a")),
    "draw": ("batches", lambda service: service.draw(4)),
    "insert": ("the receipt for rollouts of rank 0", write_twice),
    "flush": ("the snapshot for rollouts of rank 0", write_twice),
    "receipt": ("the receipt for rollouts of rank 0", lambda service: service.state_dict()),
    "snapshot": ("the snapshot for a checkpoint", lambda service: service.state_dict()),
    "status": ("the size", len),
    "apply_feedback": ("the feedback for batches", give_priorities),
}


@pytest.mark.parametrize("method", CALLS)
def test_slow_answer_of_a_service_is_logged(
    method: str, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited, call = CALLS[method]
    service = make_service(tmp_path, unacknowledged=1 if method == "flush" else 64)
    if method != "describe":
        service.extend(rows())
        service._writer.wait_until_written()  # type: ignore[union-attr]
    answers, answer = threading.Event(), Actor._called

    async def slow(actor: Actor, name: str, args: Any) -> Any:
        while name == method and not answers.is_set():
            await asyncio.sleep(0.001)
        return await answer(actor, name, args)

    monkeypatch.setattr(Actor, "_called", slow)
    with on_warning(f"waiting for {awaited} of shard 0 of the replay service 'it' for", answers.set) as messages:
        call(service)
    assert answers.is_set()
    assert ("The actor has not started; it reserves no resources." in messages[0]) == (method == "describe")


def test_service_without_a_place_after_its_death_is_logged(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(remote_configs={"num_cpus": 4})
    service.extend(rows())
    service._writer.wait_until_written()  # type: ignore[union-attr]
    has_place, draw = threading.Event(), ServiceActor.draw

    async def restarting(actor: ServiceActor, *args: Any) -> Any:
        if not has_place.is_set():
            raise RayActorError("it restarts")
        return await draw(actor, *args)

    monkeypatch.setattr(ServiceActor, "draw", restarting)
    lack = r"batches of shard 0 .* has not started and needs 4 CPU; free in the cluster: 1 CPU of 4 CPU\.$"
    with on_warning(lack, has_place.set):
        assert service.draw(4).shape == (4,)


def test_service_that_cannot_start_ends_without_retries(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    service, calls = make_service(), []

    async def fail(actor: ServiceActor) -> None:
        calls.append(actor)
        error = RayActorError("The actor died because of an error\n  File x\nModuleNotFoundError: No module named 'x'")
        error.actor_init_failed = True
        raise error

    monkeypatch.setattr(ServiceActor, "describe", fail)
    with pytest.raises(
        ServiceFault, match=r"^shard 0 .*'it' cannot start: ModuleNotFoundError: .*'x'\. Install the same"
    ):
        service.draw(4)
    assert len(calls) == 1


def test_service_that_was_ended_for_its_memory_continues(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    service, calls, draw = make_service(), [], ServiceActor.draw
    service.extend(rows())

    async def killed_once(actor: ServiceActor, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OutOfMemoryError("the memory monitor has ended it")
        return await draw(actor, *args)

    monkeypatch.setattr(ServiceActor, "draw", killed_once)
    assert service.draw(4).shape == (4,)


# ---------------------------------------------------------------------- a cluster that is full


@pytest.fixture
def release(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Another run uses three of the four CPUs until this function is called."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(INTERVAL, 0.2)
    other = ray.remote(num_cpus=3)(type("Other", (), {"ready": lambda self: True})).remote()
    ray.get(other.ready.remote())
    yield lambda: ray.kill(other)
    ray.kill(other)


@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.parametrize("sync", [False, True])
def test_collector_without_a_place_is_logged(sync: bool, release: Callable[[], None]) -> None:
    sizes = {"num_collectors": 2, "num_envs": 2, "frames_per_batch": 8}
    collector = RayCollector(RandomEnv, constant_policy(), seed=0, sync=sync, **sizes)
    lack = r"\[1\].* has not started and needs 1 CPU; free in the cluster: 0 CPU of 4 CPU\.$"
    if sync:
        lack = r"the rollout of collector 1 .* The actor" + lack.removeprefix(r"\[1\].*")
    yielded: list[int] = []
    with on_warning(lack, lambda: release() if yielded else None) as messages:  # when the collector with a place acts
        while 2 not in yielded:
            yielded.append(int(collector.rollout()["collector", "env_ids"][0, 0]))
    collector.shutdown()
    assert [message for message in messages if re.search(lack, message)]
    assert yielded[0] == 0  # the collector that has a place does not wait
    assert collector.deaths == 0


@pytest.mark.filterwarnings("default")  # Ray's own
def test_service_without_a_place_is_logged(release: Callable[[], None]) -> None:
    service = make_service(remote_configs={"num_cpus": 2})
    with on_warning(r"the start of shard 0 .* needs 2 CPU; free in the cluster: 1 CPU of 4 CPU\.$", release):
        service.extend(rows())
    assert service.draw(4).shape == (4,)
    service.shutdown()
