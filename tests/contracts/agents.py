"""Agents and the DataModules that they learn from: a run of each that is stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchrl.objectives import HardUpdate, SoftUpdate

from learn.fakes import FakeData
from learn.replay_fakes import AGENTS, FakeReplay, sequences, transitions
from learn.test_loss_module import agent, data, iql, redq
from torchrl_lightning import GAEBuffer, OnPolicyDataModule, ReplayDataModule, VTraceBuffer
from torchrl_lightning.learn import (
    A2CModule,
    DQNModule,
    MLPNetwork,
    PPOModule,
    RandomNetworkDistillation,
    RecurrentNetwork,
)
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage

OWN_CRITIC = {"critic_optimizer": partial(torch.optim.Adam, lr=1e-3)}
NETWORKS = {"mlp": partial(MLPNetwork, [8], "relu"), "gru": partial(RecurrentNetwork, "gru", 6)}

Run = Callable[[], tuple[Any, Any]]
"""Makes a module, whose weights follow from torch's seed, and its data."""


def curious(**settings: Any) -> tuple[Any, Any]:
    intrinsic = RandomNetworkDistillation(MLPNetwork([8]), embedding_size=4, update_fraction=0.5)
    schedules = {"schedule": "linear", "entropy_coeff": 0.1, "entropy_schedule": "cosine"}
    return PPOModule(MLPNetwork([8]), intrinsic=intrinsic, **schedules, **settings), FakeData()


def off_policy(case: str, network: str, **settings: Any) -> tuple[Any, Any]:
    kind, specs = AGENTS[case]
    decay = {"epsilon_frames": 100, "tau": 1.0} if case == "dqn" else {"tau": 0.1}
    # After three updates an interval of two has half gone by.
    module = kind(NETWORKS[network](), schedule="linear", target_interval=2, **decay, **settings)
    if network == "gru":
        return module, FakeReplay(specs, lambda generator: sequences(specs, module, 6, 5, generator))
    return module, FakeReplay(specs, lambda generator: transitions(specs, 16, generator=generator))


def of_torchrl(loss: Any, updater: Any) -> tuple[Any, Any]:
    return agent(loss, target_updater=updater, schedule="linear", max_grad_norm=0.1), data()


def collected(buffer: Any) -> tuple[Any, Any]:
    settings = {"num_envs": 4, "frames_per_batch": 64, "mini_batch_size": 32, "num_epochs": 2, "seed": 0}
    made = OnPolicyDataModule("CartPole-v1", buffer=buffer, reset_at_each_batch=True, eval_episodes=1, **settings)
    return PPOModule(MLPNetwork([4])) if buffer is GAEBuffer else A2CModule(MLPNetwork([4])), made


def replayed(**settings: Any) -> tuple[Any, Any]:
    def buffer(num_envs: int) -> ExperienceBuffer:
        sampler = PrioritizedSampler(400, alpha=0.7, beta=0.5)
        return ExperienceBuffer(storage=RingStorage(400), sampler=sampler, num_envs=num_envs, n_steps=3)

    sizes = {"num_envs": 2, "batch_size": 8, "updates_per_epoch": 7, "warmup_frames": 40, "frames_per_batch": 8}
    made = ReplayDataModule(
        "CartPole-v1", buffer=buffer, reset_at_each_batch=True, eval_episodes=1, seed=0, **sizes, **settings
    )
    return DQNModule(MLPNetwork([8], "relu"), epsilon_frames=100), made


RUNS: dict[str, Run] = {
    "PPOModule": curious,
    "PPOModule, critic apart": partial(curious, **OWN_CRITIC),
    **{
        f"{AGENTS[case][0].__name__}, {network}{', critic apart' if apart else ''}": partial(
            off_policy, case, network, **apart
        )
        for case in AGENTS
        for network in NETWORKS
        for apart in ({}, OWN_CRITIC)
    },
    **{
        f"{loss.__name__} of TorchRL, {updater.func.__name__}": partial(of_torchrl, loss, updater)
        for loss in (redq, iql)
        for updater in (partial(SoftUpdate, tau=0.1), partial(HardUpdate, value_network_update_interval=4))
    },
    "OnPolicyDataModule, GAEBuffer": partial(collected, GAEBuffer),
    "OnPolicyDataModule, VTraceBuffer": partial(collected, VTraceBuffer),
    "ReplayDataModule": replayed,
    "ReplayDataModule, normalised": partial(replayed, normalize_observation=True, normalize_reward=True),
}
