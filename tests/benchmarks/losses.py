"""Compare one PPO update and one policy step of ours, TorchRL and plain torch.

    python tests/benchmarks/losses.py

Mini-batches have 256 rows, networks have two tanh layers of 64, and all code runs on one thread.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table

one_thread()

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import nn  # noqa: E402
from torchrl.data import Categorical, Composite, Unbounded  # noqa: E402
from torchrl.objectives import ClipPPOLoss, LossModule  # noqa: E402

from torchrl_lightning.agents import PPOModule, build_actor, build_critic  # noqa: E402

SPECS = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2), num_envs=8)
KWARGS = {"entropy_coeff": 0.01, "critic_coeff": 0.5, "loss_critic_type": "l2", "normalize_advantage": True}


def make_batch(size: int = 256) -> TensorDict:
    """Return a mini-batch with the entries of a buffer."""
    batch = TensorDict({"observation": torch.randn(size, 4), "action": torch.randint(0, 2, (size,))}, [size])
    batch["action_log_prob"] = torch.full((size,), -0.69)
    for key in ("advantage", "value_target", "state_value"):
        batch[key] = torch.randn(size, 1)
    return batch


def optimizer_step(parameters: list[nn.Parameter], fused: bool) -> Contender:
    """Return a function that clips existing gradients and steps Adam."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=fused)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchrl_update(loss: LossModule, batch: TensorDict, fused: bool) -> Contender:
    """Return an update with the forward pass of a loss module."""
    step = optimizer_step(list(loss.parameters()), fused)

    def update() -> None:
        out = loss(batch)
        (out["loss_objective"] + out["loss_entropy"] + out["loss_critic"]).backward()
        step()

    return update


def our_update(module: PPOModule, batch: TensorDict) -> Contender:
    """Return an update like in `ActorCriticModule`."""
    step = optimizer_step(list(module.parameters()), True)

    def update() -> None:
        terms = module.losses(batch)
        torch.stack([value for name, value in terms.items() if name.startswith("loss_")]).sum().backward()
        step()

    return update


def bare_update(batch: TensorDict) -> Contender:
    """Return the same arithmetic without modules of ours or of TorchRL."""
    actor, critic = (
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out)) for out in (2, 1)
    )
    step = optimizer_step([*actor.parameters(), *critic.parameters()], True)
    observation, action, old = batch["observation"], batch["action"].unsqueeze(-1), batch["action_log_prob"]
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"]

    def update() -> None:
        logits = actor(observation).log_softmax(-1)
        log_prob = logits.gather(-1, action).squeeze(-1)
        entropy = -(logits * logits.exp()).sum(-1).mean()
        a = (advantage - advantage.mean()) / advantage.std()
        ratio = (log_prob - old).exp()
        gain = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
        (0.5 * nn.functional.mse_loss(critic(observation), target) - gain - 0.01 * entropy).backward()
        step()

    return update


def updates() -> list[Timing]:
    """Time whole updates: forward, backward, clipping and Adam."""
    batch = make_batch()

    def networks() -> tuple[nn.Module, nn.Module]:
        return build_actor(SPECS), build_critic(SPECS)

    return compare(
        {
            "TorchRL as shipped, Adam": torchrl_update(ClipPPOLoss(*networks(), **KWARGS), batch, False),
            "TorchRL lean, fused Adam": torchrl_update(
                ClipPPOLoss(*networks(), functional=False, log_explained_variance=False, **KWARGS), batch, True
            ),
            "ours": our_update(PPOModule(**KWARGS).build(SPECS), batch),
            "bare torch": bare_update(batch),
        }
    )


def policy_steps() -> list[Timing]:
    """Time the policy on the observations of eight environments."""
    actor, td = build_actor(SPECS), TensorDict({"observation": torch.randn(8, 4)}, [8])
    with torch.no_grad():
        return compare({"ProbabilisticActor's forward": lambda: actor.generic_forward(td), "ours": lambda: actor(td)})


def main() -> None:
    """Print both tables."""
    say(table("PPO update, batch 256", updates(), "ours") + "\n")
    say(table("policy step, 8 rows", policy_steps(), "ours"))


if __name__ == "__main__":
    main()
