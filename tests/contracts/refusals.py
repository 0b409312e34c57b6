"""Calls that all parts of a kind refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchrl.data.replay_buffers.utils import TED2Flat

from contracts.part import Refusal


def no_tensordict(*takers: Callable[[Any, Any], Any]) -> tuple[Refusal, ...]:
    """What is no TensorDict is refused by its name."""
    kinds = {"plain tensor": torch.zeros(3), "list": [1, 2], "dict": {"a": torch.zeros(3)}}
    return tuple(
        Refusal(f"Expected a TensorDict, got a {kind}", *giving(data, *takers), error=TypeError, empty=True)
        for kind, data in kinds.items()
    )


def giving(argument: Any, *takers: Callable[[Any, Any], Any]) -> list[Callable[[Any], Any]]:
    """Calls of several methods with one argument."""
    return [partial(_give, take, argument) for take in takers]


def _give(take: Callable[[Any, Any], Any], argument: Any, part: Any) -> Any:
    return take(part, argument)


def no_hooks(*parts: Callable[[Any], Any]) -> Refusal:
    """Buffers and storages write their own files."""
    hooks = ("register_save_hook", "register_load_hook")
    calls = (partial(_hook, part, hook) for part in parts for hook in hooks)
    return Refusal("writes its own files", *calls, error=TypeError, empty=True)


def _hook(part: Callable[[Any], Any], hook: str, ours: Any) -> None:
    getattr(part(ours), hook)(TED2Flat())
