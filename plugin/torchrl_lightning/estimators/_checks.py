"""Validate the inputs of all estimators."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lightning.kernels.scan import as_contiguous, is_kernel_ready, runs_on_numba

_MISSING_FLAG = {
    "terminated": (
        "it is True if the episode reached a terminal state, not at a time limit, and is never inferred from `done`"
    ),
    "done": "it is `terminated | truncated`",
}


def kernel_inputs(
    caller: str, names: tuple[str, ...], floats: tuple[Tensor, ...], flags: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...] | None:
    """Validate the inputs and return them for the compiled kernels, flags last, or None if torch must be used.

    All inputs must have the same shape and device. The tensors ``floats`` must have the same floating-point dtype;
    ``names`` are their names in error messages. The ``flags`` are ``terminated`` and ``done``, and must be bool.
    """
    if is_kernel_ready(floats, flags):
        return floats + flags
    _check_inputs(caller, dict(zip(names, floats, strict=True)), dict(zip(_MISSING_FLAG, flags, strict=True)))
    return tuple(map(as_contiguous, floats + flags)) if runs_on_numba(*floats) else None


def _check_inputs(caller: str, floats: dict[str, Tensor], flags: dict[str, Tensor]) -> None:
    for key, tensor in {**floats, **flags}.items():
        if tensor is None:
            raise ValueError(f"{caller}: {key} is missing; {_MISSING_FLAG.get(key, 'pass one value for each step')}")
        if not isinstance(tensor, Tensor):
            type_name = type(tensor).__name__
            raise TypeError(f"{caller}: {key} must be a torch.Tensor, got {type_name}; use torch.as_tensor")
    name, reference = next(iter(floats.items()))
    shape, dtype, device = reference.shape, reference.dtype, reference.device
    if not dtype.is_floating_point:
        raise TypeError(f"{caller}: {name} must be floating point, got {dtype}; call {name}.float() first")
    if not shape:
        raise ValueError(f"{caller}: {name} is a scalar, but dimension 0 must be time; pass {name}.unsqueeze(0)")
    for key, tensor in {**floats, **flags}.items():
        if key in flags and tensor.dtype != torch.bool:
            raise TypeError(f"{caller}: {key} must be a bool tensor, got {tensor.dtype}; call {key}.bool() first")
        if key in floats and tensor.dtype != dtype:
            raise TypeError(f"{caller}: {key} has {tensor.dtype}, but {name} has {dtype}; convert one of them")
        if tensor.device != device:
            raise ValueError(f"{caller}: {key} is on {tensor.device}, but {name} is on {device}")
        if tensor.shape != shape:
            raise ValueError(
                f"{caller}: {key} has shape {tuple(tensor.shape)}, but {name} has {tuple(shape)}; all inputs must "
                "have one entry for each step, time first (next_value has the length of value: the value of each "
                "step's successor)"
            )


def raise_not_finite(caller: str, **tensors: Tensor) -> None:
    """Raise ValueError with the index of the first NaN or infinity in the inputs; do nothing if all are finite.

    The recurrences multiply and never select, so a NaN or infinity reaches the first row of the result. Estimators
    check only this row, which is cheap. They call this function if the row is not finite.
    """
    if "log_pi" in tensors:
        tensors["log_pi - log_mu"] = tensors["log_pi"] - tensors["log_mu"]
    for name, tensor in tensors.items():
        is_invalid = torch.isnan(tensor) if name == "log_pi - log_mu" else ~torch.isfinite(tensor)
        if name in ("log_pi", "log_mu"):  # minus infinity is the log-probability of an impossible action
            is_invalid &= ~torch.isneginf(tensor)
        indices = is_invalid.nonzero().tolist()
        if indices:
            value = float(tensor.detach()[tuple(indices[0])])
            raise ValueError(
                f"{caller}: {name} is {value} at index {indices[0]} (time first), one of {len(indices)} such elements "
                f"of {tensor.numel()}; find its source, and mask or replace it before the estimate"
            )
