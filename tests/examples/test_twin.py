"""Stable-Baselines3 trains the experiments with the same settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("stable_baselines3")

import torch
from gymnasium import Env
from gymnasium.spaces import Box
from stable_baselines3 import PPO, SAC
from stable_baselines3.common import policies
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.sac import sac
from torch import Tensor, nn
from torch.distributions import normal
from torch.testing import assert_close
from torchrl.data import Bounded

from benchmarks import twin, zoo
from benchmarks.run_logs import ResultsError, log_path
from benchmarks.twin import Twin
from kit.extras import need_extra
from kit.specs import specs_of
from kit.store import composed_run
from kit.transitions import transitions
from torchrl_lightning.agents import MLPNetwork, SACModule
from torchrl_lightning.agents.analytic.optimization import FusedAdam
from torchrl_lightning.agents.transitions import read_transitions


def test_ppo_is_given_what_the_experiment_says():
    told = Twin("ppo_acrobot")
    assert told.arguments() == {
        "n_steps": 128,
        "batch_size": 64,
        "n_epochs": 10,
        "gae_lambda": 0.94,
        "clip_range": 0.2,
        "clip_range_vf": None,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "target_kl": None,
        "normalize_advantage": True,
    }
    sizes = {"pi": [64, 64], "vf": [64, 64]}
    assert told.network() == {"net_arch": sizes, "activation_fn": nn.Tanh, "ortho_init": True, "log_std_init": 0.0}


def test_replay_is_given_what_the_experiment_says():
    told = Twin("sac_pendulum").arguments()  # four environments, one update per frame
    assert (told["train_freq"], told["gradient_steps"]) == ((1, "step"), 4)
    assert (told["batch_size"], told["learning_starts"], told["buffer_size"]) == (128, 1000, 50_000)
    assert (told["ent_coef"], told["tau"]) == ("auto_1.0", 0.005)
    goals = Twin("ddpg_her_fetchreach")
    told = goals.arguments()
    assert goals.kind.__name__ == "DDPG"
    assert told["replay_buffer_kwargs"] == {"n_sampled_goal": 4, "goal_selection_strategy": "future"}
    push = Twin("sac_her_fetchpush").arguments()  # Stable-Baselines3 relabels also the goals that were reached before
    assert push["replay_buffer_kwargs"] == {"n_sampled_goal": 4, "goal_selection_strategy": "future"}
    assert (push["train_freq"], push["gradient_steps"], push["target_entropy"]) == ((1, "step"), 4, 0.0)


def test_dqn_is_given_what_the_experiment_says():
    told = Twin("dqn_mountaincar").arguments()  # 8 updates after every 16 frames
    assert (told["train_freq"], told["gradient_steps"]) == ((16, "step"), 8)
    assert told["target_update_interval"] == 600  # frames
    assert (told["exploration_fraction"], told["exploration_final_eps"]) == (0.2, 0.07)
    assert (told["tau"], told["max_grad_norm"], told["n_steps"]) == (1.0, 10.0, 3)


def test_entropy_bonus_follows_its_schedule(monkeypatch):
    changes = ["data.total_frames=4096", "data.frames_per_batch=1024", "data.num_epochs=1", "model.entropy_coeff=0.08"]
    monkeypatch.setattr(twin, "composed_run", lambda *said: composed_run(*said, "env=cartpole", *changes))
    bonuses, train = [], PPO.train
    monkeypatch.setattr(PPO, "train", lambda self: (bonuses.append(self.ent_coef), train(self)))
    assert Twin("ppo_lunarlander").train(seed=0)[1] == 4096
    assert bonuses == pytest.approx([0.06, 0.04, 0.02, 0.0])


def test_normalised_observations_are_not_kept_as_whole_numbers():
    need_extra("minigrid")
    space = Twin("ppo_minigrid_doorkey").environment().observation_space
    assert (space.dtype, space.shape) == ("float32", (151,))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a2c_cartpole", "learns by A2C; those by PPO, SAC, TD3, DQN have a twin"),
        ("dqn_cartpole", r"has model\.double=True"),
        ("sac_recurrent_pendulum", r"has model\.network\._target_=torchrl_lightning\.RecurrentNetwork"),
        ("ppo_l2r_cartpole", r"has data\.buffer\._target_=torchrl_lightning\.PPOBuffer"),
        ("ppo_intrinsic_mountaincar", r"has model\.intrinsic="),
        ("sac_episodic_pendulum", r"has data\.buffer\.sampler\._target_=torchrl_lightning\.RecentSampler"),
    ],
)
def test_what_cannot_be_said_there_is_refused(name, why):
    with pytest.raises(ResultsError, match=why):
        Twin(name)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("ppo_acrobot", "data.buffer.standardize_advantages=True"),
        ("sac_pendulum", "model.max_grad_norm=0.5"),
        ("dqn_mountaincar", "model.double=True"),
        ("ddpg_her_fetchreach", "data.buffer.n_steps=3"),
    ],
)
def test_so_is_a_setting_that_it_has_not(name, setting, monkeypatch):
    monkeypatch.setattr(twin, "composed_run", lambda *said: composed_run(*said, setting))
    with pytest.raises(ResultsError, match=rf"{re.escape(setting)}.*Stable-Baselines3"):
        Twin(name)


@pytest.mark.parametrize(("name", "frames"), [("ppo_acrobot", 4096), ("sac_pendulum", 2048), ("dqn_mountaincar", 2048)])
def test_run_ends_with_the_episodes_of_our_evaluation(name, frames, monkeypatch):
    play = zoo.play
    monkeypatch.setattr(zoo, "play", lambda *arguments: play(*arguments, episodes=2))
    made = Twin(name)
    made.data.update(total_frames=frames, warmup_frames=2000)
    log = zoo.record(log_path(name, 0, peer=True), "commit", made)
    assert (log.seed, log.frames, log.best, log.curve) == (0, frames, None, ())
    assert -2000 < log.last.mean < 0
    assert "stable_baselines3" in log.versions


class _Nowhere(Env[Any, Any]):
    observation_space, action_space = Box(-1, 1, [4]), Box(-1, 1, [2])


def _actor(actor: Any, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return tensors of their actor in the order and with the shapes of our parameters."""
    heads = (actor.mu, actor.log_std)
    last = [torch.cat([of(getattr(head, kind)) for head in heads]) for kind in ("weight", "bias")]
    return [*(of(each) for each in actor.latent_pi.parameters()), *last]


def _critics(critic: Any, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return tensors of their critics in the order and with the shapes of our parameters."""
    same = [[each[layer] for each in critic.q_networks] for layer in (0, 2)]
    weights = [torch.stack([of(layer.weight).T for layer in layers]) for layers in same]
    return [*weights, *(torch.stack([of(layer.bias)[None] for layer in layers]) for layers in same)]


def test_sac_makes_their_updates(monkeypatch):
    """Compare the learners after updates with the same weights, transitions and noise, in float64.

    Three details of theirs are changed: they add 1e-6 within the logarithm of a tanh's derivative, halve the critics'
    losses, which matters only beside the epsilon of Adam, and update the critics before the actor's loss.
    """
    torch.manual_seed(0)
    specs = specs_of(Bounded(-torch.ones(2), torch.ones(2)))
    ours = SACModule(MLPNetwork([8], "relu"), alpha=0.3).build(specs).double()
    their = SAC("MlpPolicy", _Nowhere(), 1e-3, gamma=0.9, ent_coef="auto_0.3", policy_kwargs={"net_arch": [8]})
    their.policy.double()
    their.log_ent_coef.data = their.log_ent_coef.data.double()
    monkeypatch.setattr(policies, "preprocess_obs", lambda observation, *_, **__: observation)  # it converts to float32
    their.actor.action_dist.epsilon = 0.0
    their.set_logger(Logger(None, []))
    step_critics, gradients = their.critic.optimizer.step, {}
    polyak_update = sac.polyak_update
    monkeypatch.setattr(sac, "polyak_update", lambda *_: None)

    def postpone() -> None:
        gradients.update({each: 2.0 * each.grad for each in their.critic.parameters()})

    monkeypatch.setattr(their.critic.optimizer, "step", postpone)

    pairs = [
        (ours.actor_network, lambda: _actor(their.actor, Tensor.clone)),
        (ours.critics, lambda: _critics(their.critic, Tensor.clone)),
        (ours.targets.critics, lambda: _critics(their.critic_target, Tensor.clone)),
    ]
    with torch.no_grad():
        for own, values in pairs:
            for each, value in zip(own.parameters(), values(), strict=True):
                each.copy_(value)
    lists = [list(ours.actor_network.parameters()), list(ours.critics.parameters()), [ours.log_alpha]]
    optimizers = [FusedAdam(parameters, lr=1e-3) for parameters in lists]

    for _ in range(50):
        batch = transitions(specs, 32).apply(lambda entry: entry.double() if entry.is_floating_point() else entry)
        now, after = torch.randn(2, 32, 2, dtype=torch.float64)
        drawn = iter([after, now])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda _, drawn=drawn: next(drawn))
            terms, _ = ours.losses(read_transitions(batch, ["observation"], 0.9))
        ours.zero_grad()
        torch.stack([value for name, value in terms.items() if name.startswith("loss_")]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        ours.targets.soft_update(0.005)

        ends, drawn = batch["next"], iter([now, after])
        columns = batch["observation"], batch["action"], ends["observation"], ends["terminated"].double()
        rows = ReplayBufferSamples(*columns, ends["reward"], None)
        their.replay_buffer = SimpleNamespace(sample=lambda *_, rows=rows, **__: rows)
        with monkeypatch.context() as patch:
            patch.setattr(normal, "_standard_normal", lambda *_, drawn=drawn, **__: next(drawn))
            their.train(1)
        for each, value in gradients.items():
            each.grad = value
        step_critics()
        polyak_update(their.critic.parameters(), their.critic_target.parameters(), 0.005)

    for own, values in pairs:
        for each, value in zip(own.parameters(), values(), strict=True):
            assert_close(each, value, rtol=1e-9, atol=1e-12)
    assert_close(ours.log_alpha, their.log_ent_coef[0], rtol=1e-9, atol=1e-12)
