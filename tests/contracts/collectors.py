"""Collectors that reset at each batch: what comes follows from their seed and from how much they have collected."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule

from contracts.part import Part, Refusal
from kit.counting import RandomEnv, still_policy
from kit.forks import forked_workers
from kit.torchrl_envs import Walk
from torchrl_lightning import AsynchronousCollector, GymnasiumCollector
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.environments import make_environment

SETTINGS = {"frames_per_batch": 14, "reset_at_each_batch": True}
noisy = TensorDictModule(lambda x: torch.rand_like(x[..., :1]), in_keys=["observation"], out_keys=["action"])
drawn = TensorDictModule(lambda x: torch.randint(3, x.shape[:1]), in_keys=["observation"], out_keys=["action"])


def gymnasium(seed: int = 0, **settings: Any) -> GymnasiumCollector:
    return GymnasiumCollector(RandomEnv, drawn, num_envs=2, seed=seed, **{**SETTINGS, **settings})


def torchrl(seed: int = 0, env: Any = Walk, **settings: Any) -> TorchRLCollector:
    return TorchRLCollector(make_environment(env, 2), noisy, seed=seed, **{**SETTINGS, **settings})


def asynchronous(seed: int = 0, **settings: Any) -> AsynchronousCollector:
    sizes = {"num_workers": 1, "num_envs": 2, **SETTINGS, **settings}
    return AsynchronousCollector(RandomEnv, still_policy(), seed=seed, **sizes)


def collect(collector: Any) -> Any:
    with forked_workers():
        return collector.rollout()


REFUSES = (
    Refusal("TensorDict", lambda collector: collector.update_policy_weights_(1.0), error=TypeError),
    Refusal("got -1", lambda collector: collector.set_seed(-1)),
)


def collector(make: Any) -> Part:
    return Part(
        make=make,
        fill=lambda collector, start: collect(collector),
        ask=collect,
        ways=("memory", "file"),
        foreign={"frames_per_batch=14.*frames_per_batch=16": partial(make, frames_per_batch=16)},
        refuses=REFUSES,
    )


COLLECTORS = {
    "GymnasiumCollector": collector(gymnasium),
    "TorchRLCollector": collector(torchrl),
    "TorchRLCollector: batched": collector(partial(torchrl, env=Walk([2]))),
    "TorchRLCollector: a factory of a batched one": collector(partial(torchrl, env=lambda: Walk([2]))),
    "AsynchronousCollector": collector(asynchronous).but(
        # Which episodes are lost with the rollouts in flight, nobody knows.
        ask=lambda collector: collect(collector).exclude(("collector", "traj_ids")),
        usable=lambda collector: collector.set_seed(1),
        foreign={"num_workers=1.*num_workers=2": partial(asynchronous, num_workers=2)},
        refuses=(
            *REFUSES,
            Refusal("static_seed must be False, got True", lambda collector: collector.set_seed(3, static_seed=True)),
        ),
    ),
}
