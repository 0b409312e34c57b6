"""Bare loops: the same environments and the same arithmetic with plain torch.

They do not check or log anything, and each supports one algorithm, one environment and one kind of network. Their time
is the minimum; a library adds its own share to it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.whole_runs.clock import CELLS, WARMUP, Stopwatch, Training

Activation = Callable[[Tensor], Tensor]


class Perceptrons:
    """Perceptrons that share one vector each for weights, gradients and the moments of Adam."""

    def __init__(self, *sizes: tuple[int, ...]) -> None:
        self.layers = [[nn.Linear(a, b) for a, b in pairwise(each)] for each in sizes]
        parameters = [parameter for layers in self.layers for layer in layers for parameter in layer.parameters()]
        self.weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradients = torch.zeros_like(self.weights)
        self.averages, self.squares = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps, begin = torch.zeros(()), 0
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.data = self.weights[begin:end].view_as(parameter)
            parameter.grad = self.gradients[begin:end].view_as(parameter)
            begin = end

    def __call__(self, number: int, x: Tensor, activation: Activation) -> Tensor:
        """Return the output of one perceptron for a batch."""
        *hidden, last = self.layers[number]
        for layer in hidden:
            x = activation(F.linear(x, layer.weight, layer.bias))
        return F.linear(x, last.weight, last.bias)

    def step(self, loss: Tensor, learning_rate: float, eps: float, max_norm: float) -> None:
        """Compute the gradients, clip them and step Adam."""
        self.gradients.zero_()
        loss.backward()
        norm = float(torch.linalg.vector_norm(self.gradients))
        if norm > max_norm:
            self.gradients.mul_(max_norm / (norm + 1e-6))
        self.steps.add_(1)
        torch._fused_adam_(
            [self.weights],
            [self.gradients],
            [self.averages],
            [self.squares],
            [],
            [self.steps],
            lr=learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


def cartpoles(num_envs: int) -> Any:
    """Return CartPoles that reset in the same step as their end."""
    made = [lambda: gymnasium.make("CartPole-v1")] * num_envs
    return SyncVectorEnv(made, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def dqn(num_envs: int, batch_size: int, updates: int) -> Training:
    """Return DQN on CartPole-v1: 64 x 64, one update per step of all environments, soft target."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        draw, env, watch = np.random.default_rng(seed), cartpoles(num_envs), Stopwatch()
        network, target = Perceptrons((4, 64, 64, 2)), Perceptrons((4, 64, 64, 2))
        target.weights.copy_(network.weights)
        before, after = torch.zeros(CELLS, 4), torch.zeros(CELLS, 4)
        actions, rewards, ends = torch.zeros(CELLS, 1, dtype=torch.int64), torch.zeros(CELLS), torch.zeros(CELLS)
        rows = [each.numpy() for each in (before, after, actions, rewards, ends)]
        observation = env.reset(seed=seed)[0].copy()
        cursor = stored = frames = 0
        warmup = WARMUP // num_envs
        for step in range(warmup + updates // 2 + updates):
            if step == warmup + updates // 2:
                watch.start(frames)
            if step < warmup:
                action = draw.integers(0, 2, num_envs)
            else:
                with torch.no_grad():
                    action = network(0, torch.from_numpy(observation), torch.relu).argmax(-1).numpy()
                explores = draw.random(num_envs) < 0.05
                if explores.any():
                    action[explores] = draw.integers(0, 2, int(explores.sum()))
            following, reward, terminated, truncated, info = env.step(action)
            here = slice(cursor, cursor + num_envs)
            for row, value in zip(rows, (observation, following, action[:, None], reward, terminated), strict=True):
                row[here] = value
            for ended in np.flatnonzero(terminated | truncated):
                rows[1][cursor + ended] = info["final_obs"][ended]
            observation, cursor = following.copy(), (cursor + num_envs) % CELLS
            stored, frames = min(stored + num_envs, CELLS), frames + num_envs
            if step < warmup:
                continue
            index = torch.from_numpy(draw.integers(0, stored, batch_size))
            with torch.no_grad():
                future = target(0, after.index_select(0, index), torch.relu).amax(-1)
                wanted = rewards.index_select(0, index) + 0.99 * (1 - ends.index_select(0, index)) * future
            values = network(0, before.index_select(0, index), torch.relu)
            taken = values.gather(1, actions.index_select(0, index)).squeeze(1)
            network.step(F.smooth_l1_loss(taken, wanted), 1e-3, 1e-8, 10.0)
            target.weights.lerp_(network.weights, 0.005)
        env.close()
        return watch.speed(frames)

    return run


def ppo(num_envs: int, steps: int, rollouts: int) -> Training:
    """Return PPO on CartPole-v1: separate tanh networks of 64 x 64, batch 256, 4 epochs."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        env, watch, frames = cartpoles(num_envs), Stopwatch(), num_envs * steps
        observation, _ = env.reset(seed=seed)
        network = Perceptrons((4, 64, 64, 2), (4, 64, 64, 1))
        observations, actions = torch.zeros(steps + 1, num_envs, 4), torch.zeros(steps, num_envs, dtype=torch.int64)
        log_probs, rewards, ends = (torch.zeros(steps, num_envs) for _ in range(3))
        for rollout in range(rollouts + 1):
            if rollout == 1:
                watch.start(0)
            with torch.no_grad():
                for step in range(steps):
                    observations.numpy()[step] = observation
                    log_prob = network(0, observations[step], torch.tanh).log_softmax(-1)
                    action = torch.multinomial(log_prob.exp(), 1)
                    actions[step], log_probs[step] = action.squeeze(1), log_prob.gather(1, action).squeeze(1)
                    observation, reward, terminated, truncated, _ = env.step(actions.numpy()[step])
                    rewards.numpy()[step], ends.numpy()[step] = reward, terminated | truncated
                observations.numpy()[steps] = observation
                values = network(1, observations.view(-1, 4), torch.tanh).view(steps + 1, num_envs)
                advantages = torch.from_numpy(_gae(rewards.numpy(), values.numpy(), ends.numpy()))
            returns = (advantages + values[:-1]).view(-1)
            for _ in range(4):
                order = torch.randperm(frames)
                for begin in range(0, frames, 256):
                    rows = order[begin : begin + 256]
                    seen = observations[:-1].reshape(-1, 4).index_select(0, rows)
                    advantage = advantages.view(-1).index_select(0, rows)
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    taken = actions.view(-1, 1).index_select(0, rows)
                    log_prob = network(0, seen, torch.tanh).log_softmax(-1).gather(1, taken).squeeze(1)
                    ratio = (log_prob - log_probs.view(-1).index_select(0, rows)).exp()
                    gain = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
                    value = network(1, seen, torch.tanh).squeeze(1)
                    loss = 0.5 * F.mse_loss(value, returns.index_select(0, rows)) - gain
                    network.step(loss, 3e-4, 1e-5, 0.5)
        env.close()
        return watch.speed(frames * rollouts)

    return run


def _gae(rewards: Any, values: Any, ends: Any) -> Any:
    advantages, following = np.zeros_like(rewards), np.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        goes_on = 1 - ends[step]
        error = rewards[step] + 0.99 * values[step + 1] * goes_on - values[step]
        advantages[step] = following = error + 0.99 * 0.95 * goes_on * following
    return advantages
