"""Train a custom LightningModule with a plain Trainer on an ``OnPolicyDataModule``, without Hydra.

Run: python examples/own_trainer.py --frames 50000
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from torchrl_lightning import FramesProgressBar, OnPolicyDataModule, RolloutMetricsLogger


class MyPPO(L.LightningModule):
    """PPO module. The DataModule reads ``policy``, and ``critic`` if the buffer estimates values."""

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        specs = self.trainer.datamodule.specs
        observations, actions = specs.observation["observation"].shape[-1], specs.action.n
        net = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, actions))
        self.policy = ProbabilisticActor(
            TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key="action_log_prob",
            spec=specs.action,
        )
        self.critic = ValueOperator(nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 1)))
        self.loss = ClipPPOLoss(self.policy, self.critic, functional=False)  # the buffer standardises advantages
        self.loss.set_keys(sample_log_prob="action_log_prob")
        self.loss.make_value_estimator()  # built early: strict checkpoint loading needs its entries

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        losses = self.loss(batch)
        return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", batch["episode_return"].mean(), batch_size=len(batch))


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=50_000)
    frames = parser.parse_args().frames
    torch.set_num_threads(1)  # more threads slow small networks down
    L.seed_everything(0, verbose=False)
    data = OnPolicyDataModule(
        "CartPole-v1", num_envs=8, frames_per_batch=1024, mini_batch_size=256, total_frames=frames
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        check_val_every_n_epoch=10,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[FramesProgressBar(), RolloutMetricsLogger()],
    )
    module = MyPPO()
    trainer.fit(module, datamodule=data)
    score = data.evaluate(module.policy, episodes=20)["episode_return"].mean().item()
    print(f"mean return of 20 episodes: {score:.1f}")
    return score


if __name__ == "__main__":
    main()
