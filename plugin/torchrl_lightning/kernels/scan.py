"""The linear recurrence of every return, advantage and filter of this package.

    reverse:  y[t] = x[t] + c[t] * y[t+1],   y[T]  = initial
    forward:  y[t] = x[t] + c[t] * y[t-1],   y[-1] = initial

On the CPU, the recurrence is one numba pass over ``[T, N]``. On other devices, and under autograd, it is a torch scan.
For short sequences, this scan is a loop over time. For longer sequences the scan has two levels, inside blocks and over
the blocks' carries. This launches ``O(log T)`` kernels instead of ``O(T)``.

Each estimator has its own compiled kernel, which computes temporal-difference errors, recurrence and targets in one
pass. The kernel processes the rows in blocks that fit into the first-level cache: flat loops write ``x`` and ``c`` into
the outputs, :func:`scan_rows` runs the recurrence in place, and flat loops finish the block. The same kernel is
therefore fast from one environment to thousands. Kernels receive addresses instead of arrays, because converting seven
tensors to arrays takes longer than estimating a small rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.scan_rows import block_of, floats_at, scan_rows

Backend: TypeAlias = Literal["auto", "numba", "torch"]

BLOCK = 8  # time steps in a block of the two-level scan
SHORT = 16  # up to this length a loop over time is faster than two levels

BOOL = torch.bool
EXAMPLE_ARRAYS: dict[torch.dtype, NDArray[Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}
"""The dtypes of the compiled kernels. A kernel gets addresses without a dtype, so the empty array passes the dtype."""


def runs_on_numba(x: Tensor, *others: Tensor) -> bool:
    """Return whether the compiled kernels support these tensors: CPU, float32 or float64, no gradient needed."""
    return x.is_cpu and x.dtype in EXAMPLE_ARRAYS and not _requires_grad(x, *others)


def is_kernel_ready(floats: tuple[Tensor, ...], flags: tuple[Tensor, ...]) -> bool:
    """Return quickly whether a kernel can read these tensors: of one shape, contiguous, on the CPU, without gradient.

    False only means that a full check is needed. The estimate of a small rollout spends most of its time in this check.
    The check therefore compares only fields of the tensors and calls nothing else.
    """
    first = floats[0]
    if type(first) is not Tensor or first.dtype not in EXAMPLE_ARRAYS:
        return False
    shape, dtype = first.shape, first.dtype
    for x in floats:
        if type(x) is not Tensor or x.dtype is not dtype or x.shape != shape or not x.is_cpu or x.requires_grad:
            return False
        if not x.is_contiguous():
            return False
    for x in flags:
        if type(x) is not Tensor or x.dtype is not BOOL or x.shape != shape or not x.is_cpu or not x.is_contiguous():
            return False
    return len(shape) > 0


def as_contiguous(x: Tensor) -> Tensor:
    """Detach a tensor and make it contiguous for a kernel; numpy cannot convert tensors without their own memory."""
    return torch.from_numpy(x.detach().contiguous().numpy())


def discounted_scan(
    x: Tensor,
    discount: float | Tensor,
    *,
    initial: float | Tensor | None = None,
    reverse: bool = True,
    dim: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Run the first-order linear recurrence ``y[t] = x[t] + discount[t] * y[t+1]`` along one dimension.

    With ``reverse=False`` the recurrence runs forward in time, ``y[t] = x[t] + discount[t] * y[t-1]``. Values are not
    checked; a NaN spreads to all elements that depend on the NaN.

    Args:
        x: the inputs, any shape with at least one dimension, floating point.
        discount: a number, a scalar tensor or a tensor that broadcasts to the shape of ``x``.
        initial: the value after the last step (before the first step if ``reverse`` is False), zero by default; a
            number or a tensor that broadcasts to the shape of ``x`` without ``dim``.
        reverse: run from the last step to the first.
        dim: the time dimension.
        backend: ``"numba"`` (CPU, float32 and float64, no gradient), ``"torch"`` (any device, differentiable in ``x``,
            ``discount`` and ``initial``), or ``"auto"`` (numba if possible).

    Returns:
        A new tensor with the shape, dtype and device of ``x``.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or a tensor argument has another dtype.
        ValueError: an argument does not broadcast or is on another device, or the backend does not support it.

    >>> import torch
    >>> discounted_scan(torch.tensor([1.0, 1.0, 1.0]), 0.5)
    tensor([1.7500, 1.5000, 1.0000])
    >>> discounted_scan(torch.tensor([1.0, 1.0, 1.0]), 0.5, initial=2.0, reverse=False)
    tensor([2., 2., 2.])
    """
    _check(x, dim, backend)
    time_major = x.movedim(dim, 0)
    shape = time_major.shape
    c = _expand("discount", discount, x)
    c = c.movedim(dim, 0) if c.dim() else c
    y0 = None if initial is None else _expand("initial", initial, x.new_empty(()).expand(shape[1:]))
    if x.numel() == 0:
        return torch.empty_like(x)

    tensors = (x, c) if y0 is None else (x, c, y0)
    is_supported = runs_on_numba(*tensors)
    if backend == "numba" and not is_supported:
        raise ValueError(
            "discounted_scan: backend='numba' requires float32 or float64 tensors on the CPU without gradients, got "
            f"{x.dtype} on {x.device} with requires_grad={_requires_grad(*tensors)}; use backend='torch' or 'auto'"
        )
    if is_supported and backend != "torch":
        y = _run_numba(time_major, c, y0, reverse)
    else:
        flat_c = c.reshape(len(c), -1) if c.dim() else c.expand(len(time_major), 1)
        flat_y0 = None if y0 is None else y0.expand(shape[1:]).reshape(-1)
        y = _torch_scan(time_major.reshape(len(time_major), -1), flat_c, flat_y0, reverse).view(shape)
    return y.movedim(0, dim)


def _requires_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check(x: Tensor, dim: int, backend: str) -> None:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        received = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"discounted_scan: x must be a floating-point tensor, got {received}; call x.float() first")
    if x.dim() == 0:
        raise ValueError("discounted_scan: x must have a time dimension, got a scalar; pass x.unsqueeze(0)")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"discounted_scan: dim must be a dimension of x of shape {tuple(x.shape)}, got {dim}")
    if backend not in ("auto", "numba", "torch"):
        raise ValueError(f"discounted_scan: backend must be 'auto', 'numba' or 'torch', got {backend!r}")


def _expand(name: str, value: float | Tensor, like: Tensor) -> Tensor:
    """Convert a value to a scalar tensor or to the shape of ``like``, with the dtype and device of ``like``."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    if value.dim() == 0:
        return value.to(dtype=like.dtype, device=like.device)
    if value.dtype != like.dtype:
        raise TypeError(f"discounted_scan: {name} has {value.dtype}, x has {like.dtype}; convert one of them")
    if value.device != like.device:
        raise ValueError(f"discounted_scan: {name} is on {value.device}, x on {like.device}; move one of them")
    if value.shape == like.shape:
        return value
    try:
        return value.expand(like.shape)
    except RuntimeError:
        raise ValueError(
            f"discounted_scan: {name} has shape {tuple(value.shape)}, which does not broadcast to {tuple(like.shape)}"
        ) from None


def run_rows(kernel: Callable[..., Any], tensors: tuple[Tensor, ...], *factors: float) -> Any:
    """Call a compiled kernel with the addresses, time steps, size and dtype of plain tensors, and with ``factors``."""
    x = tensors[0]
    return jitted(kernel)(*map(Tensor.data_ptr, tensors), x.shape[0], x.numel(), EXAMPLE_ARRAYS[x.dtype], *factors)


# ----------------------------------------------------------------------------------------------------------- numba


def _run_numba(x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    x, c = as_contiguous(x), as_contiguous(c)
    y = torch.empty_like(x)
    y0 = x.new_zeros(x.shape[1:]) if initial is None else as_contiguous(initial.expand(x.shape[1:]))
    run_rows(_scan, (x, c, y0, y), c.dim() > 0, reverse)
    return y


def _scan(
    inputs: int, factors: int, initial: int, out: int, steps: int, size: int, like: Any, varying: bool, reverse: bool
) -> None:
    width, block = block_of(steps, size)
    carry = floats_at(initial, 0, width, like)
    c = np.full(0 if varying else min(block, size), floats_at(factors, 0, 1, like)[0])
    for begin in range(0, size, block):
        low, high = (max(0, size - begin - block), size - begin) if reverse else (begin, min(begin + block, size))
        y = floats_at(out, low, high, like)
        y[:] = floats_at(inputs, low, high, like)
        if varying:
            c = floats_at(factors, low, high, like)
        scan_rows(y, c, carry, width, reverse)
        carry = y[:width] if reverse else y[len(y) - width :]


# ----------------------------------------------------------------------------------------------------------- torch


def _torch_scan(x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """Scan ``x [T, N]`` with ``c [T, N]`` or ``[T, 1]`` and ``initial [N]``; differentiable to any order."""
    if _requires_grad(x, c) or (initial is not None and _requires_grad(initial)):
        return _LinearRecurrence.apply(x, c, initial, reverse)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _scan_into(y, x, c, initial, reverse)
    return y


def _scan_into(y: Tensor, x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> None:
    steps = x.shape[0]
    if steps <= SHORT:
        _loop_into(y, x, c, initial, reverse)
        return
    # Compute the incomplete block last, so that no padding is needed.
    remainder = steps % BLOCK
    full_blocks, tail = (
        (slice(remainder, None), slice(0, remainder))
        if reverse
        else (slice(0, steps - remainder), slice(steps - remainder, None))
    )
    blocks, width = steps // BLOCK, x.shape[1]
    xb, cb, yb = x[full_blocks].reshape(blocks, BLOCK, width), c[full_blocks].reshape(blocks, BLOCK, -1), y[full_blocks]
    local = yb.view(blocks, BLOCK, width)
    _loop_into(local.transpose(0, 1), xb.transpose(0, 1), cb.transpose(0, 1), None, reverse)
    carry_factor = torch.zeros_like(cb)  # at each step, the factor of a value that enters the block
    _loop_into(carry_factor.transpose(0, 1), carry_factor.transpose(0, 1), cb.transpose(0, 1), cb.new_ones(()), reverse)

    exit_step = 0 if reverse else BLOCK - 1  # the step of a block that is computed last
    carry = torch.empty((blocks + 1, width), dtype=x.dtype, device=x.device)
    entering, leaving = (carry[1:], carry[:-1]) if reverse else (carry[:-1], carry[1:])
    carry[-1 if reverse else 0] = 0.0 if initial is None else initial
    _scan_into(leaving, local[:, exit_step], carry_factor[:, exit_step], initial, reverse)
    local.addcmul_(carry_factor, entering.unsqueeze(1))
    if remainder:
        _loop_into(y[tail], x[tail], c[tail], carry[0] if reverse else carry[-1], reverse)


def _loop_into(y: Tensor, x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> None:
    previous = initial
    rows = list(zip(x, c, y, strict=True))
    for x_t, c_t, y_t in reversed(rows) if reverse else rows:
        if previous is None:
            y_t.copy_(x_t)
        else:
            torch.addcmul(x_t, c_t, previous, out=y_t)
        previous = y_t


class _LinearRecurrence(torch.autograd.Function):
    """The scan as one autograd node: its gradient is the same scan in the other direction."""

    @staticmethod
    def forward(x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _scan_into(y, x, c, initial, reverse)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, c, initial, ctx.reverse = inputs
        ctx.save_for_backward(c, initial, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        c, initial, y = ctx.saved_tensors
        reverse = ctx.reverse
        # y[t] enters the step that is computed next, multiplied by the discount of that step. So shift the discounts.
        shifted = torch.roll(c, 1 if reverse else -1, 0)
        g_x = _torch_scan(g, shifted, None, not reverse)
        g_c = g_initial = None
        if ctx.needs_input_grad[1]:
            start = y.new_zeros(1, y.shape[1]) if initial is None else initial.unsqueeze(0)
            previous = torch.cat([y[1:], start]) if reverse else torch.cat([start, y[:-1]])
            g_c = g_x * previous
            if c.shape[1] == 1:
                g_c = g_c.sum(1, keepdim=True)
        if initial is not None and ctx.needs_input_grad[2]:
            g_initial = c[-1] * g_x[-1] if reverse else c[0] * g_x[0]
        return g_x, g_c, g_initial, None
