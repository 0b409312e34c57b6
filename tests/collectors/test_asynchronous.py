"""Worker processes: stale weights, stamped; errors come back; nobody is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.counting import CountingEnv, FailingEnv, RandomEnv
from kit.forks import Forked, as_script
from kit.processes import alive
from kit.worked import FollowedReplay, constant_policy
from torchrl_lightning.collectors import AsynchronousCollector


def workers() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("collector-")]


@pytest.fixture(scope="module")
def replay() -> FollowedReplay:
    return FollowedReplay(2)


@pytest.fixture(scope="module")
def pool(replay: FollowedReplay) -> Iterator[AsynchronousCollector]:
    """Two workers with two environments each, which several tests read from."""
    sizes = {"num_workers": 2, "num_envs": 2, "frames_per_batch": 8, "total_frames": 184}
    collector = AsynchronousCollector(RandomEnv, constant_policy(), **sizes, seed=0, replay=replay)
    assert not workers()
    yield collector
    collector.shutdown()


def test_stale_weights_are_marked_and_bounded(pool: AsynchronousCollector, forked: None) -> None:
    lags, batches = [], []
    for number, batch in enumerate(islice(pool, 7)):
        version = batch["collector", "policy_version"]
        assert version.shape == (2, 4)
        assert version.dtype == torch.int64
        assert batch.names == [None, "time"]
        # The weights of version v act v % 3: what is stamped is what acted.
        assert torch.equal(batch["action"], version % 3)
        assert batch["collector", "env_ids"].tolist() == [[2 * (number % 2) + env] * 4 for env in range(2)]
        lags.append(int((pool.policy_version - version).max()))
        batches.append(batch)
        with torch.no_grad():
            pool.policy.module.weight.fill_((pool.policy_version + 1) % 3)
        pool.update_policy_weights_()
    assert len(workers()) == 2
    assert 0 < max(lags) <= 2
    first, second, third = batches[:3]
    assert len(torch.cat([first["observation"][:, 0, 0], second["observation"][:, 0, 0]]).unique()) == 4
    ids = [set(batch["collector", "traj_ids"].flatten().tolist()) for batch in (first, second)]
    assert not ids[0] & ids[1]
    # A rollout of the same worker goes on where its last one ended.
    goes_on = torch.equal(third["observation"][:, 0], first["next", "observation"][:, -1])
    assert goes_on or first["next", "done"].any()


def test_workers_apply_changes_of_the_replay(pool: AsynchronousCollector, replay: FollowedReplay) -> None:
    pool.rollout()  # the workers begin with what is replayed now: nothing
    assert not replay.told
    for content in (1, 2):
        replay.content = content
        if content == 2:
            pool.update_policy_weights_()
        # Of each worker, one rollout had begun before; within the next two, episodes end that are not replayed.
        batches = [pool.rollout() for _ in range(6)][-2:]
        seen = [batch["observation"][batch["demo", "mask"].squeeze(-1)].unique().tolist() for batch in batches]
        for batch in batches:
            assert batch["demo", "mask"][:, -1].all()
            assert (batch["action"][:, -1] == content).all()
        assert len(seen[0]) == len(seen[1]) == 1
        assert seen[0] != seen[1]
    assert replay.told == [0, 0, 1, 1]  # each worker once


def test_workers_end_with_the_last_batch(pool: AsynchronousCollector) -> None:
    stream = iter(pool)
    next(stream)
    assert len(workers()) == 2
    assert all(batch.shape == (2, 4) for batch in stream)
    assert pool.frames == pool.total_frames
    assert len(pool) == 23
    assert not workers()


def test_set_seed_returns_the_seed_of_the_last_environment(forked: None) -> None:
    sizes = {"num_workers": 2, "num_envs": 2, "frames_per_batch": 4}
    collector = AsynchronousCollector(RandomEnv, **sizes, seed=9)
    last, _ = RandomEnv().reset(seed=collector.set_seed(3))
    observations = [batch["observation"][:, 0] for batch in islice(collector, 2)]
    collector.shutdown()
    assert observations[-1][-1].tolist() == last.tolist()


def test_failing_worker_ends_all(forked: None) -> None:
    collector = AsynchronousCollector(FailingEnv, num_workers=1, frames_per_batch=8)
    with pytest.raises(RuntimeError, match=r"worker 0: At step 2 .* environment 0 .*: the third step") as error:
        next(iter(collector))
    assert error.value.__notes__[0].startswith("Traceback")  # the environment's own
    assert collector.closed
    assert not workers()
    collector.shutdown()


def test_dead_worker_ends_all(forked: None) -> None:
    collector = AsynchronousCollector(CountingEnv, num_workers=1, frames_per_batch=8)
    stream = iter(collector)
    next(stream)
    os.kill(workers()[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        list(islice(stream, 3))
    assert not workers()


SCRIPT = """
import multiprocessing
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

def collect():
    collector = AsynchronousCollector("CartPole-v1", num_workers=1, frames_per_batch=8, seed=0)
    for number, batch in enumerate(collector):
        if number == 0:
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)

if __name__ == "__main__":  # where a worker, which runs the script too, imports nothing
    from kit.forks import forked_workers
    from torchrl_lightning.collectors import AsynchronousCollector

    try:
        collect()
    except KeyboardInterrupt:
        pass
    with forked_workers():
        collect()
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """The first is spawned, as a user's are."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = Forked(as_script(script), tmp_path, session=True, bare=True)  # it forks without the threads of the tests
    try:
        process.waits_for(lambda: process.said.count("\n") == 1)
        interrupted = int(process.said)
        assert "_raylet" not in Path(f"/proc/{interrupted}/maps").read_text()  # Ray, which TorchRL would import
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        process.waits_for(lambda: process.said.count("\n") == 2)
        orphan = int(process.said.split()[1])
        assert not alive(interrupted)
    finally:
        process.kill()
    assert "KeyboardInterrupt" not in process.said  # the parent catches its own, and the workers have none
    deadline = time.monotonic() + 300
    while alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(orphan)


def test_unpicklable_arguments_are_rejected_before_processes_start() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be pickled[\s\S]*factory"):
        AsynchronousCollector(lambda: CountingEnv(length=bool(lock)), frames_per_batch=8)
    policy = constant_policy()
    policy.lock = lock
    collector = AsynchronousCollector(CountingEnv, policy, frames_per_batch=8)
    with pytest.raises(TypeError, match=r"policy.*cannot be pickled"):
        next(iter(collector))
    assert not workers()
