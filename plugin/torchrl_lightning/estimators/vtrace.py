"""V-trace: off-policy corrected value targets and policy-gradient advantages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.validators import fraction, positive
from torchrl_lightning.estimators._checks import kernel_inputs, raise_not_finite
from torchrl_lightning.kernels.scan import discounted_scan, run_rows
from torchrl_lightning.kernels.scan_rows import block_of, bools_at, floats_at, row_is_finite, scan_rows

_HINT = "use float('inf') to disable clipping"


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
    r"""Correct values and advantages for data of an older policy :math:`\mu`.

    With :math:`\rho_t = \pi(a_t|s_t) / \mu(a_t|s_t)` and :math:`c_t = \lambda \min(\bar c, \rho_t)`

    .. math::
        \delta_t &= \min(\bar\rho, \rho_t) \,(r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t)) \\
        v_t - V(s_t) &= \delta_t + \gamma (1 - \mathrm{done}_t)\, c_t\, (v_{t+1} - V(s_{t+1})) \\
        A_t &= \min(\bar\rho_{pg}, \rho_t) \,(r_t + \gamma (1 - \mathrm{terminated}_t)\, v^+_t - V(s_t))

    where :math:`v^+_t` is :math:`V(s'_t)` at done steps and the last step, and :math:`v_{t+1}` at other steps. Espeholt
    et al., "IMPALA", https://arxiv.org/abs/1802.01561. With :math:`\pi = \mu` the target equals the TD(lambda) target.

    Args:
        log_pi: ``[T, ...]``, log-probability of the action under the current policy.
        log_mu: ``[T, ...]``, log-probability of the action under the behaviour policy.
        reward: ``[T, ...]``, time first, any trailing shape.
        value: ``[T, ...]``, the value of each step.
        next_value: ``[T, ...]``, the value of each step's true successor.
        terminated: ``[T, ...]`` bool, the episode reached a terminal state; cuts the bootstrap.
        done: ``[T, ...]`` bool, terminated or truncated; cuts the trace. A terminated step counts as done.
        gamma: discount in [0, 1].
        lmbda: mixing factor of the trace in [0, 1].
        rho_clip: upper limit of the importance weight in the temporal-difference error. The limit determines the policy
            that the learned values belong to. ``float("inf")`` disables clipping.
        c_clip: upper limit of the weight in the trace. The limit only affects the speed of learning, and should not
            exceed ``rho_clip``.
        pg_rho_clip: upper limit of the weight in the advantage; ``None`` uses ``rho_clip``.

    Returns:
        Advantage (not standardised) and value target, contiguous, in the shape and dtype of ``reward``.

    Raises:
        ValueError: a flag is missing, shapes or devices differ, a factor is out of range, or an input is not finite.
        TypeError: dtypes differ, flags are not bool, or rewards are not floating point.

    >>> import torch
    >>> never, zeros = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
    >>> twice_as_likely = torch.full((2,), 2.0).log()
    >>> vtrace(twice_as_likely, zeros, torch.ones(2), zeros, zeros, never, never, gamma=0.5, pg_rho_clip=2.0)
    (tensor([3., 2.]), tensor([1.5000, 1.0000]))
    """
    names = ("reward", "value", "next_value", "log_pi", "log_mu")
    inputs = kernel_inputs("vtrace", names, (reward, value, next_value, log_pi, log_mu), (terminated, done))
    gamma = fraction(gamma, "vtrace: gamma")
    lmbda = fraction(lmbda, "vtrace: lmbda")
    rho_clip, c_clip = positive(rho_clip, "vtrace: rho_clip", _HINT), positive(c_clip, "vtrace: c_clip", _HINT)
    pg_rho_clip = rho_clip if pg_rho_clip is None else positive(pg_rho_clip, "vtrace: pg_rho_clip", _HINT)
    if inputs is not None:
        r, v, w, new, old, stop, cut = inputs
        ratio = (new - old).exp_()  # torch vectorises the exponential, numba does not
        advantage, target = torch.empty_like(r), torch.empty_like(r)
        tensors = (ratio, r, v, w, stop, cut, advantage, target)
        finite = run_rows(_vtrace_rows, tensors, gamma, lmbda, rho_clip, c_clip, pg_rho_clip)
    else:
        ratio, ends = (log_pi - log_mu).exp(), terminated | done
        bootstrap = gamma * terminated.logical_not().to(reward.dtype)
        delta = ratio.clamp(max=rho_clip) * (reward + bootstrap * next_value - value)
        trace = (gamma * lmbda) * ends.logical_not().to(reward.dtype) * ratio.clamp(max=c_clip)
        target = value + discounted_scan(delta, trace)
        following = torch.where(ends, next_value, torch.cat([target[1:], next_value[-1:]]))
        advantage = ratio.clamp(max=pg_rho_clip) * (reward + bootstrap * following - value)
        finite = math.isfinite(float(target[:1].detach().sum()))
    if not finite:
        raise_not_finite("vtrace", reward=reward, value=value, next_value=next_value, log_pi=log_pi, log_mu=log_mu)
    return advantage, target


def _vtrace_rows(
    ratio: int,
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
    lmbda: float,
    rho_limit: float,
    c_limit: float,
    pg_limit: float,
) -> bool:
    real = like.dtype.type
    g, decay, zero = real(gamma), real(gamma * lmbda), real(0.0)
    rho_clip, c_clip, pg_rho_clip = real(rho_limit), real(c_limit), real(pg_limit)
    width, block = block_of(steps, size)
    carry = np.zeros(width, like.dtype)
    following = floats_at(next_value, size - width, size, like)
    for high in range(size, 0, -block):
        low = max(0, high - block)
        r, v = floats_at(reward, low, high, like), floats_at(value, low, high, like)
        w, rho = floats_at(next_value, low, high, like), floats_at(ratio, low, high, like)
        stop, cut = bools_at(terminated, low, high), bools_at(done, low, high)
        a, y = floats_at(advantage, low, high, like), floats_at(target, low, high, like)
        for i in range(high - low):
            # A NaN weight fails this comparison and remains NaN; products with zero also propagate NaN.
            weight = rho_clip if rho[i] > rho_clip else rho[i]
            y[i] = weight * (r[i] + (zero if stop[i] else g) * w[i] - v[i])
        for i in range(high - low):
            a[i] = (zero if stop[i] | cut[i] else decay) * (c_clip if rho[i] > c_clip else rho[i])
        scan_rows(y, a, carry, width, True)
        carry[:] = y[:width]
        for i in range(high - low):
            y[i] += v[i]
        a[: len(a) - width] = y[width:]
        a[len(a) - width :] = following
        following = y[:width]
        for i in range(high - low):
            weight = pg_rho_clip if rho[i] > pg_rho_clip else rho[i]
            after = w[i] if stop[i] | cut[i] else a[i]
            a[i] = weight * (r[i] + (zero if stop[i] else g) * after - v[i])
    return row_is_finite(carry)
