"""Input checks of all estimators, and their error messages."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lightning.kernels.scan import as_plain, is_plain, runs_on_numba

_MISSING_FLAG = {
    "terminated": "set it where the episode ended (not by a time limit: `truncated`); it is never guessed from `done`",
    "done": "it is `terminated | truncated`, true where the trajectory breaks",
}


def rows_of(
    caller: str, names: tuple[str, ...], floats: tuple[Tensor, ...], flags: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...] | None:
    """Check the inputs and return them for the compiled kernels, flags last; return None if torch must compute.

    All inputs must have one shape and device. The ``floats`` with these ``names`` must have one floating dtype. The
    ``flags`` are ``terminated`` and ``done``, and must be bool.
    """
    if is_plain(floats, flags):
        return floats + flags
    _check_inputs(caller, dict(zip(names, floats, strict=True)), dict(zip(_MISSING_FLAG, flags, strict=True)))
    return tuple(map(as_plain, floats + flags)) if runs_on_numba(*floats) else None


def _check_inputs(caller: str, floats: dict[str, Tensor], flags: dict[str, Tensor]) -> None:
    for key, tensor in {**floats, **flags}.items():
        if tensor is None:
            raise ValueError(f"{caller}: {key} is missing; {_MISSING_FLAG.get(key, 'pass one value for each step')}")
        if not isinstance(tensor, Tensor):
            came = type(tensor).__name__
            raise TypeError(f"{caller}: {key} must be a torch.Tensor, got {came}; use torch.as_tensor")
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
                f"{caller}: {key} has shape {tuple(tensor.shape)}, but {name} has {tuple(shape)}; all inputs need one "
                "entry for each step, time first (next_value is the value of each step's successor, so it is as long "
                "as value)"
            )


def explain_not_finite(caller: str, **tensors: Tensor) -> None:
    """Raise ValueError with the index of the first NaN or infinity in the inputs; return if all are finite.

    The recurrences multiply and never select, so a bad element reaches the first row of the result. Estimators check
    only this row, which is cheap, and call this function if the row is not finite.
    """
    if "log_pi" in tensors:
        tensors["log_pi - log_mu"] = tensors["log_pi"] - tensors["log_mu"]
    for name, tensor in tensors.items():
        bad = torch.isnan(tensor) if name == "log_pi - log_mu" else ~torch.isfinite(tensor)
        if name in ("log_pi", "log_mu"):  # minus infinity is the log-probability of an impossible action
            bad &= ~torch.isneginf(tensor)
        found = bad.nonzero().tolist()
        if found:
            value = float(tensor.detach()[tuple(found[0])])
            raise ValueError(
                f"{caller}: {name} is {value} at index {found[0]} (time first), one of {len(found)} such elements of "
                f"{tensor.numel()}; look for what produced it, and mask or replace it before estimating"
            )
