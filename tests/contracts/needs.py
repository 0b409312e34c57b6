"""How parts are used so that each entry of their states decides something.

A part is made twice by the same call. The first one is used and saved; the second one takes the state, and is asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, SliceSampler, TensorDictReplayBuffer, Unbounded
from torchrl.envs import GymWrapper, SerialEnv

from contracts import families, replay
from contracts.collectors import asynchronous, collect, gymnasium
from contracts.demonstrations import POOL, ppod, rollout
from contracts.part import Part
from contracts.rollouts import build as rollout_buffer
from contracts.rollouts import learn, steps
from kit.demonstrations import demo, episode, rewarded, saved, stored
from kit.lines import Line, Scripted, actor_of, line_collector, line_demo
from kit.seeds import generator
from torchrl_lightning import (
    DemonstrationReplay,
    DemonstrationReplayTransform,
    DemonstrationSampler,
    DemonstrationStorage,
    EnvironmentSpecs,
    ExperienceBuffer,
    HoldoutSplit,
    RingStorage,
    SequenceSampler,
)
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.datamodules.frames import FrameClock
from torchrl_lightning.datamodules.normalization import Normalization
from torchrl_lightning.datamodules.reward_scale import RewardScale
from torchrl_lightning.environments import make_vector_env
from torchrl_lightning.learn import RecurrentNetwork


class Need(NamedTuple):
    """How a part is made, used before it is saved, and asked after its state was loaded into another one."""

    make: Callable[[], Any]
    use: Callable[[Any], Any]
    ask: Callable[[Any], Any]


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


class Together:
    """Parts that are saved and loaded one after the other, as those of a run."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def of_part(part: Part) -> Need:
    """Use a part as the other contracts do."""

    def use(one: Any) -> None:
        part.fill(one, 0)
        part.ask(one)
        part.fill(one, 40)

    def ask(one: Any) -> Any:
        given = []
        for start in (500, 600):
            given.append(part.ask(one))
            part.fill(one, start)
        return [*given, part.ask(one)]

    return Need(partial(part.make, 0), use, ask)


def changed(need: Need, **attributes: Any) -> Need:
    """Change attributes before a part is saved."""

    def use(one: Any) -> None:
        need.use(one)
        for path, value in attributes.items():
            *holders, last = path.split("__")
            held = one
            for holder in holders:
                held = getattr(held, holder)
            setattr(held, last, value)

    return need._replace(use=use)


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


# ---------------------------------------------------------------------- collectors


def collect_with(**settings: Any) -> Need:
    return Need(partial(gymnasium, **settings), collect, collect)


def reseeded(**options: Any) -> Callable[[Any], None]:
    def use(collector: Any) -> None:
        collector.set_seed(5, **options)
        collect(collector)

    return use


def publish(collector: Any) -> None:
    collect(collector)
    collector.update_policy_weights_()


def replaying() -> Together:
    """A collector within a demonstration, and what it replays."""
    played = DemonstrationReplay(stored(line_demo(9)), Scripted(None, None, None, 0, None), 2)
    env = lambda: Line(start=1.0)  # noqa: E731
    policy = actor_of(make_vector_env(env, 2), RecurrentNetwork(hidden_size=4))
    return Together(played, line_collector(played, 2, 4, policy, seed=0, env=env))


def replaying_in_torchrl() -> Together:
    played = DemonstrationReplay(stored(line_demo(9)), Scripted(0), 2, log_prob="current")
    env = DemonstrationReplayTransform(played).wrap(SerialEnv(2, lambda: GymWrapper(Line(start=1.0))))
    from torchrl_lightning import DemonstrationActor

    policy = DemonstrationActor(actor_of(make_vector_env(lambda: Line(start=1.0), 2), RecurrentNetwork(hidden_size=4)))
    return Together(played, TorchRLCollector(env, policy, frames_per_batch=8, seed=0))


def roll(one: Together) -> Any:
    return [one.parts[1].rollout() for _ in range(2)]


# ---------------------------------------------------------------------- demonstrations


def drawn(sampler: DemonstrationSampler, storage: DemonstrationStorage = POOL) -> Any:
    return [each and each.name for each in (sampler.draw(storage) for _ in range(40))]


VALUES = DemonstrationStorage(10)
VALUES.replace([], [demo(0.0, value=value, name=f"v{value}") for value in (1.0, 1.2, 1.5)])
SAMPLER = Need(lambda: DemonstrationSampler(0.3, 0.5, alpha=2, generator=generator(0)), lambda sampler: None, drawn)


def number(storage: DemonstrationStorage) -> None:
    storage.replace([rewarded(name="a"), rewarded(name="b")], [])
    storage.replace(storage.reward_demonstrations[:1], [])


def numbered(storage: DemonstrationStorage) -> Any:
    storage.replace([*storage.reward_demonstrations, rewarded(name="c")], [])
    return [each.serial for each in storage.reward_demonstrations]


def choose(replay: DemonstrationReplay) -> None:
    for env in range(2):
        replay.choose(env)


def begin(replay: DemonstrationReplay) -> Any:
    replay.begin(np.ones(2, bool))
    return replay.playing


LATE, SAVED = (tempfile.TemporaryDirectory() for _ in range(2))


def mine(buffer: Any, start: int = 0) -> None:
    rows = rollout(start)
    for part in (rows, rows["next"]):
        part["observation"] = part["observation"].expand(2, 5, 4)
    buffer.insert_data_slice(rows)
    buffer.before_gradients()


def demonstrations(buffer: Any) -> Any:
    kinds = (buffer.reward_demos, buffer.value_demos)
    return [[(each.name, each.total_reward, each.value, each.serial) for each in kind] for kind in kinds]


def mine_again(buffer: Any) -> Any:
    """Estimate a rollout again."""
    buffer.before_gradients()
    return demonstrations(buffer)


def played_by(buffer: Any) -> Any:
    played = []
    for _ in range(6):
        rows = buffer.replay(~buffer.replay.playing)
        played.append(rows and [np.asarray(each) for each in (rows.mask, rows.serial)])
    return played


def saving() -> Any:
    return ppod(0, target_agent_demos_dir=SAVED.name, save_demos_every=2)


def files_of_next(buffer: Any) -> Any:
    """Look which files the next rollout writes."""
    folder = Path(SAVED.name)
    for file in folder.iterdir():
        file.unlink()
    buffer.empty()
    mine(buffer, 20)
    return sorted(file.name for file in folder.iterdir())


def late_demos() -> Any:
    return ppod(0, supplementary_demos_dir=saved(Path(LATE.name), episode(total=99.0)))


def take_again(buffer: Any) -> Any:
    buffer.empty()
    mine(buffer, 20)
    return demonstrations(buffer)


def succeed(buffer: Any) -> None:
    mine(buffer)
    buffer.replay(np.ones(2, bool))


def fail(buffer: Any) -> Any:
    """Mine an episode whose return is below that of a success by now."""
    buffer.empty()
    rows = rollout(20)
    rows["next", "reward"] = rows["next", "reward"] / 2
    for part in (rows, rows["next"]):
        part["observation"] = part["observation"].expand(2, 5, 4)
    buffer.insert_data_slice(rows)
    buffer.before_gradients()
    return demonstrations(buffer)


MINING = Need(partial(ppod, 0), succeed, mine_again)

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
    "CollectorBase.frames": Need(partial(gymnasium, total_frames=42), collect, list),
    "CollectorBase.seed": Need(gymnasium, reseeded(), collect),
    "GymnasiumCollector.static_seed": Need(gymnasium, reseeded(static_seed=True), collect),
    "GymnasiumCollector.trajectory_ids": Need(replaying, lambda one: one.parts[1].rollout(), roll),
    "GymnasiumCollector.recurrent_states": Need(replaying, lambda one: one.parts[1].rollout(), roll),
    "TorchRLCollector.ended": Need(replaying_in_torchrl, lambda one: one.parts[1].rollout(), roll),
    "TorchRLCollector.recurrent_states": Need(replaying_in_torchrl, lambda one: one.parts[1].rollout(), roll),
    "WorkersCollector.policy_version": Need(asynchronous, publish, collect),
    "DemonstrationStorage.next_serial": Need(lambda: DemonstrationStorage(4), number, numbered),
    "DemonstrationSampler.rho": changed(SAMPLER, rho=0.0),
    "DemonstrationSampler.phi": changed(SAMPLER, phi=0.0),
    "DemonstrationSampler.alpha": changed(
        SAMPLER._replace(ask=partial(drawn, storage=VALUES)),
        alpha=0.0,
    ),
    "DemonstrationReplay.chosen": Need(
        lambda: DemonstrationReplay(POOL, DemonstrationSampler(0.5, 0.0, generator=generator(3)), 2), choose, begin
    ),
    "DemonstrationHooks.is_tracked": MINING,
    "DemonstrationHooks.writer": MINING._replace(ask=fail),
    "DemonstrationHooks.replay": MINING._replace(ask=played_by),
    "DemonstrationHooks.rollouts": Need(saving, mine, files_of_next),
    "DemonstrationHooks.taken": Need(late_demos, mine, take_again),
}
"""The use that shows an entry; the parts of the other contracts show those that are not here."""
