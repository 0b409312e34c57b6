"""A Hydra and Lightning project that selects ``data: gae`` for on-policy experience.

python examples/hydra_app/train.py
python examples/hydra_app/train.py data.num_epochs=10 data.buffer.gae_lambda=0.9
"""

from __future__ import annotations

from typing import Any

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss


class MyPPO(L.LightningModule):
    """PPO module. The DataModule reads ``policy``, which writes actions, and ``critic``, which writes values."""

    def __init__(self, hidden: int, learning_rate: float) -> None:
        super().__init__()
        self.hidden, self.learning_rate = hidden, learning_rate

    def configure_model(self) -> None:
        if hasattr(self, "loss"):
            return
        specs = self.trainer.datamodule.specs  # specs of the environment in data.env
        sizes: dict[str, Any] = {"num_cells": [self.hidden] * 2, "activation_class": nn.Tanh}
        inputs = specs.observation["observation"].shape[-1]
        self.policy = ProbabilisticActor(
            TensorDictModule(MLP(inputs, specs.action.n, **sizes), ["observation"], ["logits"]),
            in_keys=["logits"],
            spec=specs.action,
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.critic = ValueOperator(MLP(inputs, 1, **sizes), in_keys=["observation"])
        self.loss = ClipPPOLoss(self.policy, self.critic, functional=False, entropy_coeff=0.0, critic_coeff=0.5)

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        losses = self.loss(batch)  # the batch contains advantages and value targets
        return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        # Each row of the batch is a finished evaluation episode.
        self.log("eval/return", batch["episode_return"].mean(), prog_bar=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    torch.set_num_threads(1)  # more threads slow small networks down
    L.seed_everything(cfg.seed, verbose=False)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model)
    trainer = instantiate(cfg.trainer)
    trainer.fit(model, datamodule=data)
    episodes = data.evaluate(model.policy)
    print(f"mean return of {len(episodes)} episodes: {episodes['episode_return'].mean():.1f}")
    return float(episodes["episode_return"].mean())


if __name__ == "__main__":
    main()
