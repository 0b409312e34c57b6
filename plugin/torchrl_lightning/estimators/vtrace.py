"""V-trace: off-policy corrected value targets and policy-gradient advantages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.estimators._checks import check_fraction, check_inputs, explain_not_finite
from torchrl_lightning.scan import TILE, compiled, discounted_scan, matrix, runs_on_numba

__all__ = ["vtrace"]


def vtrace(
    log_pi: Tensor,
    log_mu: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    *,
    lmbda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    pg_rho_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Correct values and advantages for data that an older policy :math:`\mu` collected.

    With :math:`\rho_t = \pi(a_t|s_t) / \mu(a_t|s_t)` and :math:`c_t = \lambda \min(\bar c, \rho_t)`

    .. math::
        \delta_t &= \min(\bar\rho, \rho_t) \,(r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t)) \\
        v_t - V(s_t) &= \delta_t + \gamma (1 - \mathrm{done}_t)\, c_t\, (v_{t+1} - V(s_{t+1})) \\
        A_t &= \min(\bar\rho_{pg}, \rho_t) \,(r_t + \gamma (1 - \mathrm{terminated}_t)\, v^+_t - V(s_t))

    where :math:`v^+_t` is :math:`V(s'_t)` at a done step and at the last one, and :math:`v_{t+1}` elsewhere. Espeholt
    et al., "IMPALA", https://arxiv.org/abs/1802.01561. With :math:`\pi = \mu` the target is that of TD(lambda).

    Args:
        log_pi: ``[T, ...]``, log-probability of the action under the current policy.
        log_mu: ``[T, ...]``, the same under the policy that acted.
        reward: ``[T, ...]``, time first, any trailing shape.
        value: ``[T, ...]``, the critic at each step.
        next_value: ``[T, ...]``, the critic at each step's true successor.
        terminated: ``[T, ...]`` bool, the episode ended in the task's sense; cuts the bootstrap.
        done: ``[T, ...]`` bool, terminated or truncated; cuts the trace. A terminated step counts as done.
        gamma: discount in [0, 1].
        lmbda: mixing factor of the trace in [0, 1].
        rho_clip: truncation of the importance weight in the temporal-difference error; it decides which policy's value
            is learned. ``float("inf")`` clips nothing.
        c_clip: truncation of the weight in the trace; it only affects the speed of learning, and should not exceed
            ``rho_clip``.
        pg_rho_clip: truncation of the weight in the advantage; as ``rho_clip`` by default.

    Returns:
        Advantage (not standardised) and value target, contiguous, in the shape and dtype of ``reward``.

    Raises:
        ValueError: a flag is missing, shapes or devices differ, a factor is out of range, or an input is not finite.
        TypeError: dtypes differ, flags are not bool or rewards not floating point.

    >>> import torch
    >>> never, zeros = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
    >>> twice_as_likely = torch.full((2,), 2.0).log()
    >>> vtrace(twice_as_likely, zeros, torch.ones(2), zeros, zeros, never, never, gamma=0.5, pg_rho_clip=2.0)
    (tensor([3., 2.]), tensor([1.5000, 1.0000]))
    """
    check_inputs(
        "vtrace",
        {"reward": reward, "value": value, "next_value": next_value, "log_pi": log_pi, "log_mu": log_mu},
        {"terminated": terminated, "done": done},
    )
    gamma = check_fraction("vtrace", "gamma", gamma)
    lmbda = check_fraction("vtrace", "lmbda", lmbda)
    rho_clip, c_clip = _check_clip("rho_clip", rho_clip), _check_clip("c_clip", c_clip)
    pg_rho_clip = rho_clip if pg_rho_clip is None else _check_clip("pg_rho_clip", pg_rho_clip)
    if runs_on_numba(reward, value, next_value, log_pi, log_mu) and reward.numel() > 0:
        advantage = torch.empty_like(reward, memory_format=torch.contiguous_format)
        target = torch.empty_like(reward, memory_format=torch.contiguous_format)
        ratio = (log_pi - log_mu).exp_()  # torch's exponential is vectorised, numba's is not
        finite = compiled(_vtrace_rows)(
            matrix(ratio),
            matrix(reward),
            matrix(value),
            matrix(next_value),
            matrix(terminated),
            matrix(done),
            (gamma, lmbda, rho_clip, c_clip, pg_rho_clip),
            matrix(advantage),
            matrix(target),
        )
    else:
        advantage, target = _vtrace_torch(
            (log_pi - log_mu).exp(),
            (reward, value, next_value),
            terminated,
            terminated | done,
            gamma,
            (rho_clip, lmbda, c_clip, pg_rho_clip),
        )
        finite = math.isfinite(float(target[:1].detach().sum()))
    if not finite:
        explain_not_finite("vtrace", reward=reward, value=value, next_value=next_value, log_pi=log_pi, log_mu=log_mu)
    return advantage, target


def _check_clip(name: str, value: float) -> float:
    value = float(value)
    if not value > 0.0:
        raise ValueError(f"vtrace: {name} must be above 0, got {value}; float('inf') clips nothing")
    return value


def _vtrace_torch(
    ratio: Tensor,
    stream: tuple[Tensor, Tensor, Tensor],
    terminated: Tensor,
    cut: Tensor,
    gamma: float,
    factors: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor]:
    reward, value, next_value = stream
    rho_clip, lmbda, c_clip, pg_rho_clip = factors
    bootstrap = gamma * terminated.logical_not().to(reward.dtype)
    delta = ratio.clamp(max=rho_clip) * (reward + bootstrap * next_value - value)
    trace = (gamma * lmbda) * cut.logical_not().to(reward.dtype) * ratio.clamp(max=c_clip)
    target = value + discounted_scan(delta, trace)
    following = torch.cat([target[1:], next_value[-1:]])
    following = torch.where(cut, next_value, following)
    advantage = ratio.clamp(max=pg_rho_clip) * (reward + bootstrap * following - value)
    return advantage, target


def _vtrace_rows(
    ratio: Any,
    reward: Any,
    value: Any,
    next_value: Any,
    terminated: Any,
    done: Any,
    factors: tuple[float, float, float, float, float],
    advantage: Any,
    target: Any,
) -> bool:
    steps, width = reward.shape
    real = reward.dtype.type
    gamma, lmbda, rho_limit, c_limit, pg_limit = factors
    g, decay, zero = real(gamma), real(gamma * lmbda), real(0.0)
    rho_clip, c_clip, pg_rho_clip = real(rho_limit), real(c_limit), real(pg_limit)
    carry = np.empty(TILE, reward.dtype)
    following = np.empty(TILE, reward.dtype)
    check = zero
    for start in range(0, width, TILE):
        size = min(TILE, width - start)
        end = start + size
        carry[:] = zero
        following[:size] = next_value[steps - 1, start:end]
        for t in range(steps - 1, -1, -1):
            r, v, w = reward[t, start:end], value[t, start:end], next_value[t, start:end]
            weight, stop, cut = ratio[t, start:end], terminated[t, start:end], done[t, start:end]
            a, target_t = advantage[t, start:end], target[t, start:end]
            for n in range(size):
                ended = stop[n] | cut[n]
                bootstrap = zero if stop[n] else g
                rho = weight[n]
                # Written so that a NaN fails the comparison and remains; the products with zero pass it on as well.
                delta = (rho_clip if rho > rho_clip else rho) * (r[n] + bootstrap * w[n] - v[n])
                trace = (zero if ended else decay) * (c_clip if rho > c_clip else rho)
                excess = delta + trace * carry[n]
                after = w[n] if ended else following[n]
                a[n] = (pg_rho_clip if rho > pg_rho_clip else rho) * (r[n] + bootstrap * after - v[n])
                corrected = excess + v[n]
                carry[n] = excess
                following[n] = corrected
                target_t[n] = corrected
        for n in range(size):
            check += carry[n] * zero
    return bool(check == zero)
