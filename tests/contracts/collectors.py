"""Collectors that reset at each batch: what comes follows from their seed and from how much they have collected."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule

from contracts.part import Part
from kit.counting import RandomEnv, still_policy
from kit.torchrl_envs import Walk
from torchrl_lightning import GymnasiumCollector
from torchrl_lightning.collectors import TorchRLCollector, make_environment

SETTINGS = {"frames_per_batch": 14, "reset_at_each_batch": True}
noisy = TensorDictModule(lambda x: torch.rand_like(x[..., :1]), in_keys=["observation"], out_keys=["action"])


def gymnasium(seed: int = 0, **settings: Any) -> GymnasiumCollector:
    return GymnasiumCollector(RandomEnv, still_policy(), num_envs=2, seed=seed, **{**SETTINGS, **settings})


def torchrl(seed: int = 0, **settings: Any) -> TorchRLCollector:
    return TorchRLCollector(make_environment(Walk, 2), noisy, seed=seed, **{**SETTINGS, **settings})


def collector(make: Any) -> Part:
    return Part(
        make=make,
        fill=lambda collector, start: collector.rollout(),
        ask=lambda collector: collector.rollout(),
        ways=("memory", "file"),
        foreign={"frames_per_batch=14.*frames_per_batch=16": partial(make, frames_per_batch=16)},
    )


COLLECTORS = {"GymnasiumCollector": collector(gymnasium), "TorchRLCollector": collector(torchrl)}
