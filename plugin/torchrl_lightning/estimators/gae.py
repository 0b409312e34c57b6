"""Generalized advantage estimation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.estimators._checks import check_fraction, check_inputs, explain_not_finite
from torchrl_lightning.scan import TILE, compiled, discounted_scan, matrix, runs_on_numba

__all__ = ["gae"]


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    lmbda: float,
) -> tuple[Tensor, Tensor]:
    r"""Estimate advantages as an exponentially weighted sum of temporal-difference errors.

    .. math::
        \delta_t &= r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t) \\
        A_t &= \delta_t + \gamma \lambda (1 - \mathrm{done}_t) A_{t+1}, \qquad A_T = 0

    and the target of the critic is :math:`A_t + V(s_t)`. Schulman et al., "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", https://arxiv.org/abs/1506.02438.

    Args:
        reward: ``[T, ...]``, time first, any trailing shape.
        value: ``[T, ...]``, the critic at each step.
        next_value: ``[T, ...]``, the critic at each step's true successor, also where the episode was cut; not at the
            observation after a reset.
        terminated: ``[T, ...]`` bool, the episode ended in the task's sense; cuts the bootstrap.
        done: ``[T, ...]`` bool, terminated or truncated; cuts the trace. A terminated step counts as done.
        gamma: discount in [0, 1].
        lmbda: weight of longer horizons in [0, 1].

    Returns:
        Advantage and value target, contiguous, in the shape and dtype of ``reward``.

    Raises:
        ValueError: a flag is missing, shapes or devices differ, ``gamma`` or ``lmbda`` leave [0, 1], or an input is
            not finite.
        TypeError: dtypes differ, flags are not bool or rewards not floating point.

    >>> import torch
    >>> never = torch.zeros(2, dtype=torch.bool)
    >>> gae(torch.ones(2), torch.zeros(2), torch.zeros(2), never, never, gamma=0.5, lmbda=1.0)
    (tensor([1.5000, 1.0000]), tensor([1.5000, 1.0000]))
    """
    check_inputs(
        "gae",
        {"reward": reward, "value": value, "next_value": next_value},
        {"terminated": terminated, "done": done},
    )
    gamma = check_fraction("gae", "gamma", gamma)
    decay = gamma * check_fraction("gae", "lmbda", lmbda)
    if runs_on_numba(reward, value, next_value) and reward.numel() > 0:
        advantage = torch.empty_like(reward, memory_format=torch.contiguous_format)
        target = torch.empty_like(reward, memory_format=torch.contiguous_format)
        finite = compiled(_gae_rows)(
            matrix(reward),
            matrix(value),
            matrix(next_value),
            matrix(terminated),
            matrix(done),
            gamma,
            decay,
            matrix(advantage),
            matrix(target),
        )
    else:
        bootstrap = gamma * terminated.logical_not().to(reward.dtype)
        delta = reward + bootstrap * next_value - value
        advantage = discounted_scan(delta, decay * (terminated | done).logical_not().to(reward.dtype))
        target = advantage + value
        finite = math.isfinite(float(advantage[:1].detach().sum()))
    if not finite:
        explain_not_finite("gae", reward=reward, value=value, next_value=next_value)
    return advantage, target


def _gae_rows(
    reward: Any,
    value: Any,
    next_value: Any,
    terminated: Any,
    done: Any,
    gamma: float,
    decay: float,
    advantage: Any,
    target: Any,
) -> bool:
    steps, width = reward.shape
    real = reward.dtype.type
    g, d, zero = real(gamma), real(decay), real(0.0)
    carry = np.empty(TILE, reward.dtype)
    check = zero
    for start in range(0, width, TILE):
        size = min(TILE, width - start)
        end = start + size
        carry[:] = zero
        for t in range(steps - 1, -1, -1):
            r, v, w = reward[t, start:end], value[t, start:end], next_value[t, start:end]
            stop, cut = terminated[t, start:end], done[t, start:end]
            a, target_t = advantage[t, start:end], target[t, start:end]
            for n in range(size):
                delta = r[n] + (zero if stop[n] else g) * w[n] - v[n]
                # Keep the product with zero: it carries a NaN across the end of an episode to the first row.
                estimate = delta + (zero if stop[n] | cut[n] else d) * carry[n]
                carry[n] = estimate
                a[n] = estimate
                target_t[n] = estimate + v[n]
        for n in range(size):
            check += carry[n] * zero
    return bool(check == zero)
