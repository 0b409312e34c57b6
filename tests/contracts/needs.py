"""How parts are used so that each entry of their states decides something.

A part is made twice by the same call. The first one is used and saved; the second one takes the state, and is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, SliceSampler, TensorDictReplayBuffer, Unbounded

from contracts import families, replay
from contracts.need import Need, Together, changed
from contracts.played_needs import PLAYED
from contracts.rollouts import build as rollout_buffer
from contracts.rollouts import learn, steps
from kit.seeds import generator
from torchrl_lightning import (
    EnvironmentSpecs,
    ExperienceBuffer,
    HoldoutSplit,
    RingStorage,
    SequenceSampler,
)
from torchrl_lightning.datamodules.frames import FrameClock
from torchrl_lightning.datamodules.normalization import Normalization
from torchrl_lightning.datamodules.reward_scale import RewardScale

ROWS = (
    "ExperienceBuffer.storage",
    "ExperienceBuffer.writer",
    "RingStorage.data",
    "RingStorage.count",
    "Rings.positions",
)
"""Entries without which a sample would read memory that was never written."""


def look_at_rows(ours: ExperienceBuffer) -> Any:
    rows = None if ours.storage.cells is None else ours.storage.get(torch.arange(len(ours)))
    return rows, ours.writer.filled


# ---------------------------------------------------------------------- rings

BUFFER = Need(partial(replay.build, 0), lambda ours: replay.write(ours, 0), replay.draw)


def walk(first: Sequence[float], noise: Sequence[float], envs: int = 2) -> TensorDict:
    """Rows of environments whose observations are the successors of those before, beside a noisy entry."""
    number, noisy = (torch.tensor(each).float()[:, None, None].expand(-1, envs, 1).clone() for each in (first, noise))
    after = {"observation": number + 1, "noisy": torch.full_like(noisy, 7.0), "reward": number}
    flag = torch.zeros_like(number, dtype=torch.bool)
    entries = {"observation": number, "noisy": noisy, "next": {**after, "done": flag, "terminated": flag}}
    return TensorDict(entries, number.shape[:2])


def episodes(ours: ExperienceBuffer, *writes: TensorDict) -> Any:
    for rows in writes:
        ours.extend(rows, time_dim=0)
    return replay.draw(ours)


def long_buffer() -> ExperienceBuffer:
    return replay.build(0, storage=lambda: RingStorage(40), n_steps=2, gamma=0.5)


def cut_silently(ours: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cut
        return episodes(ours, walk([90.0], [0.0]))


SEAMS = Need(long_buffer, lambda ours: episodes(ours, walk([0, 1], [0, 0])), cut_silently)
NOISY = SEAMS._replace(ask=lambda ours: episodes(ours, walk([2], [7]), walk([3], [0]), walk([4], [0])))


def remove(ours: ExperienceBuffer) -> None:
    replay.write(ours, 0)
    ours.writer.drop(2)


def in_torchrl() -> TensorDictReplayBuffer:
    sampler = SliceSampler(num_slices=4, end_key=("next", "done"), strict_length=False)
    return replay.theirs(0, lambda: RingStorage(12), lambda: sampler)


def fill_around(theirs: TensorDictReplayBuffer) -> None:
    """Write twelve rows and then four more, so that the last one lies amid the storage."""
    for start, count in ((0, 12), (12, 4)):
        theirs.extend(replay.rows(count, start).exclude("done"))


def draw_slices(theirs: TensorDictReplayBuffer) -> Any:
    return [theirs.sample() for _ in range(3)]


def start_again(ours: ExperienceBuffer) -> None:
    replay.write(ours, 0)
    ours.empty()
    replay.write(ours, 100)


def write_late(ours: ExperienceBuffer) -> Any:
    """Write back rows that were drawn before the rings started again."""
    batch = ours.storage.get(torch.tensor([0, 1]))
    batch["index"], batch["write_position"] = torch.tensor([0, 1]), torch.tensor([4, 4])
    batch["next", "reward"] += 100
    ours.write_back(batch, [("next", "reward")])
    return ours.storage.get(torch.tensor([0, 1]))["next", "reward"]


def draw_behind_removed(ours: ExperienceBuffer) -> Any:
    """Take steps out, so that no window begins at the ones after them, before anything is drawn."""
    ours.writer.drop(2)
    return ours.sample(6), ours.sample(6)


def prefer_twice(ours: ExperienceBuffer) -> Any:
    return replay.prefer(ours), replay.prefer(ours)


def prefer_stored(ours: ExperienceBuffer) -> None:
    replay.write_unevenly(ours, 0)
    replay.prefer(ours)


PREFERRED = Need(partial(replay.build, 0, sampler=replay.prioritized), prefer_stored, prefer_twice)
WINDOWS = Need(partial(replay.build, 0, sampler=replay.windows), prefer_stored, draw_behind_removed)


def with_norm() -> ExperienceBuffer:
    return replay.build(0, transform=replay.norm)


def learn_norm(ours: ExperienceBuffer) -> None:
    replay.write(ours, 0)
    ours.transform[0].loc.add_(5.0)


def sequence_sampler() -> Together:
    sampler = SequenceSampler(2, generator=generator(0))
    return Together(sampler)


def draw_windows(one: Together) -> Any:
    held = replay.build(1, storage=lambda: RingStorage(40))
    for step in range(8):
        held.extend(replay.rows(2, 2 * step))
    return [one.parts[0].sample(held.storage, 4) for _ in range(2)]


# ---------------------------------------------------------------------- splits and branches


class Splits(Together):
    """A split of the rows in a buffer."""

    def __init__(self) -> None:
        self.buffer = ExperienceBuffer(storage=RingStorage(8), check_successors=False)
        self.split = HoldoutSplit(0.5, 3, seed=3)
        super().__init__(self.buffer, self.split)

    def write(self, first: int, count: int) -> Any:
        self.buffer.extend(families.rows(first, count))
        self.split.extend(self.buffer.writer)
        return self.split.parts(self.buffer.writer.rings.filled_cells())


def split_again(one: Splits) -> None:
    one.write(0, 5)
    one.buffer.empty()
    one.write(20, 6)


class Recorder(families.Dreamer):
    """Remembers which rows it was fitted to."""

    def __init__(self) -> None:
        self.fitted: list[Any] = []

    def fit_dynamics(self, training: TensorDict, validation: TensorDict) -> None:
        self.fitted.append((training["a"].clone(), validation["a"].clone()))


def imagine(own: families.Source, *writes: int) -> Any:
    dreamer, drawn = Recorder(), []
    for start in writes:
        if start >= 0:
            own.own.extend(families.rows(start, 10))
        own.source.prepare(dreamer)
        drawn.append(own.source.draw(7))
    return dreamer.fitted, drawn


BRANCHED = Need(
    partial(families.branched, 0),
    lambda own: imagine(own, 0, 40, 50, 60),
    lambda own: imagine(own, -1, 500, 510),
)


# ---------------------------------------------------------------------- rewards and moments

RATES = 0.5


def note(scale: RewardScale, ids: Any = None) -> None:
    reward = torch.arange(10.0).view(2, 5, 1)
    scale.note(reward, torch.zeros(2, 5, 1, dtype=torch.bool), ids, RATES)


def reduced(scale: RewardScale) -> Any:
    one = scale.reduced()
    note(scale)
    other = scale.reduced()
    return [(each.count, each.mean, each.variance) for each in (one, other) if each is not None]


SCALE = Need(lambda: RewardScale(10.0), note, reduced)


class Normalizing(Together):
    """What a run normalises by, beside its statistics, which are saved apart."""

    def __init__(self) -> None:
        self.normalization = Normalization(True, True, 10.0)
        self.normalization.specs(EnvironmentSpecs(Composite(observation=Unbounded((1,))), Categorical(2), 2))

    def state_dict(self) -> list[Any]:
        return [self.normalization.state_dict(), self.normalization.statistics()]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        self.normalization.load_state_dict(states[0])
        self.normalization.load_statistics(states[1])

    def note(self, length: int, start: int, *, cut: bool = False) -> Any:
        number = torch.arange(start, start + 2 * length).float().view(2, length, 1) % 17
        after = {"reward": number, "done": torch.zeros_like(number, dtype=torch.bool)}
        rows = TensorDict({"observation": number, "next": after}, [2, length])
        self.normalization.note(rows, None, cut=cut, gamma=0.9)
        self.normalization.advance_if_due()
        return self.normalization.statistics()


def normalize(one: Normalizing) -> None:
    one.note(30, 0)
    one.note(60, 40, cut=True)
    one.note(60, 90)


NORMALIZED = Need(Normalizing, normalize, lambda one: [one.note(length, 3) for length in (4, 10, 200)])


def add_replayed(clock: FrameClock) -> None:
    clock.add(4, 1, torch.tensor([[[True], [True], [False], [True]]]))
    clock.add(4, 1, torch.ones(1, 4, 1, dtype=torch.bool))


def replayed_to_the_end(clock: FrameClock) -> Any:
    clock.add(4, 1, torch.ones(1, 4, 1, dtype=torch.bool))
    return clock.is_spent, clock.metrics()


# ---------------------------------------------------------------------- rollouts


def half_sampled(buffer: Any) -> None:
    buffer.insert_data_slice(steps(0))
    buffer.before_gradients()
    buffer.sample(4)


def sampled(buffer: Any) -> Any:
    return [buffer.sample(4) for _ in range(7)]


def to_the_end(buffer: Any) -> Any:
    """Sample as long as an epoch lasts."""
    batches = []
    while not buffer.sampler.ran_out:
        batches.append(buffer.sample(4))
    return batches


MINIBATCHES = Need(partial(rollout_buffer, 0), half_sampled, sampled)


def exhaust(buffer: Any) -> None:
    half_sampled(buffer)
    to_the_end(buffer)


def consume(buffer: Any) -> None:
    buffer.insert_data_slice(steps(0))
    buffer.before_gradients()
    buffer.after_gradients(None, None)


def write_again(buffer: Any) -> Any:
    buffer.extend(steps(3))
    return learn(buffer)


def open_steps(start: int) -> Any:
    """A rollout in which no episode ends."""
    data = steps(start)
    for name in ("done", "terminated"):
        data["next", name] = torch.zeros_like(data["next", name])
    return data


def leave_open(buffer: Any) -> None:
    buffer.insert_data_slice(open_steps(0))
    buffer.before_gradients()
    buffer.after_gradients(None, None)


def continued(buffer: Any) -> Any:
    """Write step by step, of which the first begins with what followed the last rollout."""
    buffer.empty()
    for step in open_steps(3).transpose(0, 1):
        buffer.insert_transition(step.exclude("is_init", "observation"))
    buffer.before_gradients()
    return learn(buffer)


def norm_of_rollouts() -> Any:
    from torchrl.envs.transforms import ObservationNorm

    norm = ObservationNorm(loc=torch.zeros(4), scale=torch.ones(4), in_keys=["observation"])
    return rollout_buffer(0, transform=norm)


def learn_norm_of_rollouts(buffer: Any) -> None:
    consume(buffer)
    buffer.transform[0].loc.add_(5.0)


NEEDS: dict[str, Need] = {
    "SuccessorCheck.matched": SEAMS,
    "SuccessorCheck.differed": NOISY,
    "Rings.successors": SEAMS,
    "Rings.oldest": BUFFER._replace(use=remove),
    **dict.fromkeys(ROWS, BUFFER._replace(ask=look_at_rows)),
    "RingStorage.cursor": Need(in_torchrl, fill_around, draw_slices),
    "RingStorage.cells": BUFFER._replace(use=lambda ours: replay.write_unevenly(ours, 0)),
    "Rings.era": Need(partial(replay.build, 0), start_again, write_late),
    "Rings.write_count": BRANCHED,
    "ExperienceBuffer.transform": Need(with_norm, learn_norm, replay.draw),
    "PrioritizedSampler.alpha": changed(PREFERRED, sampler__alpha=2.0),
    "PrioritizedSampler.beta": changed(PREFERRED, sampler__beta=1.0),
    "PrioritizedSampler.starts": WINDOWS,
    "UniformSampler.with_replacement": changed(BUFFER, sampler__with_replacement=False),
    "UniformSampler.stratified": changed(BUFFER, sampler__stratified=True),
    "SequenceSampler.generator": Need(sequence_sampler, draw_windows, draw_windows),
    "HoldoutSplit.seed": BRANCHED,
    "HoldoutSplit.seen": Need(Splits, lambda one: one.write(0, 8), lambda one: one.write(20, 3)),
    "HoldoutSplit.era": Need(Splits, split_again, lambda one: one.write(40, 1)),
    "BranchedReplay.split": BRANCHED,
    "BranchedReplay.fitted_at": BRANCHED,
    "FrameClock.count": Need(lambda: FrameClock(9), add_replayed, replayed_to_the_end),
    "FrameClock.alone": Need(lambda: FrameClock(8), add_replayed, replayed_to_the_end),
    "RewardScale.gamma": SCALE,
    "RewardScale.env_ids": SCALE._replace(use=lambda scale: note(scale, torch.tensor([2, 0]))),
    **{f"Normalization.{name}": NORMALIZED for name in ("count", "total", "rows", "noted", "scale")},
    "MinibatchSampler.len_storage": MINIBATCHES,
    "MinibatchSampler.remaining": MINIBATCHES,
    "MinibatchSampler.drop_last": changed(MINIBATCHES, sampler__drop_last=True),
    "MinibatchSampler.shuffle": changed(MINIBATCHES, sampler__shuffle=False),
    "MinibatchSampler.generator": MINIBATCHES,
    "MinibatchSampler.ran_out": Need(MINIBATCHES.make, exhaust, to_the_end),
    "RolloutStorage.tail": Need(MINIBATCHES.make, leave_open, continued),
    "RolloutBuffer.sampler": MINIBATCHES,
    "RolloutBuffer.consumed": Need(MINIBATCHES.make, consume, write_again),
    "RolloutBuffer.transforms": Need(norm_of_rollouts, learn_norm_of_rollouts, learn),
    **PLAYED,
}
"""The use that shows an entry; the parts of the other contracts show those that are not here."""
