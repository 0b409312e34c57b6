"""Writing to and sampling from rings against peers, one thread, interleaved.

    python tests/benchmarks/ring.py [--json timings.json] [--repetitions 11] [--sizes 4 5 6 7] [--check]

1e6 transitions of 165 bytes (observation 17, action 6, reward, done, next observation). One call samples 256 of them,
or adds one step of 8 environments; where a TensorDict goes in, its construction is timed too. Peers that are not
installed are reported as absent. Then ours again at 1e4 to 1e7 transitions. ``--check`` exits with 1 where a budget is
missed.
"""

from __future__ import annotations

import argparse
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

from torchrl_lightning.replay.buffer import ExperienceBuffer
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter

BATCH, ENVS, CHUNK = 256, 8, 10_000
OURS, GATHER, TORCHRL = "torchrl-lightning", "bare index_select of five leaves", "TorchRL"
FIELDS = {"observation": 17, "action": 6, "reward": 1, "done": 1, "next_observation": 17}
SAMPLE_FACTOR, ADD_FACTOR, ADD_LIMIT, GROWTH = 1.5, 5.0, 30.0, 1.5


def arrays(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    data = {key: rng.standard_normal((rows, width), dtype=np.float32) for key, width in FIELDS.items()}
    return {**data, "done": rng.random((rows, 1)) < 0.005}


def tensordict(data: dict[str, torch.Tensor]) -> TensorDict:
    following = {"observation": data["next_observation"], "reward": data["reward"], "done": data["done"]}
    root = {"observation": data["observation"], "action": data["action"], "next": following}
    return TensorDict(root, [len(data["done"])])


def tensors(rows: int) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in arrays(rows).items()}


def ours(size: int, **kwargs: Any) -> ExperienceBuffer:
    buffer = ExperienceBuffer(storage=RingStorage(size), writer=RingWriter(ENVS, **kwargs), batch_size=BATCH)
    data = tensordict(tensors(CHUNK)).reshape(-1, ENVS)
    for _ in range(size // CHUNK):
        buffer.extend(data, time_dim=0)
    return buffer


def torchrl(size: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=BATCH)
    for _ in range(size // CHUNK):
        buffer.extend(tensordict(tensors(CHUNK)))
    return buffer


def gather(size: int) -> Contender:
    data = tensors(CHUNK)
    leaves = [leaf.repeat(size // CHUNK, 1) for leaf in data.values()]
    generator = torch.Generator().manual_seed(0)

    def run() -> object:
        index = torch.randint(size, (BATCH,), generator=generator)
        return [leaf.index_select(0, index) for leaf in leaves]

    return run


def adding(buffer: Any) -> Contender:
    step = tensors(ENVS)
    return lambda: buffer.extend(tensordict(step))


def cpprb(size: int) -> tuple[Contender, Contender]:
    from cpprb import ReplayBuffer

    spec = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in arrays(1).items()}
    buffer, step = ReplayBuffer(size, spec), arrays(ENVS)
    for _ in range(size // CHUNK):
        buffer.add(**arrays(CHUNK))
    return lambda: buffer.sample(BATCH), lambda: buffer.add(**step)


def sb3(size: int) -> tuple[Contender, Contender]:
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer

    observation = Box(-np.inf, np.inf, (FIELDS["observation"],), np.float32)
    action = Box(-1, 1, (FIELDS["action"],), np.float32)
    buffer = ReplayBuffer(size, observation, action, device="cpu", n_envs=ENVS)
    buffer.full, step = True, arrays(ENVS)
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]
    data = step["observation"], step["next_observation"], step["action"], step["reward"][:, 0], step["done"][:, 0]
    buffer.observations[:], buffer.next_observations[:], buffer.actions[:] = 1, 1, 1  # touch the pages
    return lambda: buffer.sample(BATCH), lambda: buffer.add(*data, infos)


def contenders(size: int) -> tuple[dict[str, Contender], dict[str, Contender]]:
    untracked, theirs = ours(size, track_episodes=False), torchrl(size)
    tracked = ours(size)
    sample = {OURS: tracked.sample, GATHER: gather(size), TORCHRL: theirs.sample}
    add = {OURS: adding(tracked), f"{OURS}, no episode index": adding(untracked), TORCHRL: adding(theirs)}
    for name, build in (("cpprb", cpprb), ("SB3", sb3)):
        try:
            sample[name], add[name] = build(size)
        except ImportError:
            say(f"  absent: {name} (not installed)")
    return sample, add


def verdicts(results: dict[str, list[Timing]]) -> list[tuple[str, bool]]:
    sample, add, growth_of_sample, growth_of_add = (
        {timing.name: timing.median for timing in timings} for timings in results.values()
    )
    found = [
        (f"sample / bare gather = {sample[OURS] / sample[GATHER]:.2f} (<= {SAMPLE_FACTOR})",
         sample[OURS] <= SAMPLE_FACTOR * sample[GATHER]),
        (f"TorchRL / ours, adding = {add[TORCHRL] / add[OURS]:.2f} (>= {ADD_FACTOR})",
         add[TORCHRL] >= ADD_FACTOR * add[OURS]),
        (f"adding takes {add[OURS]:.1f} us (<= {ADD_LIMIT})", add[OURS] <= ADD_LIMIT),
        (f"growth of adding = {max(growth_of_add.values()) / min(growth_of_add.values()):.2f} (<= {GROWTH})",
         max(growth_of_add.values()) <= GROWTH * min(growth_of_add.values())),
    ]  # fmt: skip
    if "cpprb" in sample:
        found.append(
            (f"cpprb / ours, sampling = {sample['cpprb'] / sample[OURS]:.2f} (> 1)", sample["cpprb"] > sample[OURS])
        )
    # Cold cells cost more the more there are, the bare gather's too: what counts is what we add to it.
    sizes = sorted({name.rsplit(" ", 1)[1] for name in growth_of_sample}, key=float)
    ratios = [growth_of_sample[f"{OURS} {size}"] / growth_of_sample[f"{GATHER} {size}"] for size in sizes]
    text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    found.append((f"sample / bare gather, by size = {text} (the last <= {SAMPLE_FACTOR})", ratios[-1] <= SAMPLE_FACTOR))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all timings")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 5, 6, 7], help="powers of ten")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a budget is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    sample, add = contenders(10**6)
    results = {
        "sample 256 of 1e6": compare(sample, repetitions=arguments.repetitions),
        "add one step of 8 environments": compare(add, repetitions=arguments.repetitions),
    }
    del sample, add
    sampling: dict[str, Contender] = {}
    growing: dict[str, Contender] = {}
    for power in arguments.sizes:
        buffer = ours(10**power)
        sampling[f"{OURS} 1e{power}"], sampling[f"{GATHER} 1e{power}"] = buffer.sample, gather(10**power)
        growing[f"{OURS} 1e{power}"] = adding(buffer)
    results["sample 256, by size"] = compare(sampling, repetitions=arguments.repetitions)
    results["add, by size"] = compare(growing, repetitions=arguments.repetitions)
    for title, timings in results.items():
        say(table(title, timings, GATHER if "256 of" in title else timings[0].name))
    missed = False
    for text, kept in verdicts(results):
        say(f"  {'kept  ' if kept else 'MISSED'} {text}")
        missed |= not kept
    if arguments.json:
        write_json(arguments.json, results)
    sys.exit(int(arguments.check and missed))


if __name__ == "__main__":
    main()
