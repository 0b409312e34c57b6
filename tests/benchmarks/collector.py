"""GymnasiumCollector against TorchRL's Collector: CartPole-v1, 8 environments, 128 steps, one thread, interleaved.

    python tests/benchmarks/collector.py [--json timings.json] [--repetitions 11] [--check]

Both call the same policy (two tanh layers of 64, a categorical distribution, log-probabilities). TorchRL's Collector
runs over a SerialEnv with InitTracker, which gives the same keys; its fastest settings are tried too. Below them, what
one step costs by itself. ``--check`` exits with 1 where a budget is missed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor

from torchrl_lightning import GymnasiumCollector, make_vector_env

ENV, NUM_ENVS, STEPS = "CartPole-v1", 8, 128
FRAMES = NUM_ENVS * STEPS
FACTOR = 4.0  # asked over TorchRL's best
FRAMES_PER_SECOND = 18_000.0  # asked on a machine that has nothing else to do
OURS = "torchrl-lightning"


def make_policy() -> ProbabilisticActor:
    """The policy that every contender calls."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    net = TensorDictModule(layers, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )


def ours(policy: nn.Module, **kwargs: object) -> Contender:
    """One batch of GymnasiumCollector."""
    return GymnasiumCollector(ENV, policy, num_envs=NUM_ENVS, frames_per_batch=FRAMES, seed=0, **kwargs).rollout


def torchrls(policy: nn.Module, **kwargs: object) -> Contender:
    """One batch of TorchRL's Collector."""
    env = SerialEnv(NUM_ENVS, lambda: TransformedEnv(GymEnv(ENV, categorical_action_encoding=True), InitTracker()))
    stream = iter(Collector(env, policy, frames_per_batch=FRAMES, total_frames=-1, **kwargs))
    return lambda: next(stream)


def parts(policy: nn.Module) -> dict[str, Contender]:
    """What a step consists of, without the collector."""
    env = make_vector_env(ENV, NUM_ENVS)
    env.reset(seed=0)
    actions = np.zeros(NUM_ENVS, dtype=np.int64)
    observation = torch.zeros(NUM_ENVS, 4)

    def act() -> None:
        with torch.no_grad():
            policy(TensorDict({"observation": observation}, [NUM_ENVS]))

    return {"the policy's call": act, "the environment's step": lambda: env.step(actions)}


def main() -> int:
    """Run the comparison; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = make_policy()
    contenders = {
        OURS: ours(policy),
        f"{OURS}, same memory": ours(policy, return_same_td=True),
        "torchrl": torchrls(policy),
        "torchrl, tuned": torchrls(policy, trust_policy=True, return_same_td=True, use_buffers=False),
    }
    timings = compare(contenders, repetitions=options.repetitions, seconds=0.05)
    speed = {timing.name: FRAMES / timing.median * 1e6 for timing in timings}
    say(table(f"collecting {FRAMES} frames of {ENV}, {NUM_ENVS} environments", timings, OURS))
    for name, value in speed.items():
        say(f"{name:32} {value:9.0f} frames/s")
    pieces = compare(parts(policy), repetitions=options.repetitions)
    say(table("one step", pieces, "the policy's call"))
    own = timings[0].median / STEPS - sum(piece.median for piece in pieces)
    say(f"the collector's own share of a step: {own:.0f} us")
    best = max(value for name, value in speed.items() if not name.startswith(OURS))
    factor = speed[OURS] / best
    say(f"{factor:.1f} times TorchRL's best (asked: {FACTOR:g})")
    alone = FRAMES / timings[0].fastest * 1e6  # the repetition that was disturbed least
    say(f"{alone:.0f} frames/s in the fastest repetition (asked: {FRAMES_PER_SECOND:g})")
    if options.json:
        write_json(options.json, {"collecting": timings, "one step": pieces})
    return int(options.check and (factor < FACTOR or alone < FRAMES_PER_SECOND))


if __name__ == "__main__":
    sys.exit(main())
