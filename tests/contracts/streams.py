"""Runs that are resumed, over streams other than those of a Gymnasium id."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchrl.envs import SerialEnv

from kit.actor_critic import rollouts
from kit.demonstrations import episode, recorded, saved
from kit.replay import replay_data
from kit.torchrl_envs import Walk, cart_pole
from torchrl_lightning import PPODBuffer
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, RecurrentNetwork

NETWORKS = {"mlp": partial(MLPNetwork, [8]), "gru": partial(RecurrentNetwork, "gru", 8)}
FOLDER = TemporaryDirectory()


@cache
def human() -> str:
    return saved(Path(FOLDER.name) / "human", episode(7, 99.0))


def on_policy(network: str = "mlp", **settings: Any) -> tuple[Any, Any]:
    return PPOModule(NETWORKS[network]()), rollouts(**settings)


def shown(network: str = "mlp", rho: float = 0.5, phi: float = 0.3, **settings: Any) -> tuple[Any, Any]:
    log_prob = {} if phi else {"log_prob": "current"}
    buffer = partial(PPODBuffer, rho=rho, phi=phi, initial_human_demos_dir=human(), **log_prob)
    return on_policy(network, buffer=buffer, **settings)


@cache
def recordings() -> str:
    return recorded(Path(FOLDER.name) / "recordings")


def offline(kept: str) -> tuple[Any, Any]:
    settings = {"dataset": recordings(), "warmup_frames": None, "normalize_observation": True}
    made = replay_data("prioritized, three steps", checkpoint_buffer=kept, **settings)
    return DQNModule(MLPNetwork([8], "relu"), epsilon_frames=100), made


def beside_data(kept: str) -> tuple[Any, Any]:
    """A share of each batch is the data set's, and DQN weighs it."""
    settings = {"dataset": recordings(), "dataset_share": 0.25, "checkpoint_buffer": kept, "frames_per_batch": 8}
    made = replay_data("prioritized, three steps", **SEEDED, **settings)
    return DQNModule(MLPNetwork([8], "relu", layer_norm=True), epsilon_frames=100, margin_coeff=1.0), made


SEEDED = {"reset_at_each_batch": True}
# No state of an environment is lost where each of them rests; a demonstration of 7 steps goes on in the next rollouts.
REPLAYS = {"rho": 1.0, "phi": 0.0, "mini_batch_size": None}
STREAMS = {
    "OnPolicyDataModule, TorchRL's environments": partial(on_policy, env=Walk, **SEEDED),
    "PPODBuffer": partial(shown, **SEEDED),
    "PPODBuffer, TorchRL's environments": partial(shown, env=partial(SerialEnv, 4, cart_pole), **SEEDED),
    **{f"PPODBuffer that only replays, {name}": partial(shown, name, **REPLAYS) for name in NETWORKS},
}
OFFLINE = {f"ReplayDataModule over a data set, kept {kept}": partial(offline, kept) for kept in ("inside", "beside")}
OFFLINE |= {f"ReplayDataModule beside a data set, kept {k}": partial(beside_data, k) for k in ("inside", "beside")}
