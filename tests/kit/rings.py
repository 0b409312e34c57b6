"""Replay buffers over rings, seeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kit.rows import numbered
from kit.seeds import generator
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


def ring(
    length: int,
    num_envs: int = 1,
    sampler: Any = None,
    *,
    filled: int = 0,
    seed: int = 0,
    scratch_dir: Path | None = None,
    **settings: Any,
) -> ExperienceBuffer:
    """Make a buffer of ``length`` steps for each environment, of which the first ``filled`` are written as numbers."""
    storage = RingStorage(length * num_envs, scratch_dir=scratch_dir)
    settings = {"generator": generator(seed), **settings}
    buffer = ExperienceBuffer(storage=storage, num_envs=num_envs, sampler=sampler, **settings)
    for step in range(filled):
        buffer.extend(numbered(num_envs, step * num_envs))
    return buffer


def cell_of(buffer: ExperienceBuffer, env: int, position: int) -> torch.Tensor:
    return buffer.writer.cell(torch.tensor([env]), torch.tensor([position]))


def starts_of(batch: Any) -> list[tuple[int, int]]:
    """Return environment and position of the first step of each window."""
    return list(zip(batch["env"][:, 0].tolist(), batch["position"][:, 0].tolist(), strict=True))
