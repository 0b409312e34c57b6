"""Ring buffers with each sampler, and samplers over other people's storages."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs.transforms import ObservationNorm

from contracts.part import SAVED, Part, Refusal
from contracts.rings import PRIORITIES, SAMPLER, SHARED, SIZES, WRITE_BACKS, WRITES, write_back
from kit.seeds import generator
from kit.states import GONE
from torchrl_lightning import (
    ExperienceBuffer,
    FrameStorage,
    HindsightRelabel,
    PrioritizedSampler,
    RecentSampler,
    RingStorage,
    SequenceSampler,
    UniformSampler,
)
from torchrl_lightning.replay.priorities import Priorities

ENVS, SIZE = 2, 12


def rows(count: int, start: int = 0, **entries: Any) -> TensorDict:
    """Steps that count; each fifth ends an episode."""
    number = torch.arange(start, start + count).float()[:, None]
    done = number % 5 == 4
    after = {"observation": number + 0.5, "reward": number, "done": done, "terminated": done & (number % 2 == 0)}
    return TensorDict({"observation": number, "achieved_goal": number, "next": after, **entries}, [count])


def write(ours: ExperienceBuffer, start: int) -> None:
    for step in range(4):
        ours.extend(rows(ENVS, start + step * ENVS))


def write_unevenly(ours: ExperienceBuffer, start: int) -> None:
    write(ours, start)
    ours.extend(rows(1, start + 2 * SIZE), env_ids=torch.tensor([1]))


def draw(ours: ExperienceBuffer) -> Any:
    """A batch, and where the steps that are stored lie in their episodes."""
    batch, writer = ours.sample(4), ours.writer
    cells = writer.rings.filled_cells()
    at = writer.rings.env_of(cells), writer.rings.position_of(cells)
    known = [] if writer.index is None else [getattr(writer.index, name)(*at) for name in ("begin", "end", "finished")]
    return batch, cells, *at, *known


def prefer(ours: ExperienceBuffer) -> Any:
    """As above; what was drawn gets priorities."""
    given = draw(ours)
    batch = given[0]
    batch["td_error"] = batch["observation"].squeeze(-1) % 7
    ours.update_tensordict_priority(batch)
    return given


def build(
    seed: int,
    sampler: Callable[[], Any] = UniformSampler,
    storage: Callable[[], Any] = lambda: RingStorage(SIZE),
    transform: Callable[[], Any] | None = None,
    envs: int | None = ENVS,
    **settings: Any,
) -> ExperienceBuffer:
    made = None if transform is None else transform()
    return ExperienceBuffer(
        storage=storage(), num_envs=envs, sampler=sampler(), transform=made, generator=generator(seed), **settings
    )


def buffer(sampler: Callable[[], Any] = UniformSampler, /, **settings: Any) -> Part:
    """A row of a buffer over rings."""
    make = partial(build, sampler=sampler, **settings)
    return Part(make=make, fill=write_unevenly, ask=draw, within=("sampler",), refuses=(SIZES,), empty=EMPTY)


def uneven_width(ours: ExperienceBuffer) -> ExperienceBuffer:
    ours.extend(rows(ENVS).exclude("achieved_goal"))
    return ours


EMPTY = (RuntimeError, "Cannot sample [34] .* 0 (steps )?are stored")
SETTINGS = {"max_capacity": SIZE, "alpha": 0.6, "beta": 0.4}
prioritized = partial(PrioritizedSampler, **SETTINGS)
windows = partial(prioritized, batch_length=2, num_earliest_frames_ignored=1)


def recent_and_prioritized() -> RecentSampler:
    preferring = prioritized(batch_length=1)
    return RecentSampler(2, recent_data_ratio=0.5, prioritized=preferring)


def other_sampler(sampler: Callable[[], Any]) -> Callable[[], Any]:
    return partial(build, 0, sampler=sampler)


FOREIGN = {
    "max_size=12, this storage has max_size=24": partial(build, 0, storage=partial(RingStorage, 24)),
    "num_envs=2, this writer has num_envs=1": partial(build, 0, envs=1),
    "this buffer has sampler='SamplerWithoutReplacement": other_sampler(SamplerWithoutReplacement),
    "'achieved_goal' is new": lambda: uneven_width(build(0)),
    "transform.*loc": partial(build, 0, transform=lambda: norm()),
}


def walk(ours: ExperienceBuffer, start: int) -> None:
    """An episode of each environment that reaches a place in each step, and never its goal."""
    steps = rows(5, start)
    steps["desired_goal"] = steps["next", "desired_goal"] = torch.full((5, 1), -5.0)
    steps["next", "achieved_goal"] = steps["achieved_goal"] + 1
    steps["next", "reward"] = -torch.ones(5, 1)
    steps["next", "terminated"] = torch.zeros(5, 1, dtype=torch.bool)
    steps["next", "truncated"] = steps["next", "done"]
    ours.extend(torch.stack([steps] * ENVS, 1), time_dim=0)


def norm() -> ObservationNorm:
    return ObservationNorm(loc=torch.zeros(1), scale=torch.ones(1), in_keys=["observation"])


uniform = buffer().but(
    foreign=FOREIGN,
    edited={"cuda:93": (("generator", "device"), "cuda:93")},
    refuses=(SIZES, *WRITES, *WRITE_BACKS),
    within=(),
    usable=lambda ours: (ours.sample(3), ours.extend(rows(ENVS)), ours.sample(3)),
)


def stacks(count: int, start: int) -> TensorDict:
    """Steps of one episode of stacked images for each environment."""
    number = torch.arange(start, start + count + 1)[:, None, None, None]
    stack = (number + torch.arange(-2, 1)[:, None, None]).clamp(min=start).to(torch.uint8).expand(-1, 3, 2, 2)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = True
    init = torch.zeros(count, 1, dtype=torch.bool)
    init[0] = True
    after = {"observation": stack[1:], "done": done, "reward": torch.zeros(count, 1)}
    return TensorDict({"observation": stack[:-1], "is_init": init, "next": after}, [count])


def write_frames(ours: ExperienceBuffer, start: int) -> None:
    steps = torch.stack([stacks(5, start % 100), stacks(5, start % 100 + 50)], 1)
    ours.extend(steps, time_dim=0)


AFTER = ("next", "observation")


def write_spoiled(spoil: Callable[[TensorDict], TensorDict]) -> Callable[[ExperienceBuffer], Any]:
    return lambda ours: ours.extend(spoil(torch.stack([stacks(1, 90)] * ENVS, 1)), time_dim=0)


def frames(seed: int, count: int = 3) -> ExperienceBuffer:
    return build(seed, storage=lambda: FrameStorage(2 * SIZE, count))


FOLDER = tempfile.TemporaryDirectory()  # cells in files leave no names in it


def in_files(seed: int) -> ExperienceBuffer:
    return build(seed, sampler=prioritized, storage=lambda: RingStorage(SIZE, scratch_dir=FOLDER.name))


def theirs(seed: int, storage: Any, sampler: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(), sampler=sampler(), generator=generator(seed), batch_size=4)


BUFFERS = {
    "uniform": uniform,
    "uniform, each once": buffer(partial(UniformSampler, False)).but(
        refuses=(SIZES, Refusal("Cannot sample 40 different cells: 12 are stored", lambda ours: ours.sample(40))),
    ),
    "stratified": buffer(partial(UniformSampler, stratified=True)),
    "prioritized": buffer(prioritized).but(
        ask=prefer,
        refuses=(SIZES, *PRIORITIES),
        foreign={
            "max_capacity=24": other_sampler(partial(prioritized, max_capacity=24)),
            "this buffer has sampler='UniformSampler": other_sampler(UniformSampler),
        },
    ),
    "prioritized, of those that are stored": buffer(
        partial(prioritized, weight_norm="buffer", max_priority_within_buffer=True)
    ).but(ask=prefer, within=()),
    "prioritized windows": buffer(windows).but(
        ask=prefer,
        foreign={"leaves must be": other_sampler(prioritized)},
        edited={
            says: (("sampler", *path), value)
            for says, path, value in (
                ("begin", ["starts", "begin"], torch.tensor([-1, 0])),
                ("end", ["starts", "end"], torch.tensor([99, 99])),
                ("starts state.*end", ["starts", "begin"], torch.tensor([0])),
                ("leaves must be", ["leaves"], torch.ones(SIZE, dtype=torch.float64)),
                ("at most 12 cells in all rings", ["starts", "length"], 9),
                ("'length' is 0", ["starts", "length"], 0),
                ("lacks starts", ["starts"], GONE),
            )
        },
    ),
    "sequences": buffer(partial(SequenceSampler, 2)),
    "sequences with a burn-in": buffer(partial(SequenceSampler, 2, burn_in=1, episode_ends="pad")),
    "recent": buffer(partial(RecentSampler, 2, recent_data_ratio=0.5)).but(
        foreign={"prioritized": other_sampler(recent_and_prioritized)},
    ),
    "recent, prioritized": buffer(recent_and_prioritized).but(
        ask=prefer,
        foreign={"prioritized": other_sampler(partial(RecentSampler, 2, recent_data_ratio=0.5))},
    ),
    "sampler of TorchRL": buffer(SamplerWithoutReplacement, transform=norm).but(
        fill=write,
        within=("sampler", "transform"),
        refuses=(),
        empty=(RuntimeError, "empty storage"),
    ),
    # A batch that is prefetched is drawn before or behind a write, as it happens.
    "prefetched": buffer(prioritized, prefetch=2, batch_size=3, transform=HindsightRelabel).but(
        fill=lambda ours, start: None if len(ours) else walk(ours, start),
        ask=lambda ours: [ours.sample() for _ in range(5)],
        within=(("prefetched", 0),),
        refuses=(),
        usable=lambda ours: ours.sample(),
        foreign={"prefetch": partial(build, 0, sampler=prioritized, transform=HindsightRelabel, batch_size=3)},
    ),
    "three steps": buffer(n_steps=3, gamma=0.5).but(
        refuses=(SIZES, Refusal("n_steps=3", write_back())),
    ),
    "three steps, prioritized": buffer(prioritized, n_steps=3, gamma=0.5).but(ask=prefer),
    "in files": buffer().but(make=in_files, ask=prefer, shares=True),
    "shared by processes": buffer().but(  # it takes no state, and its copies are private
        make=lambda seed: build(seed).share(example=rows(2)),
        ways=("pickle", "deepcopy"),
        refuses=SHARED,
        ours=False,
    ),
    "frames": Part(
        make=frames,
        canonical=(),  # places for frames that are free hold anything
        fill=write_frames,
        ask=draw,
        refuses=(Refusal("row 0 must be .* shifted by", write_spoiled(lambda data: data.set(AFTER, 9 * data[AFTER]))),),
        within=("storage",),
        foreign={"frame_stack=3": partial(frames, 0, 2)},
        edited={
            "frames of observation state is foreign": (
                ("storage", "frames", "observation", "frames"),
                torch.zeros(1, 2, 2, dtype=torch.uint8),
            )
        },
        empty=EMPTY,
    ),
    "hindsight": buffer(prioritized, transform=HindsightRelabel).but(fill=walk),
    "rings in TorchRL's buffer": Part(
        make=partial(theirs, storage=partial(RingStorage, 7), sampler=RandomSampler),
        fill=lambda ours, start: ours.extend(rows(5, start)),
        ask=lambda ours: ours.sample(),
        ways=SAVED,
        refuses=(Refusal("has 7 cells", lambda ours: ours.storage.set(torch.tensor([7]), rows(1)), error=IndexError),),
        ours=False,
    ),
    "priorities in TorchRL's buffer": Part(
        make=partial(theirs, storage=partial(LazyTensorStorage, SIZE), sampler=prioritized),
        fill=lambda ours, start: ours.extend(rows(9, start)),
        ask=lambda ours: ours.sample(),
        ways=SAVED,
        ours=False,
    ),
}


CELLS = LazyTensorStorage(SIZE)
CELLS.set(range(SIZE), rows(SIZE))


def seen(sampler: Any) -> Any:
    return sampler.sample(CELLS, 5), repr(sampler)


def use_priorities(sampler: PrioritizedSampler, start: int) -> None:
    sampler.mark_update(torch.arange(start % 5, SIZE))
    sampler.update_priority(torch.arange(SIZE), torch.arange(float(SIZE)) % 5 + start)


def by_torch(seed: int) -> PrioritizedSampler:
    made = prioritized(eps=0.0, generator=generator(seed))
    made.table = Priorities(SIZE, made.alpha, 0.0, backend="torch")
    return made


SAMPLERS = {
    "UniformSampler": Part(
        make=lambda seed: UniformSampler(seed > 0, stratified=not seed, generator=generator(seed)),
        fill=lambda sampler, start: None,
        ask=seen,
        edited={
            "not a state of a random generator": (("generator",), torch.zeros(3)),
            "lacks stratified": (("stratified",), GONE),
        },
    ),
    "PrioritizedSampler": Part(
        make=lambda seed: prioritized(  # what it prefers is part of the state
            alpha=1.0 if seed else 0.6, eps=0.5, generator=generator(seed)
        ),
        fill=use_priorities,
        ask=seen,
        foreign={
            "capacity=12, this prioritized sampler has max_capacity=6": partial(PrioritizedSampler, 6, 1.0, 1.0, 0.5),
            "eps=0.5, this prioritized sampler has eps=0.25": partial(prioritized, eps=0.25),
        },
        edited={
            "'alpha' is -1.0": (("alpha",), -1.0),
            "not a state of a random generator": (("generator",), torch.zeros(3)),
            "'priorities' is a tensor .* of float32": (("priorities",), torch.ones(SIZE)),
            "a tensor .13. of float64, expected": (("priorities",), torch.ones(SIZE + 1, dtype=torch.float64)),
            "expected a tensor .3. of float64": (("leaves",), torch.ones(3, dtype=torch.float64)),
            "leaves must be": (("leaves",), torch.ones(SIZE, dtype=torch.float64)),
            "must be finite": (("priorities",), torch.full((SIZE,), math.nan, dtype=torch.float64)),
            "-1 for empty cells": (("priorities",), torch.full((SIZE,), -1.0, dtype=torch.float64)),
            "finite number": (("largest",), math.inf),
            "lacks leaves": (("leaves",), GONE),
        },
        refuses=SAMPLER,
    ),
    "PrioritizedSampler, by torch": Part(make=by_torch, fill=use_priorities, ask=seen, refuses=SAMPLER),
    "SequenceSampler": Part(
        make=lambda seed: SequenceSampler(2, generator=generator(seed)),
        fill=lambda sampler, start: None,
        ask=repr,
        edited={"lacks": (("generator",), GONE)},
    ),
    "RecentSampler": Part(
        make=lambda seed: RecentSampler(2, recent_data_ratio=0.5, generator=generator(seed)),
        fill=lambda sampler, start: None,
        ask=repr,
    ),
}
