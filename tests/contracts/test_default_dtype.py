"""Torch's default dtype changes nothing that a part stores or returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from contracts.part import Part
from contracts.table import PARTS
from kit.states import differences, plain

# These are filled or asked with what the tests themselves, or TorchRL, make in the default dtype.
FOREIGN = ("IntrinsicReward", "TorchRLCollector", "MBReplayBuffer", "ExperienceBuffer: sampler of TorchRL")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "part", [pytest.param(part, id=name) for name, part in PARTS.items() if part.ours and not name.startswith(FOREIGN)]
)
def test_part_returns_the_same_under_another_default_dtype(part: Part, dtype: torch.dtype) -> None:
    expected, actual = part.make(0), part.make(0)
    for start in (0, 100):
        part.fill(expected, start)
        part.fill(actual, start)
        answer = plain(part.ask(expected))
        with default_dtype(dtype):
            assert not differences(answer, plain(part.ask(actual)))
