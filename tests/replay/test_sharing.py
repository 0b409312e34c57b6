"""Buffers in several forked and spawned processes, and copies of buffers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.forks import as_started
from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning import PrioritizedSampler, SequenceSampler, UniformSampler
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

ENVS, SIZE = 3, 12
rows = partial(numbered, ENVS, ends=False)
BATCH = 512  # draws every stored step for any seed; the seed of a process depends on its number


def filled(sampler: Any = None, scratch: Path | None = None, **kwargs: Any) -> ExperienceBuffer:
    return ring(SIZE // ENVS, ENVS, sampler, filled=1, scratch_dir=scratch, batch_size=BATCH, generator=None, **kwargs)


def work(buffers: list[ExperienceBuffer], inbox: Any, outbox: Any) -> None:
    """Run requested functions of this module in another process.

    A task consists of the name of a function and the index of a buffer.
    """
    while (task := inbox.recv()) is not None:
        name, which = task
        try:
            outbox.send(globals()[name](buffers[which]))
        except Exception as error:
            outbox.send(f"{type(error).__name__}: {error}")


def write(ours: ExperienceBuffer) -> Any:
    ours.extend(rows(90))
    ours.extend(rows(100, ends=True))
    ours.extend(rows(1)[:1], env_ids=torch.tensor([1]))
    return len(ours), ours.writer.positions.tolist(), ours.writer.write_count


def report(ours: ExperienceBuffer) -> Any:
    batch = ours.sample()
    return len(ours), ours.writer.positions.tolist(), sorted(set(batch["a"].flatten().tolist()))


def overwrite(ours: ExperienceBuffer) -> Any:
    for start in range(200, 250, 10):
        ours.extend(rows(start))
    return len(ours)


def start_over(ours: ExperienceBuffer) -> Any:
    ours.empty()
    ours.extend(rows(700))
    return len(ours)


class Other:
    """Another process that works on buffers."""

    def __init__(self, method: str, buffers: list[ExperienceBuffer]) -> None:
        context = multiprocessing.get_context(method)
        inbox, self.tasks = context.Pipe(duplex=False)
        self.answers, outbox = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(buffers, inbox, outbox), daemon=True)
        self.process.start()

    def do(self, task: Callable[..., Any], which: int = 0) -> Any:
        self.tasks.send((task.__name__, which))
        assert self.answers.poll(60)
        return self.answers.recv()

    def stop(self) -> None:
        self.tasks.send(None)
        self.process.join(20)
        assert self.process.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_share_a_buffer(method: str) -> None:
    samplers = [UniformSampler(), None, SequenceSampler(2), PrioritizedSampler(SIZE, 1.0, 1.0)]
    buffers = [filled(sampler).share() for sampler in samplers]
    other = Other(method, buffers)
    for which, ours in enumerate(buffers):
        assert other.do(write, which) == (10, [3, 4, 3], 10)
        assert len(ours) == 10
        assert ours.writer.positions.tolist() == [3, 4, 3]
        assert ours.writer.write_count == 10
        assert not ours.writer.is_uniformly_filled
        index = ours.writer.index
        env, first = torch.arange(ENVS), torch.zeros(ENVS, dtype=torch.long)
        assert index.begin(env, first + 2).tolist() == [1] * ENVS  # a write of another process begins an episode
        assert index.end(env, first).tolist() == [0] * ENVS
        assert index.finished(env, first + 1).all()
        if which != 1:  # TorchRL's RandomSampler refuses uneven rings
            assert set(ours.sample()["a"].flatten().tolist()) >= {90.0, 91.0, 92.0, 100.0, 101.0, 102.0}
        ours.extend(rows(50))
        ours.extend(rows(60))
        length, positions, found = other.do(report, which)
        assert (length, positions) == (12, [5, 6, 5])
        assert {50.0, 51.0, 52.0, 60.0, 61.0, 62.0} <= set(found)
        # write_back skips steps that another process has overwritten since the draw.
        batch = ours.sample()
        assert other.do(overwrite, which) == 12
        assert not len(ours.write_back(batch, ["a"]))
        assert min(ours.sample()["a"].flatten().tolist()) >= 210.0
        assert other.do(start_over, which) == 3
        assert len(ours) == 3
        if which != 2:
            assert set(ours.sample()["a"].tolist()) == {700.0, 701.0, 702.0}
    other.stop()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_does_not_write_to_a_copy() -> None:
    ours, empty = filled(), ExperienceBuffer(storage=RingStorage(SIZE), num_envs=ENVS, shared=True)
    mixed = ExperienceBuffer(storage=RingStorage(SIZE), num_envs=ENVS)
    mixed.extend(rows(0).exclude("next"))
    other = Other("fork", [ours, empty, mixed])
    for which in (0, 1, 2):
        answer = other.do(write, which)
        assert answer.startswith("RuntimeError: ")
        assert ("buffer.share(example=row)" if which == 1 else "buffer.share()") in answer
    assert "buffer.share()" in other.do(start_over)
    ours.extend(rows(3))
    # Reading a copy is allowed: it has the content of the time when it was made.
    assert other.do(report) == (3, [1, 1, 1], [0.0, 1.0, 2.0])
    other.stop()
    assert len(ours) == 6
    assert len(empty) == 0


def test_unshared_buffer_is_not_sent_to_another_process() -> None:
    ours = filled()
    for part in (ours, ours.storage, ours.writer):
        with pytest.raises(RuntimeError, match=r"buffer.share\(\)"):
            as_started(part)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [({"scratch": "ring"}, "scratch_dir"), ({"prefetch": 1}, "prefetch=0")],
)
def test_unshareable_buffers_raise_an_error(kwargs: dict[str, Any], says: str, tmp_path: Path) -> None:
    if "scratch" in kwargs:
        kwargs = {"scratch": tmp_path / "ring"}
    ours = filled(**kwargs)
    with pytest.raises(ValueError, match=says):
        ours.share()
    assert not ours.storage.is_shared
    assert not ours.shared
    assert len(ours.sample()) == BATCH


def test_state_of_a_shared_buffer_loads_into_an_unshared_buffer() -> None:
    ours, fresh = filled(shared=True), filled()
    assert ours.storage.is_shared
    fresh.load_state_dict(ours.state_dict())
    assert (fresh.share().sample() == ours.sample()).all()


@pytest.mark.parametrize(("kind", "way"), [("shared", "pickle"), ("shared", "deepcopy"), ("on disk", "deepcopy")])
def test_copies_have_separate_memory(kind: str, way: str, tmp_path: Path) -> None:
    ours = filled(scratch=tmp_path / "ring") if kind == "on disk" else filled(shared=True)
    other = pickle.loads(pickle.dumps(ours)) if way == "pickle" else copy.deepcopy(ours)
    assert not other.storage.is_shared
    assert other.storage.scratch_dir is None
    assert ours.storage.is_shared == (kind == "shared")
    assert ours.storage.scratch_dir == (tmp_path / "ring" if kind == "on disk" else None)
