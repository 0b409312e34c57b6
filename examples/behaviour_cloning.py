"""Behaviour cloning: imitate the actions of recorded episodes without collecting new ones.

Run: python examples/behaviour_cloning.py --updates 1000
The same from the command line, for any environment of the config group ``env``:
PYTHONPATH=examples torchrl-lightning-train '~experiment' data=offline env=cartpole data.dataset=DIRECTORY \
    model=loss_module 'model.loss={_target_: behaviour_cloning.cloning, _partial_: true}' trainer.max_epochs=5
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules import ProbabilisticActor, set_recurrent_mode
from torchrl.objectives import LossModule

from torchrl_lightning import (
    ExperienceBuffer,
    FramesProgressBar,
    LossModuleAgent,
    MLPNetwork,
    ReplayDataModule,
    RingStorage,
    build_actor,
    record_demonstrations,
    write_demonstration,
)


class Cloning(LossModule):
    """Negative log-probability of the recorded actions, for steps ``[B]`` or sequences ``[B, T]``."""

    functional = False

    def __init__(self, actor: ProbabilisticActor) -> None:
        super().__init__()
        self.actor_network = actor

    def forward(self, batch: TensorDictBase) -> TensorDict:
        with set_recurrent_mode(batch.ndim > 1):
            log_prob = self.actor_network.get_dist(batch).log_prob(batch["action"])
        mask = batch.get("mask", None)
        return TensorDict({"loss_bc": -(log_prob if mask is None else log_prob[mask]).mean()})


def cloning(specs: Any, network: Any = None) -> Cloning:
    """Build an actor for the environment and return its loss."""
    return Cloning(build_actor(specs, MLPNetwork([64, 64]) if network is None else network))


def balance(step: TensorDictBase) -> TensorDictBase:
    """Push the cart toward the falling side of the pole."""
    angle, speed = step["observation"][:, 2], step["observation"][:, 3]
    return step.set("action", (angle + 0.3 * speed > 0).long())


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--dataset", help="directory of demonstrations; by default one of CartPole is made")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow small networks down
    L.seed_everything(0, verbose=False)
    folder = tempfile.TemporaryDirectory()
    if options.dataset is None:
        (shown,) = record_demonstrations("CartPole-v1", balance, 1, seed=0)
        write_demonstration(f"{folder.name}/balanced.safetensors", shown)
    data = ReplayDataModule(
        options.env,
        dataset=options.dataset or folder.name,
        buffer=lambda num_envs: ExperienceBuffer(storage=RingStorage(100_000), num_envs=num_envs),
        batch_size=128,
        updates_per_epoch=100,
    )
    module = LossModuleAgent(cloning, learning_rate=1e-3)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=options.updates,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[FramesProgressBar()],
    )
    trainer.fit(module, datamodule=data)
    folder.cleanup()
    score = data.evaluate(module.policy, episodes=20)["episode_return"].mean().item()
    print(f"mean return of 20 episodes: {score:.1f}")
    return score


if __name__ == "__main__":
    main()
