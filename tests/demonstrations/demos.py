"""Small demonstrations for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_lightning import Demonstration

DATA = Path(__file__).parents[1] / "data"


def demo(*rewards: float, **options: Any) -> Demonstration:
    """A demonstration with these rewards, whose observations and actions count the steps."""
    steps = torch.arange(len(rewards))
    entries = {
        "image": steps.to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 2),
        "inner": {"vector": steps[:, None].float().expand(-1, 3)},
        "action": steps % 2,
        "next": {"reward": torch.tensor(rewards, dtype=torch.float32)[:, None]},
    }
    return Demonstration(TensorDict(entries, [len(rewards)]), **options)


def rewarded(total: float = 1.0, length: int = 1, **options: Any) -> Demonstration:
    """A demonstration of some length with its reward at the end."""
    return demo(*[0.0] * (length - 1), total, **options)


def names(demonstrations: tuple[Demonstration, ...]) -> list[str]:
    """What tests know the demonstrations by."""
    return [each.name for each in demonstrations]
