"""The lock between processes, and the recovery after a process dies while it holds the lock."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from kit.forks import as_started
from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning import PrioritizedSampler
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, RingWriter, shared_lock
from torchrl_lightning.replay.shared_lock import SharedLock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SECONDS = 60  # a test fails after this time instead of hanging
ENVS, LENGTH = 3, 4
step = partial(numbered, ENVS, ends=False)


def nothing() -> None:
    """Do nothing on entering and leaving."""


FORK = multiprocessing.get_context("fork")


def started(act: Callable[..., None], *arguments: Any, name: str | None = None) -> Any:
    """Start a forked process and return it."""
    process = FORK.Process(target=act, args=arguments, name=name, daemon=True)
    process.start()
    return process


def hold(lock: Any, held: Any) -> None:
    with lock:
        held.set()
        signal.pause()


def enter(lock: Any, held: Any) -> None:
    with lock, lock:
        held.set()


def test_lock_admits_one_process_until_it_dies() -> None:
    lock, held, other = SharedLock(nothing, nothing), FORK.Event(), FORK.Event()
    holder = started(hold, lock, held)
    assert held.wait(SECONDS)
    waiter = started(enter, lock, other)
    assert not other.wait(0.2)
    os.kill(holder.pid, signal.SIGKILL)
    assert other.wait(SECONDS)
    waiter.join(SECONDS)
    assert waiter.exitcode == 0
    holder.join(SECONDS)
    with lock:
        pass


def test_lock_admits_one_thread_and_is_reentrant() -> None:
    calls: list[str] = []
    lock = SharedLock(lambda: calls.append("in"), lambda: calls.append("out"))
    inside = threading.Event()
    thread = threading.Thread(target=enter, args=(lock, inside))
    with lock:
        thread.start()
        with lock:
            pass
        assert not inside.wait(0.05)
        assert calls == ["in"]
    thread.join(SECONDS)
    assert calls == ["in", "out"] * 2


def test_forked_process_does_not_inherit_a_thread_lock() -> None:
    lock, held, inside, done = SharedLock(nothing, nothing), FORK.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with lock:
            inside.set()
            done.wait(SECONDS)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(SECONDS)
    child = started(enter, lock, held)
    assert not held.wait(0.2)
    done.set()
    thread.join(SECONDS)
    assert held.wait(SECONDS)
    child.join(SECONDS)
    assert child.exitcode == 0


@contextmanager
def stopped_holder(lock: Any) -> Iterator[int]:
    """Stop another process while it holds a lock, or the lock of an object. Kill it on exit."""
    held = FORK.Event()
    holder = started(hold, lock, held)
    try:
        assert held.wait(SECONDS)
        os.kill(holder.pid, signal.SIGSTOP)
        yield holder.pid
    finally:
        holder.kill()
        holder.join(SECONDS)


@pytest.mark.parametrize("way", ["forked", "pickled"])
def test_stopped_holder_is_named_after_the_timeout(way: str) -> None:
    lock = SharedLock(nothing, nothing, timeout=0.2)
    if way == "pickled":
        lock = pickle.loads(as_started(lock))
    with stopped_holder(lock) as pid:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(TimeoutError) as raised, lock:
                pass
            assert 0.2 < time.monotonic() - began < 5
            said = str(raised.value)
            for part in (f"Process {pid} ", "timeout=0.2 ", f"kill -CONT {pid}", f"kill -KILL {pid}"):
                assert part in said
            assert "\n" not in said
        os.kill(pid, signal.SIGKILL)
        lock.timeout = SECONDS
        with lock:
            pass


def test_holder_that_continues_in_time_is_awaited() -> None:
    lock, held, go_on = SharedLock(nothing, nothing, timeout=SECONDS), FORK.Event(), FORK.Event()

    def work() -> None:
        with lock:
            held.set()
            go_on.wait(SECONDS)

    child = started(work)
    assert held.wait(SECONDS)
    threading.Timer(0.1, go_on.set).start()
    with lock:
        assert go_on.is_set()
    child.join(SECONDS)
    assert child.exitcode == 0


def test_error_on_acquire_releases_the_lock() -> None:
    def fail() -> None:
        raise KeyError("no")

    lock = SharedLock(fail, nothing)
    for _ in range(2):
        with pytest.raises(KeyError), lock:
            pass
    thread = threading.Thread(target=lambda: lock.renew())
    thread.start()
    thread.join(SECONDS)


def test_reported_deadlock_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [OSError(errno.EDEADLK, "circle"), OSError(errno.EDEADLK, "circle"), OSError(errno.ENOLCK, "none left")]

    def lockf(_: Any, how: int) -> None:
        if how == fcntl.LOCK_EX and errors:
            raise errors.pop(0)

    lock = SharedLock(nothing, nothing)
    monkeypatch.setattr(shared_lock.fcntl, "lockf", lockf)
    with pytest.raises(OSError, match="none left"), lock:
        pass
    with lock:
        pass


def test_system_without_record_locks_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_lock, "fcntl", None)
    buffer = ExperienceBuffer(storage=RingStorage(4))
    with pytest.raises(RuntimeError, match="fcntl"):
        buffer.share()
    assert not buffer.storage.is_shared
    assert not buffer.shared


def shared(sampler: Any = None) -> ExperienceBuffer:
    buffer = ring(LENGTH, ENVS, sampler, batch_size=256, generator=None)
    buffer.extend(step(0, ends=True))
    buffer.extend(step(10))
    return buffer.share()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_counting(storage: RingStorage) -> None:
    """Kill this process when it updates the length of the storage."""
    storage.bump_revision = storage.set_length = lambda *_: die()  # type: ignore[method-assign]


def died(act: Any) -> None:
    """Run a function in a forked process and check that it kills the process."""
    child = started(act)
    child.join(SECONDS)
    assert child.exitcode == -signal.SIGKILL


def stored(buffer: ExperienceBuffer) -> list[list[float]]:
    rings = buffer.writer
    steps = [range(int(low), int(high)) for low, high in zip(rings.oldest, rings.positions, strict=True)]
    cells = [rings.cell(torch.full((len(each),), env), torch.tensor(each)) for env, each in enumerate(steps)]
    return [buffer.storage.get(each)["a"].tolist() if len(each) else [] for each in cells]


@pytest.mark.parametrize("where", ["copies", "length", "priorities"])
def test_rings_of_a_process_that_died_while_writing_are_dropped(where: str, caplog: Any) -> None:
    buffer = shared(PrioritizedSampler(ENVS * LENGTH, 1.0, 1.0))
    ids = torch.tensor([0, 2])

    def act() -> None:
        writer, storage = buffer.writer, buffer.storage
        if where == "length":  # the rows are written, but the length is not updated
            die_counting(storage)
        if where == "priorities":
            writer.notify = lambda _: die()  # type: ignore[method-assign]
        if where == "copies":  # copy row by row, as for another device or layout
            storage.cells.match = lambda data, _: (  # type: ignore[method-assign, union-attr]
                [data.get(path) for path in storage.cells.leaf_index], None,
            )  # fmt: skip
            storage.cells.scatter = lambda *_: die()  # type: ignore[method-assign, union-attr]
        buffer.extend(step(20)[:2], env_ids=ids)

    died(act)
    with caplog.at_level(logging.WARNING):
        batch = buffer.sample()
    (record,) = caplog.records
    assert "environments [0, 2]" in record.getMessage()
    assert "died" in record.getMessage()
    assert set(batch["a"].tolist()) == {1.0, 11.0}
    assert stored(buffer) == [[], [1.0, 11.0], []]
    assert len(buffer) == 2
    index = buffer.writer.index
    assert index.steps_to_end(torch.tensor([1, 1]), torch.tensor([0, 1])).tolist() == [0, 0]
    caplog.clear()
    buffer.extend(step(30))
    buffer.extend(step(40, ends=True)[:2], env_ids=ids)
    assert stored(buffer) == [[30.0, 40.0], [1.0, 11.0, 31.0], [32.0, 41.0]]
    assert set(buffer.sample()["a"].tolist()) == {30.0, 40.0, 1.0, 11.0, 31.0, 32.0, 41.0}
    begin = buffer.writer.positions[ids] - 2
    assert index.begin(ids, begin + 1).tolist() == begin.tolist()
    assert index.end(ids, begin).tolist() == (begin + 1).tolist()
    assert not caplog.records


def test_death_while_reading_or_removing_damages_nothing(caplog: Any) -> None:
    buffer = shared()
    buffer.extend(step(20))

    def read() -> None:
        with buffer.locked():
            die()

    def take() -> None:
        die_counting(buffer.storage)
        with buffer.locked():
            buffer.writer.drop(2, torch.tensor([1]))

    died(read)
    assert len(buffer) == 9
    died(take)
    buffer.sample()
    assert stored(buffer) == [[0.0, 10.0, 20.0], [21.0], [2.0, 12.0, 22.0]]
    assert len(buffer) == 7
    assert buffer.writer.index.begin(torch.tensor([1]), torch.tensor([2]), clip=False).tolist() == [1]
    buffer.extend(step(30, ends=True))  # the episode continues
    assert buffer.writer.index.end(torch.tensor([1]), torch.tensor([2])).tolist() == [3]
    assert not caplog.records


def test_ring_is_dropped_after_death_during_write_back() -> None:
    buffer = shared()
    batch = buffer.sample()
    batch = batch[batch["index"] % ENVS == 1]
    batch["a"] += 100

    def act() -> None:
        buffer.storage.bump_revision = die  # type: ignore[method-assign]  # called once the rows are written
        buffer.write_back(batch, ["a"])

    died(act)
    buffer.extend(step(20))
    assert stored(buffer) == [[0.0, 10.0, 20.0], [21.0], [2.0, 12.0, 22.0]]


def test_buffer_is_empty_after_death_during_empty() -> None:
    buffer = shared()
    batch = buffer.sample()

    def act() -> None:
        buffer.writer.index.clear = die  # type: ignore[method-assign, union-attr]
        buffer.empty()

    died(act)
    buffer.extend(step(20))
    assert stored(buffer) == [[20.0], [21.0], [22.0]]
    batch["a"] += 100
    assert not len(buffer.write_back(batch, ["a"]))


def test_error_inside_the_lock_drops_no_rings() -> None:
    buffer = shared()

    def fail(_: Any) -> None:
        raise KeyError("no")

    buffer.writer.notify = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        buffer.extend(step(20))
    del buffer.writer.notify
    buffer.extend(step(30))
    assert stored(buffer) == [[0.0, 10.0, 20.0, 30.0], [1.0, 11.0, 21.0, 31.0], [2.0, 12.0, 22.0, 32.0]]


def test_steps_removed_by_others_are_not_drawn_by_priority() -> None:
    buffer = shared(PrioritizedSampler(ENVS * LENGTH, 1.0, 1.0))

    def act() -> None:
        with buffer.locked():
            buffer.writer.drop(1, torch.tensor([0, 1]))
        die()

    died(act)
    assert set(buffer.sample()["a"].tolist()) == {10.0, 11.0, 2.0, 12.0}


def draw(buffer: ExperienceBuffer, answers: Any) -> None:
    answers.put(buffer.sample()["a"].tolist())


def test_processes_draw_differently_and_reproducibly() -> None:
    def drawn(name: str) -> Any:
        torch.manual_seed(3)
        buffer, answers = shared(), FORK.SimpleQueue()
        child = started(draw, buffer, answers, name=name)
        found = answers.get()
        child.join(SECONDS)
        return found, buffer.sample()["a"].tolist()

    first, second = drawn("first"), drawn("second")
    assert first == drawn("first")
    assert first[1] == second[1]
    assert len({tuple(each) for each in (*first, second[0])}) == 3


def test_buffer_locked_by_a_stopped_process_stays_unchanged() -> None:
    buffer = shared(PrioritizedSampler(ENVS * LENGTH, 1.0, 1.0)).share(timeout=0.1)
    batch, before = buffer.sample(), stored(buffer)
    calls: list[Callable[[], Any]] = [
        buffer.sample,
        buffer.empty,
        buffer.resume,
        lambda: buffer.extend(step(20)),
        lambda: buffer.write_back(batch, ["a"]),
    ]
    with stopped_holder(buffer.locked()) as pid:
        for call in calls:
            with pytest.raises(TimeoutError, match=f"{pid}"):
                call()
        buffer.stop()  # does not wait for the lock
        os.kill(pid, signal.SIGKILL)
        buffer.share(timeout=SECONDS)
        buffer.sample()
    assert buffer.is_stopped
    assert stored(buffer) == before
    assert len(buffer.write_back(batch, ["a"]))
    buffer.extend(step(20))
    assert [len(each) for each in stored(buffer)] == [3] * ENVS


@pytest.mark.parametrize("timeout", [0, -1.0, "soon", float("nan")])
def test_timeout_must_be_a_positive_number(timeout: Any) -> None:
    buffer = ring(LENGTH, ENVS)
    with pytest.raises(ValueError, match=r"timeout.*0"):
        buffer.share(timeout=timeout)
    assert not buffer.shared
    with pytest.raises(ValueError, match=r"timeout.*0"):
        buffer.share(example=numbered(1)).share(timeout=timeout)


def test_timeout_needs_a_shared_buffer() -> None:
    with pytest.raises(ValueError, match=r"timeout=2.0.*shared=False"):
        ring(LENGTH, ENVS).share(False, timeout=2.0)


def begins(buffer: ExperienceBuffer, env: int) -> list[int]:
    """Return the first position of the episode of each stored step."""
    positions = torch.arange(int(buffer.writer.oldest[env]), int(buffer.writer.positions[env]))
    return buffer.writer.index.begin(torch.full_like(positions, env), positions, clip=False).tolist()


def test_new_process_never_joins_the_episode_of_a_dead_one(caplog: Any) -> None:
    buffer, ids = shared(), torch.tensor([0, 2])

    def act(*values: float) -> None:
        for value in values:
            buffer.extend(step(value)[:2], env_ids=ids)
        die()

    died(partial(act, 20))
    assert begins(buffer, 0) == [0, 1, 2]
    died(partial(act, 30))
    assert begins(buffer, 0) == [0, 1, 2, 3]
    died(partial(act, 40, 50))  # its rows are one episode
    assert begins(buffer, 0) == begins(buffer, 2) == [2, 3, 4, 4]
    assert begins(buffer, 1) == [0, 1]
    buffer.extend(step(60, ends=True))
    assert begins(buffer, 0) == [3, 4, 4, 6]
    assert begins(buffer, 1) == [0, 1, 1]  # this process continues its own episode
    ends = buffer.writer.index.end(ids, torch.tensor([3, 4]))
    assert ends.tolist() == [3, 5]
    assert not caplog.records  # nothing was torn


def test_process_that_restarts_its_environments_begins_episodes() -> None:
    buffer = shared()
    buffer.stop()
    buffer.resume()
    assert not buffer.is_stopped
    for value in (20, 30):
        buffer.extend(step(value))
    assert begins(buffer, 1) == [0, 1, 2, 2]
    unshared = ring(LENGTH, ENVS)
    unshared.resume()
    assert not unshared.is_stopped


def test_writer_without_overwrite_rejects_writes() -> None:
    buffer = ring(LENGTH, ENVS, writer=RingWriter(ENVS, overwrite=False))
    for value in range(LENGTH - 1):
        buffer.extend(step(value))
    buffer.extend(step(9)[:1], env_ids=torch.tensor([1]))
    before = stored(buffer)
    two = torch.stack([step(7)] * 2)
    for rows, ids in ((step(8), None), (step(8)[:2], torch.tensor([1, 0])), (two, None)):
        with pytest.raises(ValueError, match=r"environments \[.*1.*\] have no room for"):
            buffer.extend(rows, ids, time_dim=0)
        assert stored(buffer) == before
    buffer.extend(step(8)[:2], env_ids=torch.tensor([2, 0]))
    assert len(buffer) == ENVS * LENGTH
