"""How collectors, and what they replay, are used so that each entry of their states decides something."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torchrl.envs import GymWrapper, SerialEnv

from contracts.collectors import asynchronous, collect, gymnasium
from contracts.demonstrations import POOL, ppod, rollout
from contracts.need import Need, Together, changed
from kit.demonstrations import demo, episode, rewarded, saved, stored
from kit.lines import Line, Scripted, actor_of, line_collector, line_demo
from kit.seeds import generator
from torchrl_lightning import (
    DemonstrationReplay,
    DemonstrationReplayTransform,
    DemonstrationSampler,
    DemonstrationStorage,
)
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.environments import make_vector_env
from torchrl_lightning.learn import RecurrentNetwork

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

PLAYED: dict[str, Need] = {
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
