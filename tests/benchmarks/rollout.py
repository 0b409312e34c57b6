"""Compare one rollout through our buffer and TorchRL's: write, estimate, and read in mini-batches.

    python tests/benchmarks/rollout.py [--json timings.json] [--repetitions 11] [--check]

The rollout has the size of CartPole: 128 steps of 8 environments, mini-batches of 256, and a critic with two layers of
64 that evaluates every step. TorchRL uses `TensorDictReplayBuffer(LazyTensorStorage, SamplerWithoutReplacement)` and
its `GAE`, like its PPO examples. It evaluates all states and all next states. Ours evaluates a next state only if it is
not stored as the following state.

TorchRL's mini-batches contain all entries; ours contain the entries that a loss can use. Both standardise the advantage
over the rollout. All code runs interleaved on one thread. ``--check`` exits with 1 if TorchRL is faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.objectives.value import GAE

from torchrl_lightning import GAEBuffer

STEPS, ENVS, BATCH = 128, 8, 256
OURS, TORCHRL = "ours", "TorchRL as shipped"


def make_rollout() -> TensorDict:
    """Return a rollout in the format of a collector: `[N, T]` with time-major memory, terminations and truncations."""
    shape = (STEPS, ENVS)
    done = torch.rand(*shape, 1) < 0.02
    terminated = done & (torch.rand(*shape, 1) < 0.5)
    entries = {
        "observation": torch.randn(*shape, 4),
        "action": torch.randint(0, 2, shape),
        "action_log_prob": -torch.rand(shape),
        "is_init": torch.cat((torch.ones(1, ENVS, 1, dtype=torch.bool), done[:-1])),
        "next": {
            "observation": torch.randn(*shape, 4),
            "reward": torch.ones(*shape, 1),
            "done": done,
            "terminated": terminated,
            "truncated": done & ~terminated,
        },
    }
    rollout = TensorDict(entries, shape).transpose(0, 1)
    rollout.names = [None, "time"]
    return rollout


def make_critic() -> TensorDictModule:
    """Return a critic with two layers of 64."""
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return TensorDictModule(network, in_keys=["observation"], out_keys=["state_value"])


def ours(rollout: TensorDict) -> dict[str, Contender]:
    """Return the phases of our buffer. Each phase has its own buffer, because a write deletes the estimates."""
    critic = make_critic()
    written, estimated, served, whole = (GAEBuffer(STEPS, critic=critic) for _ in range(4))
    for buffer in (written, estimated, served):
        buffer.insert_data_slice(rollout)
        buffer.before_gradients()

    def serve(buffer: GAEBuffer) -> None:
        for _ in buffer.generate_batches(None, BATCH):
            pass

    def all_of_it() -> None:
        whole.insert_data_slice(rollout)
        whole.before_gradients()
        serve(whole)

    return {
        "write": lambda: written.insert_data_slice(rollout),
        "estimate": estimated.before_gradients,
        "serve an epoch": lambda: serve(served),
        "all of it": all_of_it,
    }


def torchrl(rollout: TensorDict) -> dict[str, Contender]:
    """Return the phases with TorchRL's parts, combined like in its PPO examples."""
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=make_critic(), average_gae=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STEPS * ENVS), sampler=SamplerWithoutReplacement(), batch_size=BATCH
    )

    def estimate() -> TensorDict:
        with torch.no_grad():
            return estimator(rollout.copy())

    def write_flat(data: TensorDict) -> None:
        buffer.empty()
        buffer.extend(data.reshape(-1))

    def serve() -> None:
        for _ in range(STEPS * ENVS // BATCH):
            buffer.sample()

    def whole() -> None:
        write_flat(estimate())
        serve()

    done = estimate()
    write_flat(done)
    return {"write": lambda: write_flat(done), "estimate": estimate, "serve an epoch": serve, "all of it": whole}


def main() -> int:
    """Run the comparisons and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rollout = make_rollout()
    mine, theirs = ours(rollout), torchrl(rollout)
    results: dict[str, list[Timing]] = {}
    for phase in mine:
        timings = compare({OURS: mine[phase], TORCHRL: theirs[phase]}, repetitions=arguments.repetitions)
        results[phase] = timings
        say(table(f"{phase}, {STEPS} steps of {ENVS} environments, batches of {BATCH}", timings, OURS))
    if arguments.json:
        write_json(arguments.json, results)
    ahead = all(timings[0].median <= timings[1].median for timings in results.values())
    say(f"faster than TorchRL in every phase: {'yes' if ahead else 'NO'}")
    return int(arguments.check and not ahead)


if __name__ == "__main__":
    sys.exit(main())
