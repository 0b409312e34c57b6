"""Discounted returns and the discounted cumulative sum."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core.validators import fraction
from torchrl_lightning.estimators._checks import kernel_inputs, raise_not_finite
from torchrl_lightning.kernels.scan import discounted_scan, run_rows
from torchrl_lightning.kernels.scan_rows import block_of, bools_at, floats_at, row_is_finite, scan_rows


def discounted_returns(reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float) -> Tensor:
    r"""Sum discounted rewards to the end of the episode, and bootstrap if it was truncated.

    .. math::
        R_t = r_t + \gamma \begin{cases}
            (1 - \mathrm{terminated}_t) V(s'_t) & \text{done}_t \\ R_{t+1} & \text{else} \end{cases},
        \qquad R_T = V(s'_{T-1})

    Args:
        reward: ``[T, ...]``, time first, any trailing shape.
        next_value: ``[T, ...]``, the value of each step's true successor; used only at truncated steps and the last
            step, but all values must be finite.
        terminated: ``[T, ...]`` bool, the episode reached a terminal state; cuts the bootstrap.
        done: ``[T, ...]`` bool, terminated or truncated; cuts the sum. A terminated step counts as done.
        gamma: discount in [0, 1].

    Returns:
        Value target, contiguous, in the shape and dtype of ``reward``.

    Raises:
        ValueError: a flag is missing, shapes or devices differ, ``gamma`` is outside [0, 1], or an input is not finite.
        TypeError: dtypes differ, flags are not bool, or rewards are not floating point.

    >>> import torch
    >>> terminated = torch.tensor([False, True, False])
    >>> discounted_returns(torch.ones(3), torch.full((3,), 8.0), terminated, terminated, gamma=0.5)
    tensor([1.5000, 1.0000, 5.0000])
    """
    names = ("reward", "next_value")
    inputs = kernel_inputs("discounted_returns", names, (reward, next_value), (terminated, done))
    gamma = fraction(gamma, "discounted_returns: gamma")
    if inputs is not None:
        target = torch.empty_like(inputs[0])
        finite = run_rows(_return_rows, (*inputs, target), gamma)
    elif reward.numel() == 0:
        return torch.empty_like(reward)
    else:
        ends = terminated | done
        bootstrap = gamma * (ends & ~terminated).to(reward.dtype)
        discount = gamma * ends.logical_not().to(reward.dtype)
        target = discounted_scan(reward + bootstrap * next_value, discount, initial=next_value[-1])
        finite = math.isfinite(float(target[0].detach().sum()))
    if not finite:
        raise_not_finite("discounted_returns", reward=reward, next_value=next_value)
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
        A tensor or array like ``x``, in the same shape and dtype. Integers become float64.

    Raises:
        TypeError: ``x`` is neither a floating-point tensor nor an array of numbers.
        ValueError: ``x`` is a scalar, or ``discount`` does not broadcast.

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


def _return_rows(
    reward: int,
    next_value: int,
    terminated: int,
    done: int,
    target: int,
    steps: int,
    size: int,
    like: Any,
    gamma: float,
) -> bool:
    real = like.dtype.type
    g, zero = real(gamma), real(0.0)
    width, block = block_of(steps, size)
    carry = floats_at(next_value, size - width, size, like)
    factor = np.empty(min(block, size), like.dtype)
    for high in range(size, 0, -block):
        low = max(0, high - block)
        r, w = floats_at(reward, low, high, like), floats_at(next_value, low, high, like)
        y = floats_at(target, low, high, like)
        stop, cut = bools_at(terminated, low, high), bools_at(done, low, high)
        for i in range(high - low):
            # One of the two factors is zero; a product propagates NaN, but a selection would hide it.
            y[i] = r[i] + (g if cut[i] & (not stop[i]) else zero) * w[i]
            factor[i] = zero if stop[i] | cut[i] else g
        scan_rows(y, factor, carry, width, True)
        carry = y[:width]
    return row_is_finite(carry)
