"""Train PPO in a plain TorchRL loop with the storage, writer, sampler and GAE of torchrl-lightning.

python examples/torchrl_only.py --frames 50000
"""

from __future__ import annotations

import argparse
from collections import deque
from functools import partial

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from torchrl_lightning import GeneralizedAdvantages, MinibatchSampler, RolloutStorage, RolloutWriter

NUM_ENVS, STEPS, EPOCHS, BATCH_SIZE = 8, 128, 10, 256


def mlp(out_features: int) -> MLP:
    return MLP(in_features=4, out_features=out_features, num_cells=[64, 64], activation_class=nn.Tanh)


def train(frames: int, seed: int) -> float:
    """Train PPO and return the mean return of the last 20 episodes."""
    torch.manual_seed(seed)
    game = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    env = TransformedEnv(SerialEnv(NUM_ENVS, game), RewardSum())
    env.set_seed(seed)
    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.full_action_spec_unbatched,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)

    advantages = GeneralizedAdvantages(0.99, 0.95, critic, standardize_advantages=True, on_write=True)
    buffer = TensorDictReplayBuffer(
        storage=RolloutStorage(STEPS),
        writer=RolloutWriter(),  # stores [T, N] for any order of the input
        sampler=MinibatchSampler(),  # draws each step once per epoch
        transform=advantages,  # computed when a rollout is written
        batch_size=BATCH_SIZE,
        dim_extend=0,
    )
    returns: deque[float] = deque(maxlen=20)
    size = NUM_ENVS * STEPS
    frames = max(size, frames // size * size)
    collector = Collector(env, actor, frames_per_batch=size, total_frames=frames, auto_register_policy_transforms=False)
    for rollout in collector:
        returns.extend(rollout["next", "episode_reward"][rollout["next", "done"]].tolist())
        buffer.empty()
        buffer.extend(rollout)
        for _ in range(EPOCHS):
            for batch in buffer:
                losses = loss(batch)
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    return sum(returns) / max(len(returns), 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=50_000, help="environment frames to train on")
    parser.add_argument("--seed", type=int, default=0)
    print(f"mean return of the last 20 episodes: {train(**vars(parser.parse_args())):.1f}")
