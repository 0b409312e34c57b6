"""DQN of Tianshou."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from benchmarks.whole_runs.clock import CELLS, WARMUP, Stopwatch, Training


def dqn(env: str, num_envs: int, batch_size: int, updates: int) -> Training:
    """Return a run with one update per step of all environments and a hard target update every 100 updates."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        environments = DummyVectorEnv([lambda: gymnasium.make(env)] * num_envs)
        example = gymnasium.make(env)
        network: Any = Net(
            state_shape=example.observation_space.shape or (),
            action_shape=example.action_space.n,  # type: ignore[attr-defined]
            hidden_sizes=[64, 64],
        )
        policy = DiscreteQLearningPolicy(
            model=network,
            action_space=example.action_space,
            observation_space=example.observation_space,
            eps_training=0.05,
            eps_inference=0.0,
        )
        algorithm = DQN(
            policy=policy,
            optim=AdamOptimizerFactory(lr=1e-3),
            gamma=0.99,
            target_update_freq=100,
            is_double=False,
            huber_loss_delta=1.0,
        )
        collector: Any = Collector(algorithm, environments, VectorReplayBuffer(CELLS, num_envs), exploration_noise=True)
        collector.reset()
        collector.collect(n_step=WARMUP // num_envs * num_envs, random=True)
        watch = Stopwatch()

        def note(epoch: int, step: int) -> None:
            if epoch == 2:
                watch.start(step)

        epoch = updates // 2 * num_envs
        algorithm.run_training(
            OffPolicyTrainerParams(
                training_collector=collector,
                test_collector=None,
                max_epochs=3,
                epoch_num_steps=epoch,
                collection_step_num_env_steps=num_envs,
                batch_size=batch_size,
                update_step_num_gradient_steps_per_sample=1 / num_envs,
                training_fn=note,
                verbose=False,
                show_progress=False,
            )
        )
        return watch.speed(3 * epoch)

    return run
