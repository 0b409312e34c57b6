"""Calls that the documented buffers of l2r-lab and Velora refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

from contracts.part import Refusal
from kit.documented import columns, path_step, simple_step
from kit.rollouts import make_rollout


def simple(**changes: Any) -> Callable[[Any], Any]:
    return lambda buffer: buffer.store(simple_step(9.0, **changes))


def path(**changes: Any) -> Callable[[Any], Any]:
    return lambda buffer: buffer.store({**path_step(9), **changes})


def rows(**changes: Any) -> Callable[[Any], Any]:
    return lambda buffer: buffer.add_multi(**{**columns(3, 2), **changes})


SIMPLE = (
    Refusal("obs must be numbers, got a str", simple(obs="text"), error=TypeError, empty=True),
    Refusal("obs must have 1 numbers, got 2", simple(obs=[1.0, 2.0]), empty=True),
    Refusal("next_obs.*0", simple(next_obs=[]), empty=True),
    Refusal("act must have 2 numbers, got 1", simple(act=[1.0]), empty=True),
    Refusal("rew must be finite", simple(rew=math.nan), empty=True),
    Refusal("rew must have 1 numbers, got 2", simple(rew=[1.0, 2.0]), empty=True),
    Refusal("done", simple(done=0.3), simple(done=[True, False]), empty=True),
    Refusal(r"\['next_obs'\]", methodcaller("store", path_step(1, done=False)), error=KeyError, empty=True),
    Refusal(
        "buffer_dict must be a mapping, got a",
        *(methodcaller("store", wrong) for wrong in (None, [], "step")),
        error=TypeError,
        empty=True,
    ),
)

PATHS = (
    Refusal("buffer_dict", methodcaller("store", [path_step(9)]), error=TypeError, empty=True),
    Refusal("obs must be numbers", path(obs="text"), error=TypeError, empty=True),
    Refusal("obs must have . numbers, got 2", path(obs=torch.zeros(2)), empty=True),
    Refusal("act must have .* got a Tensor", path(act=torch.zeros(1)), empty=True),
    Refusal("rew must be finite", path(rew=math.nan), empty=True),
    Refusal("done", path(done=0.5), empty=True),
    Refusal("lacks", methodcaller("store", {"obs": torch.zeros(1)}), error=KeyError, empty=True),
    Refusal(
        "differs from the stored steps",
        path(next_obs=torch.zeros(1)),
        lambda buffer: buffer.insert_data_slice(make_rollout(4, 1)),
    ),
    Refusal("action_obj", methodcaller("finish_path")),
    Refusal(
        "2.*finish_path",
        methodcaller("before_gradients"),
        methodcaller("sample", 2),
        error=RuntimeError,
    ),
)

RECURRENT = (
    Refusal("hiddens", rows(hiddens=None), empty=True),
    Refusal("observation", *(rows(**{name: torch.zeros(2, 5)}) for name in ("states", "next_states")), empty=True),
    Refusal("action", rows(actions=torch.zeros(2)), empty=True),
    Refusal("recurrent_state", rows(hiddens=torch.zeros(2, 1)), empty=True),
    Refusal("one row per transition", rows(rewards=torch.zeros(3)), empty=True),
    Refusal("rewards.*got 2", rows(rewards=torch.zeros(2, 2)), empty=True),
    Refusal("dones must be 0 or 1", rows(dones=torch.tensor([0.5, 0.0])), empty=True),
    Refusal(
        "states",
        methodcaller("add", "text", [0.0] * 2, 1.0, [0.0] * 3, False, torch.zeros(4)),
        error=TypeError,
        empty=True,
    ),
    Refusal("Available: 7, Requested: 8", methodcaller("sample", 8)),
    Refusal(
        "batch_size.*0",
        *(methodcaller("sample", wrong) for wrong in (-1, 2.5, True, "3")),
        empty=True,
    ),
)
