"""Compare our collector with TorchRL's Collector and Stable-Baselines3 on CartPole-v1.

    python tests/benchmarks/collector.py [--json timings.json] [--repetitions 11] [--check]

All runs have 8 environments and one thread. The contenders run interleaved.

*Rollouts*: our collector and TorchRL's collectors call the same policy for 128 steps. The policy has two tanh layers of
64, a categorical distribution and log-probabilities. TorchRL is fastest with Gymnasium's vector environment and
InitTracker, which produce the same keys as ours. The table also lists TorchRL with eight single environments.

*Rollouts with values*: the time that PPO waits for a rollout with advantages. Stable-Baselines3 runs
``collect_rollouts``. Our side uses the actor that our modules build.

*Steps of replay*: each of 128 steps is written to a ring before the next step, as in DQN. The last table contains the
cost of one step without a collector. ``--check`` exits with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")
    logging.getLogger("torchrl").setLevel(logging.WARNING)

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor

from torchrl_lightning import ExperienceBuffer, GymnasiumCollector, RingStorage, environment_specs, make_vector_env
from torchrl_lightning.agents import MLPNetwork, build_actor, build_critic
from torchrl_lightning.agents.networks.exploration import EpsilonGreedyPolicy
from torchrl_lightning.agents.networks.q_networks import build_q_network
from torchrl_lightning.datamodules._run.step_writer import PreparedWrite
from torchrl_lightning.estimators import gae

ENV, NUM_ENVS, STEPS = "CartPole-v1", 8, 128
FRAMES = NUM_ENVS * STEPS
OVER_TORCHRL, OVER_SB3, STEPWISE = 3.0, 2.2, 1.5  # required ratios
OURS = "torchrl-lightning"
SB3 = "stable-baselines3"
NOT_STORED = ("collector", "done", "terminated", "truncated")


def make_policy() -> ProbabilisticActor:
    """Return the policy for both collectors of rollouts."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    net = TensorDictModule(layers, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )


def ours(policy: nn.Module, num_envs: int = NUM_ENVS, steps: int = STEPS, **kwargs: object) -> Contender:
    """Return a function that collects one batch with GymnasiumCollector."""
    frames = num_envs * steps
    return GymnasiumCollector(ENV, policy, num_envs=num_envs, frames_per_batch=frames, seed=0, **kwargs).rollout


def torchrls(policy: nn.Module, num_envs: int, steps: int, vector: bool, **kwargs: object) -> Contender:
    """Return a function that collects one batch with TorchRL's Collector."""

    def single() -> TransformedEnv:
        return TransformedEnv(GymEnv(ENV, categorical_action_encoding=True), InitTracker())

    if vector:
        base = SyncVectorEnv([lambda: gymnasium.make(ENV)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        env = TransformedEnv(GymWrapper(base, categorical_action_encoding=True), InitTracker())
    else:
        env = SerialEnv(num_envs, single)
    stream = iter(Collector(env, policy, frames_per_batch=num_envs * steps, total_frames=-1, **kwargs))
    return lambda: next(stream)


def rollouts(num_envs: int = NUM_ENVS, steps: int = STEPS) -> dict[str, Contender]:
    """Return the contenders that collect rollouts with the same policy."""
    policy, size = make_policy(), (num_envs, steps)
    tuned = {"trust_policy": True, "return_same_td": True, "use_buffers": False}
    return {
        OURS: ours(policy, *size),
        f"{OURS}, same memory": ours(policy, *size, return_same_td=True),
        "torchrl, vector environment": torchrls(policy, *size, True),
        "torchrl, vector environment, tuned": torchrls(policy, *size, True, **tuned),
        "torchrl, single environments": torchrls(policy, *size, False),
    }


def with_values() -> dict[str, Contender]:
    """Return the contenders that collect rollouts with values and advantages."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.manual_seed(0)
    specs = environment_specs(make_vector_env(ENV, NUM_ENVS))
    actor, critic = build_actor(specs, MLPNetwork([64, 64])), build_critic(specs, MLPNetwork([64, 64]))
    collect = ours(actor)

    def mine() -> object:
        batch = collect().transpose(0, 1)
        following = batch["next"]
        with torch.no_grad():
            value = critic(batch.select("observation"))["state_value"]
            next_value = critic(following.select("observation"))["state_value"]
        flags = following["terminated"], following["done"]
        return gae(following["reward"], value, next_value, *flags, 0.99, 0.95)

    model = PPO("MlpPolicy", make_vec_env(ENV, NUM_ENVS), n_steps=STEPS, device="cpu", seed=0)
    _, callback = model._setup_learn(1 << 30)

    def theirs() -> object:
        return model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)

    return {OURS: mine, SB3: theirs}


def steps_of_replay() -> dict[str, Contender]:
    """Return the contenders that write each step to a replay buffer."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit

    torch.manual_seed(0)
    policy = EpsilonGreedyPolicy(build_q_network(environment_specs(make_vector_env(ENV, NUM_ENVS))))
    policy.amount.fill_(0.05)
    collector = GymnasiumCollector(ENV, policy, num_envs=NUM_ENVS, frames_per_batch=NUM_ENVS, seed=0)
    buffer = ExperienceBuffer(storage=RingStorage(48_000), num_envs=NUM_ENVS)
    stream = collector.reused_rows(NOT_STORED)
    buffer.extend(next(stream))
    prepared = PreparedWrite(buffer, next(stream))

    def mine() -> None:
        for _ in range(STEPS):
            next(stream)
            prepared.write()

    model = DQN("MlpPolicy", make_vec_env(ENV, NUM_ENVS), buffer_size=48_000, device="cpu", seed=0)
    _, callback = model._setup_learn(1 << 30)
    model.exploration_schedule = lambda _: 0.05
    often = TrainFreq(1, TrainFrequencyUnit.STEP)

    def theirs() -> None:
        for _ in range(STEPS):
            model.collect_rollouts(model.env, callback, often, model.replay_buffer, learning_starts=0)

    return {OURS: mine, SB3: theirs}


def parts(policy: nn.Module) -> dict[str, Contender]:
    """Return the two parts of a step without a collector."""
    env = make_vector_env(ENV, NUM_ENVS)
    env.reset(seed=0)
    actions = np.zeros(NUM_ENVS, dtype=np.int64)
    observation = torch.zeros(NUM_ENVS, 4)

    def act() -> None:
        with torch.no_grad():
            policy(TensorDict({"observation": observation}, [NUM_ENVS]))

    return {"the policy's call": act, "the environment's step": lambda: env.step(actions)}


def factor(timings: list[Timing], peer: str) -> float:
    """Return the speed ratio of ours to the fastest peer with this name."""
    mine = next(timing.median for timing in timings if timing.name == OURS)
    return min(timing.median for timing in timings if timing.name.startswith(peer)) / mine


def main() -> int:
    """Run the comparisons and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comparisons = {"rollouts": rollouts(), "rollouts with values": with_values(), "steps of replay": steps_of_replay()}
    asked = {"rollouts": ("torchrl,", OVER_TORCHRL), "steps of replay": (SB3, STEPWISE)}
    results: dict[str, list[Timing]] = {}
    missed = False
    for name, contenders in comparisons.items():
        timings = results[name] = compare(contenders, repetitions=options.repetitions, seconds=0.05)
        say(table(f"{name}: {FRAMES} frames of {ENV}, {NUM_ENVS} environments", timings, OURS))
        for timing in timings:
            say(f"{timing.name:36} {FRAMES / timing.median * 1e6:9.0f} frames/s")
        peer, least = asked.get(name, (SB3, OVER_SB3))
        found = factor(timings, peer)
        missed |= found < least
        say(f"{found:.2f} times {peer.strip(',')} at its best (asked: {least:g})\n")
    results["one step"] = compare(parts(make_policy()), repetitions=options.repetitions)
    say(table("one step", results["one step"], "the policy's call"))
    if options.json:
        write_json(options.json, results)
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
