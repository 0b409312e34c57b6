"""The one linear recurrence under every return, advantage and filter of this package.

    reverse:  y[t] = x[t] + c[t] * y[t+1],   y[T]  = initial
    forward:  y[t] = x[t] + c[t] * y[t-1],   y[-1] = initial

On the CPU it is one numba pass over ``[T, N]``. Everywhere else, and under autograd, it is a torch scan: a loop over
time while that is short, and above that two levels (scan inside blocks, scan over the blocks' carries, combine), which
needs ``O(log T)`` times a few kernels instead of ``T``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["discounted_scan"]

Backend: TypeAlias = Literal["auto", "numba", "torch"]

# Environments are handled in tiles whose running values stay in the first-level cache. LLVM does not interleave a loop
# that it knows to be at most 128 long, and that keeps narrow rollouts (16 environments) on the vector path as well.
TILE = 128
BLOCK = 8  # time steps in a block of the two-level scan
SHORT = 16  # up to here a loop over time is faster than two levels


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel with numba, once per process and cached on disk, without importing numba before it is needed."""
    import numba

    try:
        return numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # numba finds no folder that it may write its cache to
        return numba.njit(function, nogil=True, error_model="numpy")


def runs_on_numba(x: Tensor, *others: Tensor) -> bool:
    """Return whether the compiled kernels can serve these tensors: CPU, float32 or float64, no gradient wanted."""
    if x.device.type != "cpu" or (x.dtype is not torch.float32 and x.dtype is not torch.float64):
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return False
    for other in others:  # noqa: SIM110 - a generator would cost a twentieth of a small rollout's estimate
        if other.requires_grad and torch.is_grad_enabled():
            return False
    return True


def matrix(x: Tensor) -> np.ndarray[Any, Any]:
    """View a time-major tensor as a contiguous ``[T, N]`` array, copying only what is not contiguous."""
    if x.requires_grad:
        x = x.detach()
    array = x.contiguous().numpy()
    return array if array.ndim == 2 else array.reshape(len(array), -1)


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

    With ``reverse=False`` it runs forward in time, ``y[t] = x[t] + discount[t] * y[t-1]``. The values are not
    inspected: a NaN spreads to every element that depends on it.

    Args:
        x: the inputs, any shape with at least one dimension, floating point.
        discount: a number, a scalar tensor or a tensor that broadcasts to the shape of ``x``.
        initial: the value after the last step (before the first one when forward), zero by default; a number or a
            tensor that broadcasts to the shape of ``x`` without ``dim``.
        reverse: from the last step to the first.
        dim: the dimension of time.
        backend: ``"numba"`` (CPU, float32 and float64, no gradient), ``"torch"`` (any device, differentiable in ``x``,
            ``discount`` and ``initial``), or ``"auto"``, which takes numba where it can.

    Returns:
        A new tensor with the shape, dtype and device of ``x``.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or a tensor argument has another dtype.
        ValueError: an argument does not broadcast, lies on another device, or the backend cannot serve it.

    >>> import torch
    >>> discounted_scan(torch.tensor([1.0, 1.0, 1.0]), 0.5)
    tensor([1.7500, 1.5000, 1.0000])
    >>> discounted_scan(torch.tensor([1.0, 1.0, 1.0]), 0.5, initial=2.0, reverse=False)
    tensor([2., 2., 2.])
    """
    _check(x, dim, backend)
    moved = x if dim == 0 else x.movedim(dim, 0)
    shape = moved.shape
    c = _expand("discount", discount, x)
    if c.dim() > 0:
        c = c if dim == 0 else c.movedim(dim, 0)
    y0 = (
        None if initial is None else _expand("initial", initial, moved[0] if len(moved) else moved.new_zeros(shape[1:]))
    )
    if x.numel() == 0:
        return torch.empty_like(x)

    tensors = (c,) if y0 is None else (c, y0)
    if backend == "auto":
        backend = "numba" if runs_on_numba(x, *tensors) else "torch"
    elif backend == "numba" and not runs_on_numba(x, *tensors):
        raise ValueError(
            f"discounted_scan: the numba backend serves float32 and float64 tensors on the CPU that need no gradient; "
            f"got {x.dtype} on {x.device}, with gradients wanted: {_wants_gradient(x, *tensors)}; "
            "use backend='torch' or 'auto'"
        )
    steps = shape[0]
    if backend == "numba":
        y = _run_numba(moved, c, y0, reverse)
    else:
        flat_c = c.reshape(steps, -1) if c.dim() > 0 else c.expand(steps, 1)
        flat_y0 = None if y0 is None else y0.expand(shape[1:]).reshape(-1)
        y = _torch_scan(moved.reshape(steps, -1), flat_c, flat_y0, reverse).view(shape)
    return y if dim == 0 else y.movedim(0, dim)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check(x: Tensor, dim: int, backend: str) -> None:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        came = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"discounted_scan: x must be a floating-point tensor, got {came}; call x.float() first")
    if x.dim() == 0:
        raise ValueError("discounted_scan: x is a scalar, but needs a time dimension; pass x.unsqueeze(0)")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"discounted_scan: dim={dim} is not a dimension of x with shape {tuple(x.shape)}")
    if backend not in ("auto", "numba", "torch"):
        raise ValueError(f"discounted_scan: backend must be 'auto', 'numba' or 'torch', got {backend!r}")


def _expand(name: str, value: float | Tensor, like: Tensor) -> Tensor:
    """Bring a number or a tensor to a scalar tensor or the shape of ``like``, in its dtype and on its device."""
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


# ----------------------------------------------------------------------------------------------------------- numba


def _run_numba(x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = matrix(y)
    width = out.shape[1]
    if initial is None:
        y0 = np.zeros(width, out.dtype)
    else:
        y0 = initial.detach().expand(x.shape[1:]).reshape(-1).contiguous().numpy()
    if c.dim() == 0:
        compiled(_scan_constant)(matrix(x), float(c), y0, reverse, out)
    else:
        compiled(_scan_varying)(matrix(x), matrix(c), y0, reverse, out)
    return y


def _scan_constant(x: Any, discount: float, initial: Any, reverse: bool, y: Any) -> None:
    steps, width = x.shape
    c = x.dtype.type(discount)
    carry = np.empty(TILE, x.dtype)
    for start in range(0, width, TILE):
        size = min(TILE, width - start)
        carry[:size] = initial[start : start + size]
        for i in range(steps):
            t = steps - 1 - i if reverse else i
            x_t, y_t = x[t, start : start + size], y[t, start : start + size]
            for n in range(size):
                value = x_t[n] + c * carry[n]
                carry[n] = value
                y_t[n] = value


def _scan_varying(x: Any, discount: Any, initial: Any, reverse: bool, y: Any) -> None:
    steps, width = x.shape
    carry = np.empty(TILE, x.dtype)
    for start in range(0, width, TILE):
        size = min(TILE, width - start)
        carry[:size] = initial[start : start + size]
        for i in range(steps):
            t = steps - 1 - i if reverse else i
            x_t, y_t = x[t, start : start + size], y[t, start : start + size]
            c_t = discount[t, start : start + size]
            for n in range(size):
                value = x_t[n] + c_t[n] * carry[n]
                carry[n] = value
                y_t[n] = value


# ----------------------------------------------------------------------------------------------------------- torch


def _torch_scan(x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """Scan ``x [T, N]`` with ``c [T, N]`` or ``[T, 1]`` and ``initial [N]``; differentiable to any order."""
    if _wants_gradient(x, c) or (initial is not None and _wants_gradient(initial)):
        return _LinearRecurrence.apply(x, c, initial, reverse)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _scan_into(y, x, c, initial, reverse)
    return y


def _scan_into(y: Tensor, x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> None:
    steps = x.shape[0]
    if steps <= SHORT:
        _loop_into(y, x, c, initial, reverse)
        return
    # The ragged rest lies on the side that is computed last, so that no padding is needed.
    rest = steps % BLOCK
    bulk, tail = (slice(rest, None), slice(0, rest)) if reverse else (slice(0, steps - rest), slice(steps - rest, None))
    blocks, width = steps // BLOCK, x.shape[1]
    xb, cb, yb = x[bulk].reshape(blocks, BLOCK, width), c[bulk].reshape(blocks, BLOCK, -1), y[bulk]
    local = yb.view(blocks, BLOCK, width)
    _loop_into(local.transpose(0, 1), xb.transpose(0, 1), cb.transpose(0, 1), None, reverse)
    reach = _products(cb, reverse)  # what remains, at each step, of a value that enters the block

    exit_step = 0 if reverse else BLOCK - 1  # the step of a block that is computed last
    carry = torch.empty((blocks + 1, width), dtype=x.dtype, device=x.device)
    entering, leaving = (carry[1:], carry[:-1]) if reverse else (carry[:-1], carry[1:])
    carry[-1 if reverse else 0] = 0.0 if initial is None else initial
    _scan_into(leaving, local[:, exit_step], reach[:, exit_step], initial, reverse)
    local.addcmul_(reach, entering.unsqueeze(1))
    if rest:
        _loop_into(y[tail], x[tail], c[tail], carry[0] if reverse else carry[-1], reverse)


def _loop_into(y: Tensor, x: Tensor, c: Tensor, initial: Tensor | None, reverse: bool) -> None:
    order = range(x.shape[0])
    xs, cs, ys = x.unbind(0), c.unbind(0), y.unbind(0)
    previous = initial
    for t in reversed(order) if reverse else order:
        if previous is None:
            ys[t].copy_(xs[t])
        else:
            torch.addcmul(xs[t], cs[t], previous, out=ys[t])
        previous = ys[t]


def _products(c: Tensor, reverse: bool) -> Tensor:
    """Compute cumulative products along dimension 1, from the side where the scan begins."""
    products = torch.empty(c.shape, dtype=c.dtype, device=c.device)
    order = range(c.shape[1])
    previous = None
    for t in reversed(order) if reverse else order:
        products[:, t] = c[:, t] if previous is None else c[:, t] * previous
        previous = products[:, t]
    return products


class _LinearRecurrence(torch.autograd.Function):
    """The scan as one node of the graph: its gradient is the same scan in the other direction."""

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
        # y[t] feeds the step computed after it through that step's discount; the first factor meets no carry.
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
