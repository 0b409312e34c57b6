"""The documented replay buffers, and sources of batches over several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from tensordict import TensorDict

from contracts import documented
from contracts.part import Part, Refusal
from contracts.refusals import no_tensordict
from kit.documented import columns, simple_step
from kit.dynamics import numbered
from kit.seeds import generator
from torchrl_lightning import (
    BranchedReplay,
    EpisodicReplayBuffer,
    ExperienceBuffer,
    MBReplayBuffer,
    MixedReplay,
    RecurrentReplayBuffer,
    RingStorage,
    SimpleReplayBuffer,
)
from torchrl_lightning.episodic.time_steps import FIRST, LAST


def recurrent(seed: int = 0, capacity: int = 7, state_dim: int | None = 3) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(capacity, state_dim, 2, 4, generator=generator(seed))


def simple(seed: int, size: int = 5) -> SimpleReplayBuffer:
    return SimpleReplayBuffer(1, 2, size, 2, generator=generator(seed))


def store(buffer: SimpleReplayBuffer, start: int) -> None:
    for number in map(float, range(start, start + 3)):
        buffer.store(simple_step(number))


def time_steps(start: int) -> TensorDict:
    kind = FIRST if start % 5 == 0 else LAST if start % 5 == 4 else 1
    columns = {"step_type": [kind] * 2, "reward": [start + 0.0, start + 100.0], "discount": [float(kind != LAST)] * 2}
    return TensorDict({name: torch.tensor(column) for name, column in columns.items()}, [2])


def episodic(seed: int = 0, max_length: int = 6, **options: Any) -> EpisodicReplayBuffer:
    row = time_steps(1)[0]
    options = {"record_episodic_return": True, "generator": generator(seed), **options}
    return EpisodicReplayBuffer(row, 2, max_length, **options)


def add_batches(buffer: EpisodicReplayBuffer, start: int) -> None:
    for number in range(start, start + 8):
        buffer.add_batch(time_steps(number))


def look_at_windows(buffer: EpisodicReplayBuffer) -> Any:
    batch, info = buffer.get_batch(4, 2)
    if info.importance_weights is not None:
        buffer.update_priority(info.env_ids, info.positions, batch["reward"][:, 0] % 7)
    return batch, info.env_ids, info.positions, info.importance_weights, info.discounted_return


def looks(env: int, position: int) -> list[Callable[[Any], Any]]:
    """Calls that ask for a step."""
    at, of = torch.tensor([position]), torch.tensor([env])
    verbs = ("steps_to_episode_end", "get_episode_begin_position", "get_disc_0_begin_position")
    return [methodcaller("get_field", "reward", of, at), *(methodcaller(verb, at, of) for verb in verbs)]


STEP = time_steps(1)  # of both environments, which hold steps 10 to 15
add, dequeue = partial(methodcaller, "add_batch"), partial(methodcaller, "dequeue")
EPISODES_REFUSE = (
    Refusal(r"got \[1, 1\]", add(STEP, torch.tensor([1, 1]))),
    Refusal(r"in \[0, 2\), got \[2\]", add(STEP[:1], torch.tensor([2]))),
    Refusal(r"got \[-1\]", add(STEP[:1], torch.tensor([-1]))),
    Refusal("2 rows.*got 1", add(STEP[:1])),
    Refusal("'step_type'", add(STEP.exclude("step_type"))),
    Refusal("float64", add(STEP.double())),
    Refusal("'reward'", add(STEP.exclude("reward")), error=KeyError),
    Refusal("TensorDict", add({"reward": 1}), error=TypeError),
    Refusal("allow_multiprocess=False", add(STEP, blocking=True), dequeue(blocking=True)),
    Refusal("at most 6.*environment 0, got 7", dequeue(n=7)),
    Refusal("n must be a positive integer, got 0", dequeue(n=0)),
    Refusal(r"got \[0, 5\]", dequeue(torch.tensor([0, 5]))),
    Refusal(r"got \[5\]", methodcaller("clear", torch.tensor([5]))),
    Refusal("the fullest ring .* 6 steps", methodcaller("get_batch", 4, 7)),
    Refusal("batch_length", methodcaller("get_batch", 4, 0)),
    Refusal("Step 16 of environment 1", *looks(1, 16), error=IndexError),
    Refusal(r"Step 9 .*\[10, 16\)", *looks(0, 9), error=IndexError),
    Refusal("Step -1", *looks(1, -1), error=IndexError),
    Refusal(r"in \[0, 2\), got", *looks(2, 12), error=IndexError),
    Refusal("has no entry", methodcaller("get_field", "a.b", *torch.tensor([[0], [12]])), error=KeyError),
    Refusal("without priorities", methodcaller("update_priority", *torch.tensor([[0], [12], [1]]))),
)
WITH_PRIORITIES_REFUSE = (
    Refusal("must be .B., and", methodcaller("update_priority", *torch.tensor([[0], [12]]), torch.ones(2))),
    Refusal("Step 16", methodcaller("update_priority", *torch.tensor([[0, 1], [12, 16], [1, 1]])), error=IndexError),
)

episode_windows = Part(
    make=episodic,
    fill=add_batches,
    ask=look_at_windows,
    within=("sampler",),
    refuses=EPISODES_REFUSE,
    empty=(RuntimeError, "0 steps are stored"),
    foreign={"max_size=12": partial(episodic, max_length=7)},
)


SHARED_REFUSES = (
    Refusal("different numbers", add(STEP, torch.tensor([1, 1]), True), dequeue(torch.tensor([2]), blocking=True)),
    Refusal("max_length=99, got 100", add(torch.cat([STEP] * 100), None, True), dequeue(n=100, blocking=True)),
    Refusal("n must be a positive integer, got 0", dequeue(n=0, blocking=True)),
    Refusal("TensorDict", add({"reward": 1}, None, True), error=TypeError),
    Refusal("2 rows.*got 1", add(STEP[:1], None, True)),
    Refusal("'step_type'", add(STEP.exclude("step_type"), None, True)),
    Refusal("load the state before", lambda buffer: buffer.load_state_dict(buffer.state_dict()), error=RuntimeError),
)


class Source:
    """A source of batches with the buffer that it draws from, as a DataModule keeps both."""

    def __init__(self, own: ExperienceBuffer, source: Any) -> None:
        self.own, self.source = own, source

    def state_dict(self) -> Any:
        return {"own": self.own.state_dict(), "source": self.source.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.source.load_state_dict(state["source"])
        self.own.load_state_dict(state["own"])


def rows(start: int, count: int = 20) -> TensorDict:
    number = torch.arange(start, start + count).float()
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"a": number, "next": {"a": number + 1, "done": done}}, [count])


def ring(seed: int, filled: int = 0) -> ExperienceBuffer:
    made = ExperienceBuffer(storage=RingStorage(100), generator=generator(seed))
    if filled:
        made.extend(rows(1000 * seed, filled))
    return made


def mixed(seed: int, ratios: tuple[float, ...] = (0.5, 0.3, 0.2)) -> Source:
    own, *others = (ring(seed + number, 20 * min(number, 1)) for number in range(len(ratios)))
    return Source(own, MixedReplay(own, others, list(ratios)))


class Dreamer:
    """Imagines that each step adds 1000."""

    def fit_dynamics(self, training: TensorDict, validation: TensorDict) -> None: ...

    def imagine(self, start: TensorDict, length: int) -> TensorDict:
        return torch.cat([start.clone().set("a", start["a"] + 1000.0 * (step + 1)) for step in range(length)])


def branched(seed: int) -> Source:
    settings = {"branches_per_fit": 30, "frames_per_fit": 10, "real_ratio": 0.25, "fits_kept": 2}
    own = ring(seed)
    return Source(own, BranchedReplay(own, **settings, last_length=2, lengthened_between=(45, 60)))


def imagine_and_draw(own: Source) -> Any:
    own.source.prepare(Dreamer())
    return own.source.draw(7), own.source.fits


def source(make: Callable[[int], Source], ask: Callable[[Source], Any]) -> Part:
    return Part(
        make=make,
        fill=lambda own, start: own.own.extend(rows(start)),
        ask=ask,
        ways=("memory", "file"),
        within=(("source", "fits"),),
    )


FAMILIES = {
    "RecurrentReplayBuffer": Part(
        make=recurrent,
        fill=lambda buffer, start: buffer.add_multi(**columns(start, 9)),
        ask=lambda buffer: buffer.sample(4),
        within=("storage",),
        refuses=(*documented.RECURRENT, *no_tensordict(RecurrentReplayBuffer.extend)),
        empty=(ValueError, "Available: 0, Requested: 4"),
        foreign={
            "max_size=7.*max_size=8": partial(recurrent, capacity=8),
            "state_dim=3, this buffer has state_dim=9": partial(recurrent, state_dim=9),
        },
    ),
    "SimpleReplayBuffer": Part(
        make=simple,
        fill=store,
        ask=lambda buffer: buffer.sample_batch(),
        within=("sampler",),
        refuses=(*documented.SIMPLE, *no_tensordict(SimpleReplayBuffer.extend)),
        empty=(ValueError, "batch_size must be at most 0.*got 2"),
        foreign={"max_size=5": partial(simple, 0, size=6)},
    ),
    "MBReplayBuffer": Part(
        make=lambda seed: MBReplayBuffer(4, num_envs=2, generator=generator(seed)),
        fill=lambda buffer, start: buffer.insert_data_slice(numbered(start, start + 6, 2)),
        ask=lambda buffer: list(buffer.generate_batches(mini_batch_size=3)),
        within=("sampler", "transform"),
        empty=(RuntimeError, "Nothing is stored"),
        foreign={"max_size": partial(MBReplayBuffer, 5, num_envs=2)},
        refuses=(
            *(
                Refusal(
                    r"Rows .* the stored rows \[0, 4\)",
                    methodcaller("get_data_slice", start, end),
                    error=IndexError,
                )
                for start, end in ((0, 5), (-1, 2), (2, 1), (4, 4))
            ),
            Refusal("max_size", *(methodcaller("update_storage_parameter", "max_size", size) for size in (0, 1 << 50))),
            Refusal("'sise'", methodcaller("update_storage_parameter", "sise", 3)),
            Refusal(
                r"got 4 steps. Call reset\(\)",
                lambda buffer: buffer.init_tensors({name: value[0] for name, value in numbered(0, 1, 2).items()}),
            ),
        ),
    ),
    "EpisodicReplayBuffer": episode_windows,
    "EpisodicReplayBuffer, recent": episode_windows.but(make=partial(episodic, recent_data_ratio=0.9)),
    "EpisodicReplayBuffer, prioritized": episode_windows.but(
        make=partial(episodic, prioritized_sampling=True, recent_data_ratio=0.5, num_earliest_frames_ignored=1),
        refuses=WITH_PRIORITIES_REFUSE,
    ),
    "EpisodicReplayBuffer, shared": episode_windows.but(  # takes no state
        make=partial(episodic, max_length=99, allow_multiprocess=True),
        ways=(),
        foreign={},
        ours=False,
        refuses=SHARED_REFUSES,
    ),
    "MixedReplay": source(mixed, lambda own: own.source.draw(7)).but(
        within=(("source", "owed"),),
        foreign={"3 mixed buffers, expected 2": partial(mixed, 0, (0.5, 0.5))},
    ),
    "BranchedReplay": source(branched, imagine_and_draw).but(
        edited={"branched replay state is foreign: it lacks": (("source",), {})},
    ),
}
