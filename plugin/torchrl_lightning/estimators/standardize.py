"""Standardise the valid entries to zero mean and unit standard deviation."""

from __future__ import annotations

import torch
from torch import Tensor


def standardize(x: Tensor, mask: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Shift and scale to :math:`(x - \mathrm{mean}) / (\mathrm{std} + \mathrm{eps})` over all valid entries.

    The standard deviation is unbiased. Equal entries and a single valid entry become 0, even with ``eps=0``. Masked
    entries are ignored and become 0.

    Args:
        x: any shape, floating point.
        mask: bool, the shape of ``x``, True for valid entries; by default all entries are valid.
        eps: added to the standard deviation.

    Returns:
        A tensor in the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating point or ``mask`` is not bool.
        ValueError: ``mask`` and ``x`` differ in shape or device, or ``eps`` is negative.

    >>> import torch
    >>> standardize(torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False]), eps=0.0)
    tensor([-1.,  0.,  1.,  0.])
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        received = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"standardize: x must be a floating-point tensor, got {received}; call x.float() first")
    if eps < 0.0:
        raise ValueError(f"standardize: eps must not be negative, got {eps}")
    if mask is None:
        if x.numel() < 2:
            return x - x  # a single entry equals the mean
        std, mean = torch.std_mean(x)
        return _divide(x - mean, std + eps)
    if mask.dtype != torch.bool:
        raise TypeError(f"standardize: mask must be a bool tensor, got {mask.dtype}; call mask.bool() first")
    if mask.shape != x.shape or mask.device != x.device:
        raise ValueError(
            f"standardize: mask has shape {tuple(mask.shape)} on {mask.device}, but x has {tuple(x.shape)} on "
            f"{x.device}; expand the mask to x"
        )
    count = mask.sum().to(x.dtype)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    divisor = count.clamp(min=1.0)
    mean = torch.where(mask, x, zero).sum() / divisor
    mean = mean + torch.where(mask, x - mean, zero).sum() / divisor  # correct the rounding error of the sum
    centred = torch.where(mask, x - mean, zero)
    std = (centred.square().sum() / (count - 1.0).clamp(min=1.0)).sqrt()
    return _divide(centred, std + eps)


def _divide(centred: Tensor, scale: Tensor) -> Tensor:
    return centred / torch.where(scale == 0.0, 1.0, scale)
