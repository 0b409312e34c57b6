"""The episodic buffer in several processes: no step is torn or lost, and no process hangs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.forks import as_started
from torchrl_lightning.episodic import EpisodicReplayBuffer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SECONDS = 60  # a test fails after this time instead of hanging
MORE = 30  # writes and draws of each process before and after one of them is killed
WRITERS, WIDTH, EPISODE = 4, 2, 7
ENVS = WRITERS * WIDTH


def rows(env: torch.Tensor, number: int) -> TensorDict:
    """Return step ``number`` of the environments ``env``, with both numbers in its codes."""
    code = (env * 1_000_000 + number).view(-1, 1)
    end = torch.full((len(env), 1), number % EPISODE == EPISODE - 1)
    after = {"reward": torch.ones(len(env), 1), "done": end, "terminated": end, "code": -code.float().expand(-1, 33)}
    return TensorDict({"code": code, "wide": code.expand(-1, 65), "next": after}, [len(env)])


def is_whole(batch: TensorDict) -> bool:
    code = batch["code"]
    return bool((batch["wide"] == code).all() and (batch["next", "code"] == -code).all())


def build(max_length: int = 64, **options: Any) -> EpisodicReplayBuffer:
    row = rows(torch.tensor([0]), 0)[0]
    return EpisodicReplayBuffer(row, ENVS, max_length, allow_multiprocess=True, **options)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile once here, because otherwise every forked process would compile."""
    buffer = build(record_episodic_return=True)
    for number in range(EPISODE):
        buffer.add_batch(rows(torch.arange(ENVS), number))
    buffer.add_batch(rows(torch.arange(WIDTH), EPISODE), torch.arange(WIDTH))
    buffer.get_batch(4, 2)
    buffer.dequeue(n=2)


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"still waiting after {SECONDS} seconds"
        time.sleep(1e-3)


class Crew:
    """Processes that work on a buffer. On exit, each must have ended without an error."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("fork")
        self.workers: list[Any] = []

    def start(self, work: Callable[..., None], *args: Any) -> Any:
        # One pipe per process, because a killed process could leave a shared pipe locked.
        here, there = self.context.Pipe()
        worker = self.context.Process(target=work, args=(*args, there), daemon=True)
        worker.pipe = here
        self.workers.append(worker)
        worker.start()
        return worker

    @staticmethod
    def answer(worker: Any) -> Any:
        assert worker.pipe.poll(SECONDS), f"no answer within {SECONDS} seconds"
        return worker.pipe.recv()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        deadline = time.monotonic() + (0 if kind else SECONDS)
        for worker in self.workers:
            worker.join(max(0.1, deadline - time.monotonic()))
        codes = {worker.name: worker.exitcode for worker in self.workers}
        for worker in self.workers:
            worker.kill()
            worker.join()
        assert kind or set(codes.values()) <= {0, -signal.SIGKILL}, f"processes hang (None) or failed: {codes}"


def write(buffer: EpisodicReplayBuffer, envs: list[int], numbers: range, blocking: bool, pipe: Any) -> None:
    env = torch.tensor(envs)
    pipe.send(sum(buffer.add_batch(rows(env, number), env, blocking) for number in numbers))


def write_on(buffer: EpisodicReplayBuffer, envs: list[int], pipe: Any) -> None:
    env, number = torch.tensor(envs), 0
    while not buffer.is_stopped:
        buffer.add_batch(rows(env, number), env)
        number += 1
        if number == 50:
            pipe.send("writing")
    pipe.send(number)


def take(buffer: EpisodicReplayBuffer, envs: list[int], pipe: Any) -> None:
    codes: list[int] = []
    while (batch := buffer.dequeue(torch.tensor(envs), 3, blocking=True)) is not None:
        assert is_whole(batch)
        codes += batch["code"].flatten().tolist()
    pipe.send(codes)


def draw(buffer: EpisodicReplayBuffer, drawn: torch.Tensor, pipe: Any) -> None:
    while not buffer.is_stopped:
        batch, info = buffer.get_batch(32, 2)
        assert is_whole(batch)
        assert (batch["code"][:, 0, 0] // 1_000_000 == info.env_ids).all()
        assert (batch["code"][:, 1] - batch["code"][:, 0] == 1).all()
        value = info.discounted_return
        left = EPISODE - batch["code"][:, 0, 0] % 1_000_000 % EPISODE
        assert ((value == -1000) | torch.isclose(value, (1 - 0.5**left) / 0.5)).all()
        drawn += 1


def test_steps_arrive_exactly_once() -> None:
    count = 99
    buffer = build(max_length=16)
    with Crew() as crew:
        readers = [crew.start(take, buffer, list(range(first, ENVS, 2))) for first in (0, 1)]
        firsts = range(0, ENVS, WIDTH)
        writers = [crew.start(write, buffer, [first, first + 1], range(count), True) for first in firsts]
        assert [crew.answer(writer) for writer in writers] == [count] * WRITERS
        until(lambda: not len(buffer))
        buffer.stop()
        codes = sorted(code for reader in readers for code in crew.answer(reader))
    assert codes == [env * 1_000_000 + number for env in range(ENVS) for number in range(count)]


def test_killed_writer_does_not_block_other_processes() -> None:
    buffer = build(record_episodic_return=True, gamma=0.5)
    drawn = torch.zeros(2, dtype=torch.int64).share_memory_()

    def all_go_on(*, first: int) -> None:
        written, before = buffer.writer.positions.clone(), drawn.clone()
        until(lambda: (buffer.writer.positions - written)[first:].min() > MORE and (drawn - before).min() > MORE)

    with Crew() as crew:
        writers = [crew.start(write_on, buffer, [first, first + 1]) for first in range(0, ENVS, WIDTH)]
        assert [crew.answer(writer) for writer in writers] == ["writing"] * WRITERS
        for reader in range(2):
            crew.start(draw, buffer, drawn[reader])
        all_go_on(first=0)
        os.kill(writers[0].pid, signal.SIGKILL)
        writers[0].join(SECONDS)
        left = buffer.writer.positions.tolist()
        all_go_on(first=WIDTH)
        buffer.clear(torch.tensor([0, 1]))
        again = int(buffer.writer.positions[0])
        assert crew.answer(crew.start(write, buffer, [0, 1], range(20), False)) == 20
        buffer.stop()
        written = [crew.answer(writer) for writer in writers[1:]]
    positions = buffer.writer.positions.tolist()
    assert left[:2] == [again] * 2
    assert positions[:2] == [again + 20] * 2
    assert positions[2::2] == positions[3::2] == written


def test_repeatedly_killed_process_leaves_complete_steps() -> None:
    buffer = build(record_episodic_return=True, gamma=0.5)
    buffer.add_batch(rows(torch.arange(ENVS), 0))
    with Crew() as crew:
        for round_ in range(5):
            buffer.clear(torch.tensor([0, 1]))
            writer = crew.start(write_on, buffer, [0, 1])
            assert crew.answer(writer) == "writing"
            time.sleep(0.003 * round_)
            os.kill(writer.pid, signal.SIGKILL)
            writer.join(SECONDS)
            with buffer.locked():  # entering the lock repairs the interrupted write
                filled = buffer.writer.filled
            batch = buffer.dequeue(torch.arange(2), int(filled[0])) if int(filled[0]) else None
            assert filled[0] == filled[1]
            assert batch is None or is_whole(batch)
            assert filled[2:].tolist() == [1] * (ENVS - 2)


@pytest.mark.parametrize("verb", ["add_batch", "dequeue"])
def test_stop_wakes_waiting_processes(verb: str) -> None:
    buffer = build(max_length=3)
    with Crew() as crew:
        if verb == "add_batch":
            worker = crew.start(write, buffer, [0, 1], range(5), True)
        else:
            buffer.add_batch(rows(torch.arange(ENVS), 0))
            worker = crew.start(take, buffer, [0, 1])
        assert not worker.pipe.poll(0.1)
        buffer.stop()
        assert crew.answer(worker) == (3 if verb == "add_batch" else [])
    before = buffer.writer.positions.tolist()
    assert buffer.add_batch(rows(torch.arange(ENVS), 9), blocking=True) is False
    assert buffer.dequeue(torch.tensor([0]), blocking=True) is None
    buffer.clear(torch.tensor([0]))
    assert buffer.add_batch(rows(torch.tensor([0]), 9), torch.tensor([0]), blocking=True) is False
    assert buffer.writer.positions.tolist() == before
    assert buffer.add_batch(rows(torch.arange(ENVS), 9))
    assert buffer.dequeue(torch.tensor([0]))["code"].tolist() == [[[9]]]


@pytest.mark.parametrize("verb", ["add_batch", "dequeue"])
def test_wait_ends_after_the_timeout(verb: str) -> None:
    buffer = build(max_length=1).share(timeout=0.2)
    env = torch.tensor([3])
    if verb == "add_batch":
        buffer.add_batch(rows(env, 0), env)
    num_stored = len(buffer)
    wait = partial(buffer.add_batch, rows(env, 1), env) if verb == "add_batch" else partial(buffer.dequeue, env)
    with pytest.raises(TimeoutError) as raised:
        wait(blocking=True)
    message = str(raised.value)
    assert message.startswith("No other process removed or wrote steps within timeout=0.2 seconds")
    assert f"{num_stored} of {ENVS} cells" in message
    assert "\n" not in message
    assert len(buffer) == num_stored


def test_processes_wait_again_after_resume() -> None:
    buffer = build(max_length=3)
    buffer.stop()
    buffer.resume()
    with Crew() as crew:
        worker = crew.start(take, buffer, [0, 1])
        assert not worker.pipe.poll(0.1)
        assert crew.answer(crew.start(write, buffer, [0, 1], range(3), True)) == 3
        until(lambda: not len(buffer))
        buffer.stop()
        assert sorted(crew.answer(worker)) == [0, 1, 2, 1_000_000, 1_000_001, 1_000_002]


def lead(pickled: bytes, pipe: Any) -> None:
    """Compare a second buffer over the same memory, then wait inside the lock to be killed."""
    buffer = pickle.loads(pickled)
    pipe.send(buffer.get_batch(64, 1)[0]["code"].tolist())
    pipe.send(buffer.add_batch(rows(torch.arange(ENVS), 2), blocking=True))
    batch = buffer.dequeue(n=2, blocking=True)
    assert batch is not None
    pipe.send(batch["code"].tolist())
    assert pipe.poll(SECONDS)
    with buffer.locked():
        pipe.send("locked")
        signal.pause()


def test_unpickled_buffers_share_waiting_and_stop() -> None:
    buffer = build(max_length=2, record_episodic_return=True, with_replacement=True)
    everybody = torch.arange(ENVS)
    for number in range(2):
        buffer.add_batch(rows(everybody, number))
    with Crew() as crew:
        leader = crew.start(lead, as_started(buffer))
        assert crew.answer(leader) != buffer.get_batch(64, 1)[0]["code"].tolist()
        first = buffer.dequeue(n=1)
        assert first is not None
        assert first["code"].flatten().tolist() == (everybody * 1_000_000).tolist()
        assert crew.answer(leader) is True
        assert crew.answer(leader) == [[[env * 1_000_000 + 1], [env * 1_000_000 + 2]] for env in range(ENVS)]
        leader.pipe.send("go on")
        assert crew.answer(leader) == "locked"
        os.kill(leader.pid, signal.SIGKILL)
        assert buffer.add_batch(rows(everybody, 3), blocking=True)
        assert len(buffer) == ENVS


def test_overwrite_false_rejects_a_full_ring() -> None:
    buffer = build(max_length=2, overwrite=False)
    for number in range(2):
        buffer.add_batch(rows(torch.arange(ENVS), number))
    with pytest.raises(ValueError, match=r"\[1, 5\].*overwrite=False"):
        buffer.add_batch(rows(torch.tensor([1, 5]), 2), torch.tensor([1, 5]))
    assert buffer.writer.positions.tolist() == [2] * ENVS
    buffer.dequeue(torch.tensor([5]))
    assert buffer.add_batch(rows(torch.tensor([5]), 2), torch.tensor([5]))
    assert buffer.get_field("code", torch.tensor([5, 5]), torch.tensor([1, 2])).flatten().tolist() == [5000001, 5000002]


def test_state_must_be_loaded_before_sharing() -> None:
    buffer = build(max_length=2)
    buffer.add_batch(rows(torch.arange(ENVS), 0))
    other = EpisodicReplayBuffer(rows(torch.tensor([0]), 0)[0], ENVS, 2)
    with pytest.raises(ValueError, match="allow_multiprocess=False"):
        other.dequeue(blocking=True)
    other.load_state_dict(buffer.state_dict())
    other.share()
    with Crew() as crew:
        assert crew.answer(crew.start(write, other, [0, 1], range(1, 4), False)) == 3
        assert other.steps_to_episode_end(torch.tensor([2, 0]), torch.tensor([0, 2])).tolist() == [1, 0]
        taken = other.dequeue(torch.tensor([1]), 2, blocking=True)
    assert taken is not None
    assert taken["code"].tolist() == [[[1000002], [1000003]]]
