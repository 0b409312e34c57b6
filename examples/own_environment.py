"""A custom environment with a Dict observation. Training and evaluation build it from the same recipe.

Run: python examples/own_environment.py --frames 60000
With Hydra, in this folder: torchrl-lightning-train env=recipe data.env.id='{_target_: own_environment.Treasure}'
    data.env.drop='[story]' data.env.time_limit=20 model/network=cnn_small
"""

from __future__ import annotations

import argparse

import gymnasium
import lightning as L
import numpy as np
import torch

from torchrl_lightning import EnvironmentRecipe, FramesProgressBar, OnPolicyDataModule, RolloutMetricsLogger
from torchrl_lightning.agents import CNNNetwork, PPOModule

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Treasure(gymnasium.Env):
    """Walk to a treasure on a small map. Reaching the treasure gives a reward of 1 and ends the episode."""

    def __init__(self, size: int = 7) -> None:
        self.size = size
        self.action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "map": gymnasium.spaces.Box(0, 255, (size, size, 2), np.uint8),
                "place": gymnasium.spaces.Box(0.0, 1.0, (2,)),
                "story": gymnasium.spaces.Text(100),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.treasure = self.np_random.integers(self.size, size=(2, 2))
        return self.observe(), {}

    def step(self, action):
        self.place = np.clip(self.place + MOVES[action], 0, self.size - 1)
        found = bool((self.place == self.treasure).all())
        return self.observe(), float(found), found, False, {}

    def observe(self):
        picture = np.zeros((self.size, self.size, 2), np.uint8)
        picture[(*self.place, 0)] = picture[(*self.treasure, 1)] = 255
        return {"map": picture, "place": (self.place / self.size).astype(np.float32), "story": "It is near."}


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=60_000)
    frames = parser.parse_args().frames
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    recipe = EnvironmentRecipe(Treasure, drop=["story"], time_limit=20)  # networks cannot read text
    data = OnPolicyDataModule(recipe, num_envs=8, frames_per_batch=1024, mini_batch_size=256, total_frames=frames)
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
    module = PPOModule(CNNNetwork([16, 32], [2, 2], [1, 1], [64]), learning_rate=1e-3)
    trainer.fit(module, datamodule=data)
    score = data.evaluate(module.policy, episodes=100)["episode_return"].mean().item()
    print(f"mean return of 100 episodes: {score:.2f}")
    return score


if __name__ == "__main__":
    main()
