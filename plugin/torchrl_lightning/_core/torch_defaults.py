"""Checks of torch's global settings: default dtype, default device and inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def check_default_dtype() -> None:
    """Validate torch's default dtype, the dtype of new layers; raise ValueError unless it is float32."""
    dtype = torch.get_default_dtype()
    if dtype is not torch.float32:
        raise ValueError(
            f"torch's default dtype must be torch.float32, got {dtype}: our networks compute in float32. Call "
            "torch.set_default_dtype(torch.float32)."
        )


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Build layers in float32, the dtype of checkpoints, for any default dtype of torch."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def check_default_device() -> None:
    """Validate torch's default device; raise ValueError unless it is the CPU, because environments write CPU memory."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise ValueError(
            f"torch's default device must be cpu, got {device}: environments write into memory of the CPU. Call "
            "torch.set_default_device('cpu'), and choose where networks learn by Trainer(accelerator=...)."
        )


def check_gradients_allowed() -> None:
    """Raise ValueError inside ``torch.inference_mode()``, because it disables gradients."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "inference mode must be off for a fit, got torch.inference_mode() around it. Call fit outside of it."
        )
