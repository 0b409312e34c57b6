"""Train a TorchRL loss without an agent class of its own: ``LossModuleAgent`` trains discrete SAC on replay.

Run: python examples/loss_module.py --frames 20000
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import lightning as L
import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import DiscreteSACLoss, SoftUpdate

from torchrl_lightning import (
    ExperienceBuffer,
    FramesProgressBar,
    LossModuleAgent,
    ReplayDataModule,
    RingStorage,
    RolloutMetricsLogger,
)


def discrete_sac(specs: Any) -> DiscreteSACLoss:
    """Build the networks for the environment and return their loss."""
    observations, actions = specs.observation["observation"].shape[-1], int(specs.action.space.n)
    network = partial(MLP, in_features=observations, out_features=actions, num_cells=[64, 64])
    actor = ProbabilisticActor(
        TensorDictModule(network(), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=specs.action,
        distribution_class=torch.distributions.Categorical,
    )
    values = ValueOperator(network(), in_keys=["observation"], out_keys=["action_value"])
    loss = DiscreteSACLoss(
        actor, values, action_space="categorical", num_actions=actions, target_entropy_weight=0.3, alpha_init=0.1
    )
    loss.make_value_estimator(gamma=0.99)
    return loss


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000)
    frames = parser.parse_args().frames
    torch.set_num_threads(1)  # more threads slow small networks down
    L.seed_everything(0, verbose=False)
    data = ReplayDataModule(
        "CartPole-v1",
        buffer=lambda num_envs: ExperienceBuffer(storage=RingStorage(20_000), num_envs=num_envs),
        num_envs=4,
        batch_size=128,
        frames_per_update=4,
        warmup_frames=1000,
        total_frames=frames,
    )
    module = LossModuleAgent(discrete_sac, target_updater=partial(SoftUpdate, tau=0.01), learning_rate=1e-3)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[FramesProgressBar(), RolloutMetricsLogger()],
    )
    trainer.fit(module, datamodule=data)
    score = data.evaluate(module.policy, episodes=20)["episode_return"].mean().item()
    print(f"mean return of 20 episodes: {score:.1f}")
    return score


if __name__ == "__main__":
    main()
