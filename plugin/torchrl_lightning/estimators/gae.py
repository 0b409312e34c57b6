"""Generalized advantage estimation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.validators import fraction
from torchrl_lightning.estimators._checks import kernel_inputs, raise_not_finite
from torchrl_lightning.kernels.scan import discounted_scan, run_rows
from torchrl_lightning.kernels.scan_rows import block_of, bools_at, floats_at, row_is_finite, scan_rows


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, lmbda: float
) -> tuple[Tensor, Tensor]:
    r"""Estimate advantages as an exponentially weighted sum of temporal-difference errors.

    .. math::
        \delta_t &= r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t) \\
        A_t &= \delta_t + \gamma \lambda (1 - \mathrm{done}_t) A_{t+1}, \qquad A_T = 0

    The target of the critic is :math:`A_t + V(s_t)`. Schulman et al., "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", https://arxiv.org/abs/1506.02438.

    Args:
        reward: ``[T, ...]``, time first, any trailing shape.
        value: ``[T, ...]``, the value of each step.
        next_value: ``[T, ...]``, the value of each step's true successor, also for truncated episodes. Do not pass the
            value of the observation after a reset.
        terminated: ``[T, ...]`` bool, the episode reached a terminal state; cuts the bootstrap.
        done: ``[T, ...]`` bool, terminated or truncated; cuts the trace. A terminated step counts as done.
        gamma: discount in [0, 1].
        lmbda: weight of longer horizons in [0, 1].

    Returns:
        Advantage and value target, contiguous, in the shape and dtype of ``reward``.

    Raises:
        ValueError: a flag is missing, shapes or devices differ, ``gamma`` or ``lmbda`` is outside [0, 1], or an input
            is not finite.
        TypeError: dtypes differ, flags are not bool, or rewards are not floating point.

    >>> import torch
    >>> never = torch.zeros(2, dtype=torch.bool)
    >>> gae(torch.ones(2), torch.zeros(2), torch.zeros(2), never, never, gamma=0.5, lmbda=1.0)
    (tensor([1.5000, 1.0000]), tensor([1.5000, 1.0000]))
    """
    names = ("reward", "value", "next_value")
    inputs = kernel_inputs("gae", names, (reward, value, next_value), (terminated, done))
    gamma = fraction(gamma, "gae: gamma")
    decay = gamma * fraction(lmbda, "gae: lmbda")
    if inputs is not None:
        advantage, target = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
        finite = run_rows(_gae_rows, (*inputs, advantage, target), gamma, decay)
    else:
        bootstrap = gamma * terminated.logical_not().to(reward.dtype)
        delta = reward + bootstrap * next_value - value
        advantage = discounted_scan(delta, decay * (terminated | done).logical_not().to(reward.dtype))
        target = advantage + value
        finite = math.isfinite(float(advantage[:1].detach().sum()))
    if not finite:
        raise_not_finite("gae", reward=reward, value=value, next_value=next_value)
    return advantage, target


def _gae_rows(
    reward: int,
    value: int,
    next_value: int,
    terminated: int,
    done: int,
    advantage: int,
    target: int,
    steps: int,
    size: int,
    like: Any,
    gamma: float,
    decay: float,
) -> bool:
    real = like.dtype.type
    g, d, zero = real(gamma), real(decay), real(0.0)
    width, block = block_of(steps, size)
    carry = np.zeros(width, like.dtype)
    for high in range(size, 0, -block):
        low = max(0, high - block)
        r, v = floats_at(reward, low, high, like), floats_at(value, low, high, like)
        w = floats_at(next_value, low, high, like)
        stop, cut = bools_at(terminated, low, high), bools_at(done, low, high)
        a, y = floats_at(advantage, low, high, like), floats_at(target, low, high, like)
        for i in range(high - low):
            a[i] = r[i] + (zero if stop[i] else g) * w[i] - v[i]
        for i in range(high - low):
            y[i] = zero if stop[i] | cut[i] else d
        scan_rows(a, y, carry, width, True)
        carry = a[:width]
        for i in range(high - low):
            y[i] = a[i] + v[i]
    return row_is_finite(carry)
