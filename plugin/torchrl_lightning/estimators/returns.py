"""Discounted returns and the discounted cumulative sum."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.estimators._checks import check_fraction, check_inputs, explain_not_finite
from torchrl_lightning.scan import TILE, compiled, discounted_scan, matrix, runs_on_numba

__all__ = ["discount_cumsum", "discounted_returns"]


def discounted_returns(reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float) -> Tensor:
    r"""Sum discounted rewards to the end of the episode, bootstrapping where it was cut.

    .. math::
        R_t = r_t + \gamma \begin{cases}
            (1 - \mathrm{terminated}_t) V(s'_t) & \text{done}_t \\ R_{t+1} & \text{else} \end{cases},
        \qquad R_T = V(s'_{T-1})

    Args:
        reward: ``[T, ...]``, time first, any trailing shape.
        next_value: ``[T, ...]``, the critic at each step's true successor; it counts at truncated steps and at the
            last one, and must be finite everywhere.
        terminated: ``[T, ...]`` bool, the episode ended in the task's sense; cuts the bootstrap.
        done: ``[T, ...]`` bool, terminated or truncated; cuts the sum. A terminated step counts as done.
        gamma: discount in [0, 1].

    Returns:
        Value target, contiguous, in the shape and dtype of ``reward``.

    Raises:
        ValueError: a flag is missing, shapes or devices differ, ``gamma`` leaves [0, 1], or an input is not finite.
        TypeError: dtypes differ, flags are not bool or rewards not floating point.

    >>> import torch
    >>> terminated = torch.tensor([False, True, False])
    >>> discounted_returns(torch.ones(3), torch.full((3,), 8.0), terminated, terminated, gamma=0.5)
    tensor([1.5000, 1.0000, 5.0000])
    """
    check_inputs(
        "discounted_returns",
        {"reward": reward, "next_value": next_value},
        {"terminated": terminated, "done": done},
    )
    gamma = check_fraction("discounted_returns", "gamma", gamma)
    if reward.numel() == 0:
        return torch.empty_like(reward)
    if runs_on_numba(reward, next_value):
        target = torch.empty_like(reward, memory_format=torch.contiguous_format)
        finite = compiled(_return_rows)(
            matrix(reward), matrix(next_value), matrix(terminated), matrix(done), gamma, matrix(target)
        )
    else:
        cut = terminated | done
        bootstrap = gamma * (cut & ~terminated).to(reward.dtype)
        discount = gamma * cut.logical_not().to(reward.dtype)
        target = discounted_scan(reward + bootstrap * next_value, discount, initial=next_value[-1])
        finite = math.isfinite(float(target[0].detach().sum()))
    if not finite:
        explain_not_finite("discounted_returns", reward=reward, next_value=next_value)
    return target


@overload
def discount_cumsum(x: Tensor, discount: float | Tensor) -> Tensor: ...
@overload
def discount_cumsum(x: NDArray[Any], discount: float | NDArray[Any]) -> NDArray[Any]: ...
def discount_cumsum(x: Any, discount: Any) -> Any:
    r"""Sum ``x`` from the end with a discount, :math:`y_t = \sum_{k \ge t} \mathrm{discount}^{k - t} x_k`.

    Args:
        x: ``[T, ...]``, time first, floating point; an array may hold integers.
        discount: a number, or a tensor (array) that broadcasts to ``x``.

    Returns:
        A tensor (for an array, an array) in the shape and dtype of ``x``; float64 for integers.

    Raises:
        TypeError: ``x`` is neither a floating-point tensor nor an array of numbers.
        ValueError: ``x`` has no dimension or ``discount`` does not broadcast.

    >>> import torch
    >>> discount_cumsum(torch.tensor([1.0, 2.0, 4.0]), 0.5)
    tensor([3., 4., 4.])
    """
    if not isinstance(x, np.ndarray):
        return discounted_scan(x, discount)
    if x.dtype.kind not in "biuf":
        raise TypeError(f"discount_cumsum: x must hold numbers, got an array of {x.dtype}")
    floats = torch.from_numpy(x.copy() if x.dtype.kind == "f" else x.astype(np.float64))
    factor = torch.as_tensor(discount, dtype=floats.dtype) if isinstance(discount, np.ndarray) else discount
    return discounted_scan(floats, factor).numpy()


def _return_rows(reward: Any, next_value: Any, terminated: Any, done: Any, gamma: float, target: Any) -> bool:
    steps, width = reward.shape
    real = reward.dtype.type
    g, zero = real(gamma), real(0.0)
    carry = np.empty(TILE, reward.dtype)
    check = zero
    for start in range(0, width, TILE):
        size = min(TILE, width - start)
        end = start + size
        carry[:size] = next_value[steps - 1, start:end]
        for t in range(steps - 1, -1, -1):
            r, w, y = reward[t, start:end], next_value[t, start:end], target[t, start:end]
            stop, cut = terminated[t, start:end], done[t, start:end]
            for n in range(size):
                ended = stop[n] | cut[n]
                # One of the two factors is zero; the product passes a NaN on, where a selection would hide it.
                bootstrap = g if ended and not stop[n] else zero
                estimate = r[n] + bootstrap * w[n] + (zero if ended else g) * carry[n]
                carry[n] = estimate
                y[n] = estimate
        for n in range(size):
            check += carry[n] * zero
    return bool(check == zero)
