"""Compare the episodic replay buffer with its parts, interleaved on one thread.

    python tests/benchmarks/episodic.py [--json timings.json] [--repetitions 11] [--sizes 4 5 6 7] [--check]

The buffer has rows of 165 bytes from 64 environments. The first table compares reads with single steps of a plain
buffer: ``sample`` draws single steps by priority, ``get_batch`` draws windows of two, and ``steps_to_episode_end``
queries episode ends. The second table compares a write with plain slice copies of the same leaves. A write stores one
step of all environments, the episode index and the returns.

The last tables compare growing sizes with the smallest one. Their rows have 38 bytes. An operation adds 64 rows, or it
draws, queries or updates 256 rows. ``--check`` exits with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lightning._core.tree import leaves_of, tree_of
from torchrl_lightning.episodic.episodic_buffer import EpisodicReplayBuffer
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage

ENVS, BATCH, EPISODE = 64, 256, 250
SINGLE, STEPS, PAIRS, END = "single steps", "sample", "get_batch of 2", "steps_to_episode_end"
COPIES, ADD = "slice copies", "add_batch"
BUDGETS = {STEPS: 1.25, PAIRS: 2.0, END: 0.1, ADD: 3.0}  # upper bounds of the ratio to the first row
GROWTH = 1.75  # upper bound of the ratio to the smallest size: log(1e7) / log(1e4)


def steps_of(time: int, steps: int, features: int = 17) -> TensorDict:
    """Return steps of all environments from ``time`` on, time-major. Their episodes end at different times."""
    rows = steps * ENVS
    end = (torch.arange(time, time + steps)[:, None] + torch.arange(ENVS) * 4) % EPISODE == EPISODE - 1
    flag = end.reshape(rows, 1)
    after = {
        "observation": torch.randn(rows, features),
        "reward": torch.randn(rows, 1),
        "done": flag,
        "terminated": flag,
    }
    before = {"observation": torch.randn(rows, features), "action": torch.randn(rows, 6)}
    return TensorDict({**before, "next": after}, [rows])


def fill(buffer: ExperienceBuffer, size: int, features: int = 17) -> None:
    steps = size // ENVS
    for time in range(0, steps, 256):
        buffer.extend(steps_of(time, min(256, steps - time), features).view(-1, ENVS), time_dim=0)
    buffer.update_priority(torch.arange(len(buffer)), torch.empty(len(buffer)).exponential_())


def episodic(size: int, features: int = 17, prioritized_sampling: bool = True) -> EpisodicReplayBuffer:
    buffer = EpisodicReplayBuffer(
        None, ENVS, size // ENVS, prioritized_sampling=prioritized_sampling, record_episodic_return=True
    )
    fill(buffer, size, features)
    return buffer


def single(size: int) -> ExperienceBuffer:
    capacity = size // ENVS * ENVS
    sampler = PrioritizedSampler(capacity, 1.0, 1.0, 0.0)
    buffer = ExperienceBuffer(storage=RingStorage(capacity), sampler=sampler, num_envs=ENVS, batch_size=BATCH)
    fill(buffer, size)
    return buffer


def question(buffer: EpisodicReplayBuffer) -> Contender:
    _, info = buffer.get_batch(BATCH, 1)
    positions, ids = info.positions, info.env_ids
    return lambda: buffer.steps_to_episode_end(positions, ids)


def reading(size: int) -> dict[str, Contender]:
    buffer = episodic(size)
    return {
        SINGLE: single(size).sample,
        STEPS: lambda: buffer.sample(BATCH),
        PAIRS: lambda: buffer.get_batch(BATCH, 2),
        END: question(buffer),
    }


def adding(size: int) -> dict[str, Contender]:
    """Return the two ways to write one step of all environments: ``add_batch`` and slice copies.

    The copies write one slice of each stored leaf, including the returns, but not the episode index. Both contenders
    write to memory pages that were written before.
    """
    buffer = EpisodicReplayBuffer(None, ENVS, size // ENVS, record_episodic_return=True)
    fill_steps = itertools.cycle([steps_of(time, 1) for time in range(EPISODE)])
    fill(buffer, size)
    cells = [(leaf.clone(), path) for path, leaf in leaves_of(buffer.storage.tree)]
    default = torch.full((ENVS, 1), -1000.0)
    rows = []
    for time in range(EPISODE):
        leaves = dict(leaves_of(tree_of(steps_of(time, 1))))
        rows.append([(leaf, leaves.get(path, default)) for leaf, path in cells])
    copies, length = itertools.cycle(rows), size // ENVS
    place = itertools.cycle(range(length))

    def copy() -> Tensor | None:
        start = next(place) * ENVS
        for leaf, value in next(copies):
            leaf[start : start + ENVS] = value
        return None

    return {COPIES: copy, ADD: lambda: buffer.add_batch(next(fill_steps))}


def growing(buffer: EpisodicReplayBuffer, plain: EpisodicReplayBuffer) -> dict[str, Contender]:
    """Return the operations of a training loop on a buffer of this size; ``plain`` samples without priorities."""
    rows = itertools.cycle([steps_of(time, 1, 1) for time in range(EPISODE)])
    drawn = itertools.cycle([buffer.get_batch(BATCH, 2)[1] for _ in range(64)])
    priority = torch.rand(BATCH)

    def update() -> None:
        info = next(drawn)
        buffer.update_priority(info.env_ids, info.positions, priority)

    return {
        PAIRS: lambda: buffer.get_batch(BATCH, 2),
        f"{PAIRS}, no priorities": lambda: plain.get_batch(BATCH, 2),
        "update_priority": update,
        END: question(buffer),
        ADD: lambda: plain.add_batch(next(rows)),
        f"{ADD} with priorities": lambda: buffer.add_batch(next(rows)),
    }


def verdict(timings: list[Timing], budgets: dict[str, float]) -> bool:
    first, good = timings[0], True
    for timing in timings[1:]:
        ratio, asked = timing.median / first.median, budgets[timing.name]
        say(f"  {timing.name}: {ratio:.2f}x, at most {asked} is asked: {'met' if ratio <= asked else 'MISSED'}")
        good = ratio <= asked and good
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 5, 6, 7], help="powers of ten, ascending")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a budget is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    results: dict[str, list[Timing]] = {}
    good = True

    def measure(title: str, contenders: dict[str, Contender], budgets: dict[str, float]) -> None:
        nonlocal good
        results[title] = timings = compare(contenders, repetitions=arguments.repetitions, clock=process_time)
        say(table(title, timings, timings[0].name))
        good = verdict(timings, budgets) and good

    measure(f"episodic: read {BATCH} of 1e6", reading(10**6), BUDGETS)
    measure(f"episodic: write a step of {ENVS} environments", adding(10**6), BUDGETS)
    sizes = {f"1e{power}": growing(episodic(10**power, 1), episodic(10**power, 1, False)) for power in arguments.sizes}
    for name in next(iter(sizes.values())):
        contenders = {size: found[name] for size, found in sizes.items()}
        measure(
            f"episodic: {name}, {BATCH} (or one step of {ENVS}) at each size", contenders, dict.fromkeys(sizes, GROWTH)
        )
    if arguments.json:
        write_json(arguments.json, results)
    return 0 if good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
