"""Calls that all parts of a kind refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.data.replay_buffers.utils import TED2Flat

from contracts.part import Refusal

NO_TENSORDICTS = {"plain tensor": torch.zeros(3), "list": [1, 2], "dict": {"a": torch.zeros(3)}}
HOOKS = ("register_save_hook", "register_load_hook")


def no_tensordict(*takers: Callable[[Any, Any], Any]) -> tuple[Refusal, ...]:
    """What is no TensorDict is refused by its name."""
    return tuple(
        Refusal(
            f"TensorDict.*{kind}",
            *(lambda ours, take=take, data=data: take(ours, data) for take in takers),
            error=TypeError,
            empty=True,
        )
        for kind, data in NO_TENSORDICTS.items()
    )


def no_hooks(*parts: Callable[[Any], Any]) -> Refusal:
    """Buffers and storages write their own files."""
    calls = (lambda ours, of=of, hook=hook: getattr(of(ours), hook)(TED2Flat()) for of in parts for hook in HOOKS)
    return Refusal("writes its own files", *calls, error=TypeError, empty=True)
