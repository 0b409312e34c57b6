"""Agents and the DataModules that they learn from: a run of each that is stopped and resumed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torchrl.objectives import HardUpdate, SoftUpdate

from contracts.streams import OFFLINE, STREAMS
from kit.actor_critic import TinyActorCritic
from kit.dynamics import model_data
from kit.fake_data import FakeData, FakeReplay
from kit.learners import NETWORKS, OFF_POLICY, ON_POLICY, data_of
from kit.replay import BUFFERS, experience, prioritized, replay_data
from kit.specs import BOX
from kit.torchrl_losses import iql, loss_agent, redq
from torchrl_lightning import (
    BranchedReplay,
    CrossEntropyPlanner,
    GAEBuffer,
    OnPolicyDataModule,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
    WorldModelFit,
)
from torchrl_lightning.agents import (
    A2CModule,
    DQNModule,
    DynamicsEnsemble,
    MBPOModule,
    MLPNetwork,
    PPOModule,
    RandomNetworkDistillation,
)

OWN_CRITIC = {"critic_optimizer": partial(torch.optim.Adam, lr=1e-3)}


class Stop(NamedTuple):
    """When a checkpoint is written: at the count-th call of a hook, of all or of those in one epoch."""

    hook: str
    count: int = 1
    epoch: int | None = None


IN_UPDATE, BEHIND_UPDATE, BEHIND_EPOCH = "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"


@dataclass(frozen=True)
class Run:
    """A run that is stopped and resumed.

    Args:
        make: makes a module, whose weights follow from torch's seed, and its data.
        stops: in order of time.
        limits: of the trainer, beside three epochs and one batch of each validation.
    """

    make: Callable[[], tuple[Any, Any]]
    stops: tuple[Stop, ...] = (Stop(BEHIND_EPOCH),)
    limits: dict[str, Any] = field(default_factory=dict)


def curious(**settings: Any) -> tuple[Any, Any]:
    intrinsic = RandomNetworkDistillation(MLPNetwork([8]), embedding_size=4, update_fraction=0.5)
    schedules = {"schedule": "linear", "entropy_coeff": 0.1, "entropy_schedule": "cosine"}
    return PPOModule(MLPNetwork([8]), intrinsic=intrinsic, **schedules, **settings), FakeData()


def plain(kind: Any) -> tuple[Any, Any]:
    return kind(MLPNetwork([8], shared=True), schedule="linear"), FakeData()


def off_policy(case: str, network: str, **settings: Any) -> tuple[Any, Any]:
    decay = {"epsilon_frames": 100, "tau": 1.0} if case == "dqn" else {"tau": 0.1}
    # After three updates an interval of two has half gone by.
    settings = {"schedule": "linear", "target_interval": 2, **decay, **settings}
    return OFF_POLICY[case](NETWORKS[network], **settings), data_of(case)


def of_torchrl(loss: Any, updater: Any) -> tuple[Any, Any]:
    return loss_agent(loss, target_updater=updater, schedule="linear", max_grad_norm=0.1), FakeReplay(specs=BOX)


class Noisy(TinyActorCritic):
    """Draws from torch's own generator in each update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * torch.rand(())


# What saves amid an epoch sees steps, so that "auto" would choose 1 beside it and 16 without.
def collected(module: Callable[[], Any], **settings: Any) -> tuple[Any, Any]:
    sizes = {"num_envs": 4, "frames_per_batch": 64, "mini_batch_size": 32, "num_epochs": 2, "eval_episodes": 1}
    exact = {"reset_at_each_batch": True, "updates_per_step": 1}
    return module(), OnPolicyDataModule("CartPole-v1", seed=0, **{**sizes, **exact, **settings})


def scheduled() -> PPOModule:
    return PPOModule(MLPNetwork([4]), schedule="linear", entropy_coeff=1.0, entropy_schedule="linear")


EXACT = {"reset_at_each_batch": True, "frames_per_batch": 8, "frames_per_update": 0.7, "updates_per_step": 1}
FOLDER = tempfile.TemporaryDirectory()  # cells in files leave no names in it


def replayed(buffer: Any = "prioritized, three steps", **settings: Any) -> tuple[Any, Any]:
    network = NETWORKS["gru" if buffer == "sequence" else "mlp"]
    return DQNModule(network, epsilon_frames=100), replay_data(buffer, **{**EXACT, **settings})


def imagining(**settings: Any) -> tuple[Any, Any]:
    lengths = {"fits_kept": 2, "last_length": 3, "lengthened_between": (44, 54)}
    source = partial(BranchedReplay, real_ratio=0.3, frames_per_fit=6, branches_per_fit=20, **lengths)
    dynamics = WorldModelFit([8], num_members=3, num_elites=2, max_epochs=2, batch_size=16)
    made = replay_data(env="Pendulum-v1", source=source, **{**EXACT, **settings})
    return MBPOModule(MLPNetwork([8], "relu"), dynamics=dynamics), made


def planning() -> tuple[Any, Any]:
    """Fits begin in epochs 0, 4 and later; the members are judged in each."""
    planner = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=2)
    return DynamicsEnsemble([8], planner=planner, learning_rate=0.01, patience=2, num_elites=2), model_data()


NORMALISED = {"normalize_observation": True, "normalize_reward": True}
FIRST_TWO = Stop(BEHIND_EPOCH, 1), Stop(BEHIND_EPOCH, 2)
NO_EVALUATION = {"limit_val_batches": 0}  # Lightning leaves out that of an epoch that a checkpoint ends
# A rollout is learned from in two passes of two updates.
AMID_ROLLOUTS = (
    *(Stop(IN_UPDATE, count) for count in (1, 5, 6, 7, 8)),
    *(Stop(BEHIND_UPDATE, count) for count in (6, 7, 8)),
    *FIRST_TWO,
)
AMID_UPDATES = tuple(Stop(hook, count) for hook in (IN_UPDATE, BEHIND_UPDATE) for count in (1, 3, 4, 13))
AMID_EPOCH = (Stop(BEHIND_UPDATE, 15),)  # of ten updates
AMID_STEPS = (Stop(BEHIND_UPDATE, 3),)  # of five updates each


RUNS: dict[str, Run] = {
    "PPOModule": Run(curious),
    "PPOModule, critic apart": Run(partial(curious, **OWN_CRITIC)),
    **{kind.__name__: Run(partial(plain, kind)) for kind in ON_POLICY.values() if kind is not PPOModule},
    **{
        f"{OFF_POLICY[case].__name__}, {network}{', critic apart' if apart else ''}": Run(
            partial(off_policy, case, network, **apart)
        )
        for case in OFF_POLICY
        for network, apart in (("mlp", {}), ("gru", OWN_CRITIC))
    },
    **{
        f"{loss.__name__} of TorchRL, {updater.func.__name__}": Run(partial(of_torchrl, loss, updater))
        for loss, updater in (
            (redq, partial(SoftUpdate, tau=0.1)),
            (iql, partial(HardUpdate, value_network_update_interval=4)),
        )
    },
    "OnPolicyDataModule, GAEBuffer": Run(partial(collected, Noisy, buffer=GAEBuffer), AMID_ROLLOUTS, NO_EVALUATION),
    "OnPolicyDataModule, VTraceBuffer": Run(
        partial(collected, Noisy, buffer=VTraceBuffer), AMID_ROLLOUTS, NO_EVALUATION
    ),
    "OnPolicyDataModule, VanillaOnPolicyBuffer": Run(
        partial(collected, lambda: A2CModule(MLPNetwork([4])), buffer=VanillaOnPolicyBuffer), FIRST_TWO
    ),
    "OnPolicyDataModule, schedules to its last frame": Run(
        partial(collected, scheduled, total_frames=3 * 64),
        (Stop(IN_UPDATE, 5), Stop(BEHIND_UPDATE, 7), Stop(BEHIND_UPDATE, 8), *FIRST_TWO),
        {"max_epochs": -1, **NO_EVALUATION},
    ),
    "OnPolicyDataModule, schedules to the trainer's last epoch": Run(
        partial(collected, scheduled), (Stop(BEHIND_UPDATE, 7), Stop("on_validation_end", 2), Stop(BEHIND_EPOCH, 2))
    ),
    "OnPolicyDataModule, three updates a step": Run(
        # An epoch has a step of three updates, amid the second pass, and one of what is left.
        partial(collected, lambda: PPOModule(MLPNetwork([4])), updates_per_step=3),
        (Stop(BEHIND_UPDATE, 1), Stop(IN_UPDATE, 4), Stop(BEHIND_UPDATE, 5)),
        NO_EVALUATION,
    ),
    "OnPolicyDataModule, normalised": Run(
        partial(collected, lambda: PPOModule(MLPNetwork([4])), **NORMALISED), FIRST_TWO
    ),
    **{
        f"ReplayDataModule, {name}, kept {kept}": Run(partial(replayed, buffer, checkpoint_buffer=kept), AMID_EPOCH)
        for kept in ("inside", "beside")
        for name, buffer in {
            **{name: name for name in BUFFERS if name != "three steps"},
            "in files": experience(prioritized, FOLDER.name),
        }.items()
    },
    "ReplayDataModule, five updates a step": Run(partial(replayed, updates_per_step=5), AMID_STEPS),
    "ReplayDataModule, normalised": Run(partial(replayed, **NORMALISED), (*AMID_UPDATES, *FIRST_TWO)),
    "MBPOModule over BranchedReplay": Run(imagining, AMID_EPOCH),
    "MBPOModule over BranchedReplay, five updates a step": Run(
        partial(imagining, updates_per_step=5, checkpoint_buffer="beside"), AMID_STEPS
    ),
    "DynamicsEnsemble over DynamicsDataModule": Run(
        planning,
        tuple(
            Stop(hook, count, epoch)
            for epoch in (1, 3, 4)
            for hook, count in ((BEHIND_UPDATE, 2), ("on_validation_end", 1), (BEHIND_EPOCH, 1))
        ),
        {"max_epochs": 9, "limit_val_batches": 1.0},
    ),
    **{name: Run(make, FIRST_TWO) for name, make in STREAMS.items()},
    **{name: Run(make) for name, make in OFFLINE.items()},
}


def on_policy(env: Any = "CartPole-v1", **settings: Any) -> Any:
    return OnPolicyDataModule(env, **{"num_envs": 4, "frames_per_batch": 64, "buffer": GAEBuffer, **settings})


normalized = partial(on_policy, normalize_observation=True)

FOREIGN: tuple[tuple[Callable[..., Any], dict[str, Any], str], ...] = (
    (on_policy, {"env": "Acrobot-v1"}, "environment differs: id: CartPole-v1 in the checkpoint, Acrobot-v1 here"),
    (on_policy, {"num_envs": 8}, "num_envs=4, but this run has num_envs=8"),
    (on_policy, {"frames_per_batch": 128}, "frames_per_batch=64, but this run has frames_per_batch=128"),
    (on_policy, {"buffer": VTraceBuffer}, "buffer='GAEBuffer', but this run has buffer='VTraceBuffer'"),
    (on_policy, {"normalize_observation": True}, "written with normalize_observation=False"),
    (normalized, {"normalize_clip": 3.0}, "written with normalize_clip=10.0"),
    (normalized, {"normalize_epsilon": 1e-4}, "written with normalize_epsilon=1e-08"),
    (replay_data, {"buffer": "simple"}, "buffer='ExperienceBuffer', but this run has buffer='SimpleReplayBuffer'"),
    (replay_data, {"buffer": "prioritized"}, "sampler='UniformSampler', but .* has sampler='PrioritizedSampler'"),
    (replay_data, {"buffer": "three steps"}, "n_steps=1, but this run has n_steps=3"),
    (replay_data, {"frames_per_update": 2.0}, "frames_per_update='1', but this run has frames_per_update='2'"),
    (replay_data, {"warmup_frames": 8}, "warmup_frames=40, but this run has warmup_frames=8"),
    (model_data, {"batch_size": 8}, "written with batch_size=16"),
    (model_data, {"num_members": 2}, "written with num_members=3"),
    (model_data, {"validation_fraction": 0.3}, "written with validation_fraction=0.2"),
)
"""What makes a DataModule, other settings, and the words that refuse the state of the one in the other."""
