"""Sharing of empty buffers with known entries, with an example row, and without both."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, TensorDictReplayBuffer, Unbounded
from torchrl.envs.transforms import RenameTransform

from kit.forks import as_started
from torchrl_lightning import (
    EpisodicReplayBuffer,
    FrameStorage,
    HindsightRelabel,
    MBReplayBuffer,
    PrioritizedSampler,
    RecurrentReplayBuffer,
    RolloutBuffer,
    SequenceSampler,
    SimpleReplayBuffer,
)
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

ENVS, LENGTH = 2, 8
SIZE = ENVS * LENGTH
METHODS = ("fork", "spawn")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def step(number: float, done: bool = False) -> TensorDict:
    """Return one step of each environment. Each entry that a buffer below needs holds the number."""
    flag, value = torch.full((ENVS, 1), done), torch.full((ENVS, 1), float(number))
    names = "observation", "achieved_goal", "desired_goal", "recurrent_state"
    after = {**dict.fromkeys(names, value + 1), "reward": value, "done": flag, "terminated": flag}
    entries = {**{name: value.clone() for name in names}, "action": value.clone()}
    return TensorDict({**entries, "next": {**after, "truncated": ~flag & flag}}, [ENVS])


ROW = step(-1.0)[0]


def experience(sampler: Any = None, **settings: Any) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(SIZE), sampler=sampler, num_envs=ENVS, **settings)


BUFFERS: dict[str, Callable[[], ExperienceBuffer]] = {
    "uniform": experience,
    "n-step": lambda: experience(n_steps=3),
    "prioritized": lambda: experience(PrioritizedSampler(SIZE, 0.7, 0.5)),
    "windows": lambda: experience(SequenceSampler(2)),
    "prioritized windows": lambda: experience(PrioritizedSampler(SIZE, 0.7, 0.5, batch_length=2)),
    "hindsight": lambda: experience(transform=HindsightRelabel(compute_reward=unchanged_reward)),
    "transformed": lambda: experience(transform=RenameTransform(["seen"], ["observation"], ["seen"], ["observation"])),
    "episodic": lambda: EpisodicReplayBuffer(None, ENVS, LENGTH),
    "episodic returns": lambda: EpisodicReplayBuffer(None, ENVS, LENGTH, record_episodic_return=True, gamma=0.9),
    "recurrent": lambda: RecurrentReplayBuffer(SIZE, num_envs=ENVS),
    "simple": lambda: SimpleReplayBuffer(size=SIZE, num_envs=ENVS),
    "model-based": lambda: MBReplayBuffer(LENGTH, num_envs=ENVS),
}


def unchanged_reward(achieved: Any, desired: Any, info: Any) -> Any:
    return achieved[..., 0] - 1


def write(buffer: Any, number: float, said: Any, env: int | None = None) -> None:
    """Write a step of one environment or of all. Queue the number of stored steps or the error."""
    try:
        buffer = pickle.loads(buffer) if isinstance(buffer, bytes) else buffer
        rows = step(number) if env is None else step(number)[env : env + 1]
        buffer.extend(rows, *([] if env is None else [torch.tensor([env])]))
        said.put(len(buffer))
    except Exception as error:
        said.put(f"{type(error).__name__}: {error}")


def started(method: str, buffer: Any, *arguments: Any) -> Any:
    """Write to a buffer in another process and return its answer.

    With "fork" the process inherits the buffer. With "spawn" it receives the buffer as a spawned process does.
    """
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    buffer = as_started(buffer) if method == "spawn" else buffer
    process = context.Process(target=write, args=(buffer, arguments[0], said, *arguments[1:]))
    process.start()
    answer = said.get(timeout=60)
    process.join(60)
    return answer


@pytest.mark.parametrize("kind", BUFFERS)
def test_empty_buffer_without_known_entries_is_not_shared(kind: str) -> None:
    buffer = BUFFERS[kind]()
    with pytest.raises(ValueError, match=r"share\(example="):
        buffer.share()
    assert not buffer.shared
    assert not buffer.storage.is_shared
    buffer.extend(step(0))
    assert len(buffer) == ENVS


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffer_that_was_shared_with_an_example_is_written_by_another_process(kind: str) -> None:
    torch.manual_seed(0)
    buffer = BUFFERS[kind]().share(example=ROW)
    assert len(buffer) == buffer.writer.write_count == 0
    assert started("fork", buffer, 3.0) == ENVS
    assert len(buffer) == ENVS
    stored = buffer.storage.get(torch.arange(ENVS))
    assert stored["next", "reward"].flatten().tolist() == [3.0] * ENVS
    buffer.extend(step(4.0))
    assert started("fork", buffer, 5.0) == 3 * ENVS
    buffer.extend(step(6.0))
    buffer.extend(step(7.0))
    stored = buffer.storage.get(torch.arange(len(buffer)))
    assert stored["next", "reward"][::ENVS].flatten().tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert buffer.writer.index.begin(torch.zeros(5).long(), torch.arange(5)).tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffer_that_was_shared_with_an_example_is_written_by_a_spawned_process(kind: str) -> None:
    buffer = BUFFERS[kind]().share(example=ROW)
    assert started("spawn", buffer, 3.0) == ENVS
    assert len(buffer) == ENVS


FORMS: dict[str, Callable[[], Any]] = {
    "row": lambda: ROW,
    "rows": lambda: step(1.0),
    "one row more": lambda: torch.cat([step(1.0), step(2.0)[:1]]),
    "rollout": lambda: torch.stack([step(1.0), step(2.0), step(3.0)], 1),
    "lazy": lambda: TensorDict.lazy_stack([step(1.0), step(2.0)], 1),
    "spec": lambda: Composite(
        {
            **{name: Unbounded((1,)) for name in ("observation", "action")},
            "next": Composite(
                observation=Unbounded((1,)), reward=Bounded(0, 1, (1,)), done=Unbounded((1,), dtype=torch.bool)
            ),
        }
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_examples_of_every_form_reserve_the_same_memory(form: str) -> None:
    example = FORMS[form]()
    buffer = experience().share(example=example)
    tree = buffer.storage.tree
    assert tree["next"]["reward"].shape == (SIZE, 1)
    assert tree["next"]["done"].dtype == torch.bool
    assert all(leaf.is_shared() for leaf in (tree["observation"], tree["next"]["reward"]))
    assert buffer.writer.index is not None


def test_example_leaves_no_trace_in_the_next_samples() -> None:
    def written(buffer: ExperienceBuffer) -> ExperienceBuffer:
        for number in range(5):
            buffer.extend(step(number, done=number == 2))
        return buffer

    def make() -> ExperienceBuffer:
        sampler = PrioritizedSampler(SIZE, 0.7, 0.5)
        return experience(sampler, n_steps=2, generator=torch.Generator().manual_seed(0))

    first, second = written(make()), written(make().share(example=ROW))
    counters = "write_position", "write_generation"  # never restart: each row of a cell has its own value
    ours, theirs = (buffer.sample(32).exclude(*counters) for buffer in (first, second))
    assert (ours == theirs).all()


def test_example_must_be_a_row() -> None:
    buffer = experience()
    with pytest.raises(TypeError, match="TensorDict"):
        buffer.share(example=torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="entries"):
        buffer.share(example=TensorDict({}, []))
    with pytest.raises(ValueError, match="example"):
        buffer.share(False, example=ROW)
    with pytest.raises(ValueError, match="example"):
        buffer.share(example=step(0)[:0])
    assert not buffer.shared
    assert buffer.storage.cells is None


def test_declared_sizes_are_checked_against_the_example() -> None:
    for buffer in (SimpleReplayBuffer(3, 1, SIZE), RecurrentReplayBuffer(SIZE, 3, 1, 1)):
        with pytest.raises(ValueError, match="3"):
            buffer.share(example=ROW)
        assert not buffer.shared


KNOWN: dict[str, Callable[[], ExperienceBuffer]] = {
    "data_spec": lambda: EpisodicReplayBuffer(ROW, ENVS, LENGTH, record_episodic_return=True, gamma=0.9),
    "init_tensors": lambda: initialised(MBReplayBuffer(LENGTH, num_envs=ENVS)),
    "emptied": lambda: emptied(experience()),
    "loaded": lambda: loaded(experience(), experience()),
    "copied": lambda: copy.deepcopy(emptied(experience())),
}


def initialised(buffer: Any) -> Any:
    buffer.init_tensors(step(0))
    return buffer


def emptied(buffer: ExperienceBuffer) -> ExperienceBuffer:
    buffer.extend(step(0))
    buffer.empty()
    return buffer


def loaded(buffer: ExperienceBuffer, other: ExperienceBuffer) -> ExperienceBuffer:
    buffer.load_state_dict(emptied(other).state_dict())
    return buffer


@pytest.mark.parametrize("kind", KNOWN)
def test_empty_buffer_with_known_entries_is_shared(kind: str) -> None:
    buffer = KNOWN[kind]().share()
    assert started("fork", buffer, 3.0) == ENVS
    assert len(buffer) == ENVS


@pytest.mark.parametrize("method", METHODS)
def test_several_processes_write_to_a_buffer_that_was_shared_empty(method: str) -> None:
    context = multiprocessing.get_context("fork")
    buffer, said = experience(n_steps=3).share(example=ROW), context.Queue()
    sent = as_started(buffer) if method == "spawn" else buffer
    writers = [context.Process(target=write, args=(sent, 10.0 + env, said, env)) for env in range(ENVS)]
    for process in writers:
        process.start()
    assert sorted(said.get(timeout=60) for _ in writers) == [1, 2]
    for process in writers:
        process.join(60)
    assert buffer.storage.get(torch.arange(ENVS))["next", "reward"].flatten().tolist() == [10.0, 11.0]


@pytest.mark.parametrize("method", METHODS)
def test_filled_buffer_is_shared_with_its_rows(method: str) -> None:
    buffer = experience()
    buffer.extend(step(1.0))
    assert started(method, buffer.share(example=ROW), 2.0) == 2 * ENVS
    assert len(buffer) == 2 * ENVS


def test_buffer_that_was_built_shared_is_written_after_its_first_rows() -> None:
    buffer = experience(shared=True)
    buffer.extend(step(1.0))
    buffer.empty()
    assert started("fork", buffer, 2.0) == ENVS


def test_buffer_that_was_built_shared_names_the_remedy_and_takes_it() -> None:
    buffer = experience(shared=True)
    with pytest.raises(ValueError, match=r"share\(example="):
        as_started(buffer)
    with pytest.raises(ValueError, match=r"share\(example="):
        buffer.share()
    answer = started("fork", buffer, 2.0)
    assert answer.startswith("RuntimeError: ")
    assert "share(example=" in answer
    assert started("fork", buffer.share(example=ROW), 2.0) == ENVS
    assert buffer.share() is buffer


def test_wrong_rows_of_another_process_name_the_difference() -> None:
    buffer = experience().share(example=ROW.exclude("action"))
    answer = started("fork", buffer, 2.0)
    assert answer.startswith("ValueError: ")
    assert "'action' is new" in answer


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("kind", ["mapped", "frames"])
def test_storages_that_cannot_be_shared_say_so_first(kind: str, filled: bool, tmp_path: Path) -> None:
    storage = RingStorage(SIZE, scratch_dir=tmp_path) if kind == "mapped" else FrameStorage(SIZE, 2)
    buffer = ExperienceBuffer(storage=storage, num_envs=ENVS)
    rows = step(0)
    if kind == "frames":
        rows["observation"] = rows["next", "observation"] = torch.zeros(ENVS, 2, 4, 4)
    if filled:
        buffer.extend(rows)
    for example in (None, rows):
        with pytest.raises(ValueError, match="RingStorage"):
            buffer.share(example=example)
    assert not buffer.shared
    assert (storage.cells is not None) == filled
    buffer.extend(rows)


def test_unknown_number_of_environments_is_not_shared() -> None:
    buffer = MBReplayBuffer(LENGTH)
    with pytest.raises(ValueError, match="num_envs"):
        buffer.share(example=ROW)
    buffer.extend(step(0).unsqueeze(0), time_dim=0)
    assert started("fork", buffer.share(), 2.0) == 2 * ENVS


def test_rollout_buffer_is_not_shared() -> None:
    buffer = RolloutBuffer(4, num_envs=ENVS)
    with pytest.raises(ValueError, match="ExperienceBuffer"):
        buffer.share()
    assert not buffer.shared
    assert buffer.share(False) is buffer


def test_parts_in_buffers_of_torchrl_name_a_remedy() -> None:
    buffer = TensorDictReplayBuffer(storage=RingStorage(SIZE)).share()
    answer = started("fork", buffer, 2.0)
    assert answer.startswith("RuntimeError: ")
    assert "ExperienceBuffer" in answer
