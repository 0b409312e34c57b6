"""Compare prioritized sampling and priority updates with peers, interleaved on one thread.

    python tests/benchmarks/prioritized.py [--json timings.json] [--repetitions 11] [--batches 32 256 1024]
                                           [--sizes 5 6 7] [--check]

One call samples a batch from 1e6 transitions and updates the priorities of the sampled cells. A transition has 165
bytes in five fields; batches contain importance weights. Each peer uses its own types and its fastest interface. Peers
that are not installed or do not load are reported as absent.

The next tables compare ours at other capacities with 1e4 transitions. Only these two buffers are in memory. The last
table compares samples of 256 windows of two steps with samples of 256 single steps. ``--check`` exits with 1 if a
budget is missed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler

from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage

ALPHA, BETA, CHUNK = 0.6, 0.4, 10_000
OURS = "torchrl-lightning"
FACTORS = {32: 0.9, 256: 1.4, 1024: 1.4}  # required ratio to the fastest peer, by batch size
WINDOWS = 2.0  # upper bound of the ratio to single steps
PEERS = ("TorchRL", "cpprb", "Flashbax", "Tianshou")


def new_priorities(batch: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).gamma(1.0, 1.0, batch) for seed in range(16)]


def absent(name: str, reason: str = "not installed") -> None:
    say(f"  absent: {name} ({reason})")


def fields(rows: int) -> dict[str, np.ndarray]:
    """Return fields with 165 bytes per row."""
    rng = np.random.default_rng(rows)
    return {
        "observation": rng.standard_normal((rows, 17), np.float32),
        "action": rng.standard_normal((rows, 6), np.float32),
        "reward": rng.standard_normal((rows, 1), np.float32),
        "done": np.zeros((rows, 1), np.bool_),
        "next_observation": rng.standard_normal((rows, 17), np.float32),
    }


def rows_of() -> TensorDict:
    data = {key: torch.from_numpy(value) for key, value in fields(CHUNK).items()}
    data["next"] = {"reward": data.pop("reward"), "done": data.pop("done"), "observation": data.pop("next_observation")}
    return TensorDict(data, [CHUNK])


def fill(buffer: Any, size: int) -> None:
    data = rows_of()
    for _ in range(size // CHUNK):
        buffer.extend(data)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, size, 100_000):
        count = min(100_000, size - start)
        values = torch.empty(count).exponential_(generator=generator)
        buffer.update_priority(torch.arange(start, start + count), values)


def of_buffer(buffer: Any, batch: int) -> Contender:
    new = itertools.cycle([torch.from_numpy(value).float() for value in new_priorities(batch)])

    def run() -> object:
        drawn = buffer.sample(batch)
        drawn.set("td_error", next(new))
        buffer.update_tensordict_priority(drawn)
        return drawn

    return run


def ours(size: int, batch: int, **options: Any) -> Contender:
    sampler = PrioritizedSampler(size, ALPHA, BETA, **options)
    buffer = ExperienceBuffer(storage=RingStorage(size), sampler=sampler, batch_size=batch)
    fill(buffer, size)
    return of_buffer(buffer, batch)


def contenders(size: int, batch: int) -> dict[str, Contender]:
    found = {OURS: ours(size, batch), f"{OURS}, independent draws": ours(size, batch, stratified=False)}
    sampler = PrioritizedSampler(size, ALPHA, BETA)
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=batch)
    fill(theirs, size)
    found["our sampler in TorchRL's buffer"] = of_buffer(theirs, batch)
    for name, build in (("TorchRL", torchrl), ("cpprb", cpprb), ("Flashbax", flashbax), ("Tianshou", tianshou)):
        try:
            found[name] = build(size, batch)
        except ImportError:
            absent(name)
        except RuntimeError as error:
            absent(name, str(error))
    return found


def torchrl(size: int, batch: int) -> Contender:
    sampler = TorchRLPrioritizedSampler(size, ALPHA, BETA)  # raises RuntimeError if its compiled trees do not load
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=batch)
    fill(buffer, size)
    return of_buffer(buffer, batch)


def cpprb(size: int, batch: int) -> Contender:
    from cpprb import PrioritizedReplayBuffer

    data = fields(CHUNK)
    spec = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in data.items()}
    buffer = PrioritizedReplayBuffer(size, spec, alpha=ALPHA)
    for _ in range(size // CHUNK):
        buffer.add(**data)
    for start in range(0, size, CHUNK):
        values = np.random.default_rng(start).exponential(size=CHUNK)
        buffer.update_priorities(np.arange(start, start + CHUNK), values)
    new = itertools.cycle(new_priorities(batch))

    def run() -> object:
        drawn = buffer.sample(batch, beta=BETA)
        buffer.update_priorities(drawn["indexes"], next(new))
        return drawn

    return run


def flashbax(size: int, batch: int) -> Contender:
    import flashbax as fbx
    import jax
    import jax.numpy as jnp

    buffer = fbx.make_prioritised_item_buffer(
        max_length=size, min_length=1, sample_batch_size=batch, add_batches=True, priority_exponent=ALPHA
    )
    data = {key: jnp.asarray(value) for key, value in fields(CHUNK).items()}
    state = buffer.init({key: value[0] for key, value in data.items()})
    add = jax.jit(buffer.add, donate_argnums=0)
    for _ in range(size // CHUNK):
        state = add(state, data)
    update = jax.jit(buffer.set_priorities, donate_argnums=0)
    for start in range(0, size, CHUNK):
        values = jnp.asarray(np.random.default_rng(start).exponential(size=CHUNK), jnp.float32)
        state = update(state, jnp.arange(start, start + CHUNK), values)

    @jax.jit
    def sample(state: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        drawn = buffer.sample(state, own)
        weights = drawn.probabilities**-BETA
        return drawn, weights / weights.max(), key

    new = itertools.cycle([jnp.asarray(value, jnp.float32) for value in new_priorities(batch)])
    key = jax.random.key(0)

    def run() -> object:
        nonlocal state, key
        drawn, weights, key = sample(state, key)
        state = update(state, drawn.indices, next(new))
        return jax.block_until_ready((drawn.experience, weights, state.sum_tree_state))

    return run


def tianshou(size: int, batch: int) -> Contender:
    from tianshou.data import Batch, PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(size, alpha=ALPHA, beta=BETA)
    data = fields(CHUNK)
    names = {"obs": "observation", "act": "action", "obs_next": "next_observation"}
    step = Batch(
        **{name: data[key][0] for name, key in names.items()}, rew=1.0, terminated=False, truncated=False, info={}
    )
    buffer.add(step)
    # Calls of `add` for each row take minutes: fill the reserved arrays directly.
    for name, key in names.items():
        buffer._meta[name][:] = np.resize(data[key], buffer._meta[name].shape)
    buffer._size, buffer._insertion_idx = size, 0
    for start in range(0, size, CHUNK):
        values = np.random.default_rng(start).exponential(size=CHUNK)
        buffer.update_weight(np.arange(start, start + CHUNK), values)
    new = itertools.cycle(new_priorities(batch))

    def run() -> object:
        drawn, index = buffer.sample(batch)
        buffer.update_weight(index, next(new))
        return drawn

    return run


def windows(size: int, batch: int) -> dict[str, Contender]:
    """Return functions that sample windows of two steps and single steps."""
    found: dict[str, Contender] = {}
    for name, options in (("single steps", {}), ("windows of 2", {"batch_length": 2})):
        sampler = PrioritizedSampler(size, ALPHA, BETA, **options)
        buffer = ExperienceBuffer(storage=RingStorage(size), sampler=sampler, batch_size=batch)
        fill(buffer, size)
        found[name] = buffer.sample
    return found


def verdict(timings: list[Timing], batch: int) -> bool:
    medians = {timing.name: timing.median for timing in timings}
    peers = [name for name in medians if name in PEERS]
    if not peers or batch not in FACTORS:
        return True
    fastest = min(peers, key=medians.__getitem__)
    ratio, asked = medians[fastest] / medians[OURS], FACTORS[batch]
    say(f"  {ratio:.2f}x faster than {fastest}, asked are {asked}: {'met' if ratio >= asked else 'MISSED'}")
    return ratio >= asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--batches", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--sizes", type=int, nargs="*", default=[5, 6, 7], help="powers of ten for the growth")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a budget is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    results: dict[str, list[Timing]] = {}
    good = True
    for batch in arguments.batches:
        title = f"prioritized: sample and update {batch} of 1e6"
        results[title] = compare(contenders(10**6, batch), repetitions=arguments.repetitions)
        say(table(title, results[title], OURS))
        good = verdict(results[title], batch) and good
    for power in arguments.sizes:
        title = f"prioritized: sample and update 256 of 1e{power} and of 1e4"
        sizes = {"1e4": ours(10**4, 256), f"1e{power}": ours(10**power, 256)}
        results[title] = compare(sizes, repetitions=arguments.repetitions)
        del sizes
        say(table(title, results[title], "1e4"))
    title = "prioritized: sample 256 of 1e6"
    results[title] = compare(windows(10**6, 256), repetitions=arguments.repetitions)
    say(table(title, results[title], "single steps"))
    single, pairs = (timing.median for timing in results[title])
    ratio = pairs / single
    say(f"  windows take {ratio:.2f}x as long, at most {WINDOWS} is asked: {'met' if ratio <= WINDOWS else 'MISSED'}")
    good = ratio <= WINDOWS and good
    if arguments.json:
        write_json(arguments.json, results)
    return 0 if good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
