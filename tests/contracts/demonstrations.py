"""What demonstrations are kept, drawn, played and mined by."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Categorical, Composite, Unbounded

from contracts.part import Part, Refusal, Unfiled
from kit.demonstrations import demo, names, rewarded
from kit.seeds import generator
from kit.states import GONE
from torchrl_lightning import (
    DemonstrationMiner,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    DemonstrationWriter,
    EnvironmentSpecs,
    PPODBuffer,
)

ENVS = 2
SPECS = EnvironmentSpecs(Composite(observation=Unbounded((1,))), Categorical(2), 1)


def keep(storage: DemonstrationStorage, start: int) -> None:
    writer = DemonstrationWriter(storage)
    over = {"terminated": False, "truncated": True}
    writer.add(rewarded(1.0 + start, length=2, name=f"success {start}", metadata={"seed": start}, frame_skip=2, **over))
    writer.add(demo(0.0, 0.0, name=f"failure {start}", value=0.5 + start))


def kept(storage: DemonstrationStorage) -> Any:
    found = (storage.reward_demonstrations, storage.value_demonstrations)
    return [(each.name, each.steps, each.ends, each.value, each.metadata) for kind in found for each in kind]


def pool() -> DemonstrationStorage:
    storage = DemonstrationStorage(10)
    storage.replace(
        [rewarded(length=length, name=f"r{length}") for length in (2, 5, 9)], [demo(0.0, 0.0, value=2.0, name="v")]
    )
    return storage


POOL = pool()


def replay(seed: int, num_envs: int = 3) -> DemonstrationReplay:
    return DemonstrationReplay(POOL, DemonstrationSampler(0.7 - 0.1 * seed, 0.0, generator=generator(seed)), num_envs)


def play(replay: DemonstrationReplay, seed: int) -> Any:
    """Seventeen steps; environments where nothing plays end their episodes at random."""
    random, found = np.random.default_rng(seed), []
    for _ in range(17):
        rows = replay(~replay.playing & (random.random(len(replay.playing)) < 0.5))
        found.append(rows and [np.asarray(value) for value in (rows.mask, rows.serial, rows.terminated)])
    return found


def rollout(start: int) -> TensorDict:
    """Five steps ``[N, T]`` whose observations count; each fourth ends an episode."""
    number = torch.arange(start, start + 5).expand(ENVS, 5)[..., None]
    done = (number + torch.arange(ENVS)[:, None, None]) % 4 == 3
    init = done.roll(1, 1)
    init[:, 0] = start == 0
    after = {"observation": number + 1.0, "reward": done * 2.0, "done": done, "terminated": done}
    after["truncated"] = torch.zeros_like(done)
    entries = {"observation": number + 0.0, "action": number[..., 0] % 2, "state_value": number / 7, "is_init": init}
    return TensorDict({**entries, "next": after}, [ENVS, 5], names=[None, "time"])


def mining(change: Callable[[TensorDict], TensorDict]) -> Callable[[DemonstrationMiner], None]:
    return lambda miner: miner.mine(change(rollout(0)))


def with_nan(key: str) -> Callable[[TensorDict], TensorDict]:
    return lambda steps: steps.set(key, steps[key] * math.nan)


def unnamed(steps: TensorDict) -> TensorDict:
    steps.names = None
    return steps


LONG_STEPS = {
    "seen": torch.zeros(99, 1),
    "action": torch.zeros(99, dtype=torch.int64),
    "next": {"reward": torch.zeros(99, 1)},
}
OTHER_STEPS = {"seen": torch.zeros(1, 1), "action": torch.tensor([0]), "next": {"reward": torch.zeros(1, 1)}}


def miner(seed: int = 0, num_envs: int = ENVS) -> DemonstrationMiner:
    return DemonstrationMiner(DemonstrationWriter(DemonstrationStorage(20)), num_envs, specs=SPECS)


def ppod(seed: int, **options: Any) -> PPODBuffer:
    critic = TensorDictModule(lambda x: x[..., :1].clone(), in_keys=["observation"], out_keys=["state_value"])
    buffer = PPODBuffer(5, rho=0.5, phi=0.3, critic=critic, generator=generator(seed), **options)
    buffer.attach("CartPole-v1", ENVS)
    return buffer


def mine(buffer: PPODBuffer, start: int) -> None:
    steps = rollout(start)
    for part in (steps, steps["next"]):
        part["observation"] = part["observation"].expand(ENVS, 5, 4)
    buffer.empty()
    buffer.insert_data_slice(steps)
    buffer.before_gradients()


def learn(buffer: PPODBuffer) -> Any:
    batches = list(buffer.generate_batches(2))
    buffer.after_gradients(None, None)
    drawn = [buffer.sample_demo(0) for _ in range(5)]
    found = [names(kind) for kind in (buffer.reward_demos, buffer.value_demos)]
    return batches, [each and each.name for each in drawn], found, buffer.metrics()["demos/rho"]


DEMONSTRATIONS = {
    "DemonstrationStorage": Unfiled(
        make=lambda seed: DemonstrationStorage(4),
        fill=keep,
        ask=kept,
        foreign={
            "The state has capacity=4, this demonstration storage has capacity=5": partial(DemonstrationStorage, 5)
        },
        refuses=(
            Refusal(
                "at most the capacity 4, got 5",
                lambda storage: storage.replace([rewarded()] * 3, [rewarded()] * 2),
                empty=True,
            ),
        ),
    ),
    "DemonstrationWriter": Unfiled(
        make=lambda seed: DemonstrationWriter(DemonstrationStorage(4), reward_threshold=5.0 if seed else None),
        fill=lambda writer, start: writer.add(rewarded(float(start))),
        ask=lambda writer: writer.threshold,
        foreign={
            "annealing='linear', this demonstration writer has annealing='current'": lambda: DemonstrationWriter(
                DemonstrationStorage(4), annealing="current"
            )
        },
        edited={
            "'threshold' is nan": (("threshold",), float("nan")),
            "value_capacity=2": (("value_capacity",), 2),
        },
    ),
    "DemonstrationSampler": Unfiled(
        make=lambda seed: DemonstrationSampler(0.3, 0.1 if seed else 0.5, alpha=2, generator=generator(seed)),
        fill=lambda sampler, start: None,
        ask=lambda sampler: [each and each.name for each in (sampler.draw(POOL) for _ in range(20))],
        edited={
            r"rho \+ phi": (("rho",), 0.9),
            "'phi' is 'x'": (("phi",), "x"),
            "generator": (("generator",), torch.zeros(2)),
        },
    ),
    "DemonstrationReplay": Unfiled(
        make=replay,
        fill=play,
        ask=lambda replay: play(replay, 1),
        foreign={"num_envs=3": partial(replay, 0, 2)},
        refuses=(
            Refusal(
                "starts must have 3 entries.*got 5",
                methodcaller("__call__", np.ones(5, bool)),
                empty=True,
            ),
        ),
        within=("sampler", ("playing", 0, "env"), ("playing", 0, "position")),
        edited={
            "sampler state": (("sampler",), {}),
            "position 99 of demonstration": (("playing", 0, "position"), 99),
            "must have equal shapes": (("playing", 0, "demonstration", "steps"), LONG_STEPS),
            "'env' is 3": (("playing", 0, "env"), 3),
        },
    ),
    "DemonstrationMiner": Unfiled(
        make=miner,
        fill=lambda miner, start: miner.mine(rollout(start)),
        ask=lambda miner: None,
        foreign={"num_envs=2": partial(miner, 0, 3)},
        edited={
            "2 environments, got 0": (("running",), []),
            "'value' is 'high'": (("running", 0, "value"), "high"),
            "observation entries": (("running", 0, "steps"), OTHER_STEPS),
        },
        refuses=(
            Refusal("'state_value'", mining(with_nan("state_value")), empty=True),
            Refusal("'observation'.*NaN", mining(with_nan("observation")), empty=True),
            Refusal("Name it", mining(unnamed), empty=True),
            Refusal(
                r"rollout must have the dimensions time and 2 environments, got \[1, 5\]",
                mining(lambda steps: steps[:1]),
                empty=True,
            ),
        ),
    ),
    "PPODBuffer": Part(
        make=ppod,
        fill=mine,
        ask=learn,
        within=tuple(("demonstrations", name) for name in ("rollouts", "writer", "replay", "miners", "is_tracked")),
        empty=(RuntimeError, "empty"),
        refuses=(
            Refusal("env_id must .*0.*1.*2", methodcaller("sample_demo", 2), empty=True),
            Refusal(r"rho \+ phi must be at most 1", methodcaller("update_storage_parameter", "rho", 0.9), empty=True),
        ),
        edited={
            "schema version 9": (("demonstrations", "schema_version"), 9),
            "rollouts": (("demonstrations", "rollouts"), -1),
            "it lacks num_envs, running": (("demonstrations", "miners"), {"0": {}}),
            "capacity": (("demonstrations", "storage", "capacity"), 3),
            "demonstrations": (("demonstrations",), GONE),
        },
    ),
}
