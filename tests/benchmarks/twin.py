"""Train an experiment with Stable-Baselines3 with the same task, settings and number of frames."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import DtypeObservation
from hydra.utils import instantiate
from omegaconf import OmegaConf
from stable_baselines3 import DDPG, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from benchmarks.results import LEFT_OUT
from benchmarks.run_logs import ResultsError
from kit.store import composed_run
from torchrl_lightning import EnvironmentRecipe

Arguments = dict[str, Any]
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}
SAME: dict[str, Any] = {
    "model.optimizer": None,
    "model.clip_schedule": "constant",
    "model.loss_critic_type": "l2",
    "model.loss_function": "l2",
    "model.noise_end": None,
    "model.network._target_": "torchrl_lightning.MLPNetwork",
    "data.collector": None,
    "data.source": None,
    "data.dataset": None,
    "model.intrinsic": None,
    "data.buffer.sampler._target_": "torchrl_lightning.UniformSampler",
    "data.buffer.transform.skip_reached": False,
}
"""Required values of settings that Stable-Baselines3 does not have, if the experiment has them."""

OWN: dict[str, dict[str, Any]] = {
    "PPO": {"data.buffer.standardize_advantages": False},
    "SAC": {"model.num_critics": 2, "model.max_grad_norm": None},
    "TD3": {"model.num_critics": 2, "model.max_grad_norm": None},
    "DQN": {"model.double": False, "model.dueling": False, "model.loss_function": "smooth_l1"},
}
"""Further required values by learner."""


class LinearEntropy(BaseCallback):
    """Reduce the entropy bonus of PPO linearly, like the learning rate: Stable-Baselines3 has no schedule for it."""

    def __init__(self, coefficient: float, total_frames: int) -> None:
        super().__init__()
        self.coefficient, self.total_frames = coefficient, total_frames

    def _on_rollout_end(self) -> None:
        assert isinstance(self.model, PPO)
        self.model.ent_coef = self.coefficient * (1 - self.model.num_timesteps / self.total_frames)

    def _on_step(self) -> bool:
        return True


class Twin:
    """The Stable-Baselines3 twin of an experiment. Raise ResultsError if the experiment does not have a twin."""

    def __init__(self, name: str) -> None:
        self.config = cfg = composed_run(f"experiment={name}")
        kinds: dict[str, tuple[Any, Callable[[], Arguments], str]] = {
            "PPO": (PPO, self._ppo, "GAEBuffer"),
            "SAC": (SAC, self._sac, "ExperienceBuffer"),
            "TD3": (TD3, self._td3, "ExperienceBuffer"),
            "DQN": (DQN, self._dqn, "ExperienceBuffer"),
        }
        learner = cfg.model._target_.rpartition(".")[2].removesuffix("Module")
        if learner not in kinds:
            raise ResultsError(f"{name} learns by {learner}; those by {', '.join(kinds)} have a twin.")
        self.kind, self.arguments, buffer = kinds[learner]
        if learner == "TD3" and cfg.model.num_critics == 1:
            self.kind = DDPG
        same = {**SAME, "data.buffer._target_": f"torchrl_lightning.{buffer}", **OWN[learner]}
        if self.kind is DDPG:
            same["model.num_critics"] = 1
        if OmegaConf.select(cfg, "data.buffer.transform") is not None:
            same["data.buffer.n_steps"] = 1  # hindsight relabelling of Stable-Baselines3 uses single steps
        for key, expected in same.items():
            said = OmegaConf.select(cfg, key, default=expected)
            if said != expected and key != LEFT_OUT.get(name):
                raise ResultsError(f"{name} has {key}={said}, and Stable-Baselines3 no counterpart of it.")
        self.recipe = EnvironmentRecipe(cfg.data.env) if isinstance(cfg.data.env, str) else instantiate(cfg.data.env)
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        self.data, self.model, self.buffer = plain["data"], plain["model"], plain["data"]["buffer"]
        self.gamma: float = self.buffer.get("gamma") or self.model.get("gamma") or 0.99

    def train(self, seed: int) -> tuple[Callable[[Any], Any], int, float]:
        """Train with a seed; return a function from observations to actions, the frames and the processor minutes."""
        environments: Any = DummyVecEnv([self.environment] * self.data["num_envs"])
        shown, earned = bool(self.data["normalize_observation"]), self.data["normalize_reward"]
        if shown or earned:
            clip, epsilon = self.data["normalize_clip"], self.data["normalize_epsilon"]
            environments = VecNormalize(environments, True, shown, earned, clip, clip, self.gamma, epsilon)
        model = self.kind(
            "MultiInputPolicy" if hasattr(environments.observation_space, "spaces") else "MlpPolicy",
            environments,
            gamma=self.gamma,
            learning_rate=self._rate(),
            policy_kwargs=self.network(),
            seed=seed,
            device="cpu",
            **self.arguments(),
        )
        began = time.process_time()
        model.learn(self.data["total_frames"], self._callback())
        minutes = (time.process_time() - began) / 60

        def predict(observation: Any) -> Any:
            values = environments.normalize_obs(observation) if shown else observation
            return model.predict(values, deterministic=True)[0]

        return predict, model.num_timesteps, minutes

    def environment(self) -> Any:
        env = self.recipe()
        # VecNormalize returns the dtype of the space: an integer dtype would round normalised values.
        whole = isinstance(env.observation_space, Box) and np.issubdtype(env.observation_space.dtype, np.integer)
        return Monitor(DtypeObservation(env, np.float32) if whole and self.data["normalize_observation"] else env)

    def _rate(self) -> Any:
        rate, schedule = self.model["learning_rate"], self.model["schedule"]
        if schedule not in ("constant", "linear"):
            raise ResultsError(f"model.schedule={schedule} has no counterpart in Stable-Baselines3.")
        return rate if schedule == "constant" else lambda left: left * rate

    def _callback(self) -> BaseCallback | None:
        schedule = self.model.get("entropy_schedule", "constant")
        if schedule not in ("constant", "linear"):
            raise ResultsError(f"model.entropy_schedule={schedule} has no counterpart in Stable-Baselines3.")
        if schedule == "constant":
            return None
        return LinearEntropy(self.model["entropy_coeff"], self.data["total_frames"])

    def network(self) -> Arguments:
        network = self.model["network"]
        sizes, activation = list(network["hidden_sizes"]), ACTIVATIONS[network["activation"]]
        told: Arguments = {
            "net_arch": {"pi": sizes, "vf": sizes} if self.kind is PPO else sizes,
            "activation_fn": activation,
        }
        if self.kind is PPO:
            told["ortho_init"] = network["initialization"] == "orthogonal"
            told["log_std_init"] = math.log(self.model["initial_std"])
        return told

    def _ppo(self) -> Arguments:
        data, model = self.data, self.model
        return {
            "n_steps": data["frames_per_batch"] // data["num_envs"],
            "batch_size": data["mini_batch_size"],
            "n_epochs": data["num_epochs"],
            "gae_lambda": self.buffer["gae_lambda"],
            "clip_range": model["clip_epsilon"],
            "clip_range_vf": model["clip_value"],
            "ent_coef": model["entropy_coeff"],
            "vf_coef": model["critic_coeff"],
            "max_grad_norm": math.inf if model["max_grad_norm"] is None else model["max_grad_norm"],
            "target_kl": model["target_kl"],
            "normalize_advantage": model["normalize_advantage"] is not False,
        }

    def _replay(self) -> Arguments:
        data = self.data
        frames = data["frames_per_batch"] or max(data["num_envs"], data["frames_per_update"])  # between two updates
        steps, at_once = frames / data["num_envs"], frames / data["frames_per_update"]
        told: Arguments = {
            "buffer_size": self.buffer["storage"]["max_size"],
            "batch_size": data["batch_size"],
            "learning_starts": data["warmup_frames"],
            "train_freq": (round(steps), "step"),
            "gradient_steps": round(at_once),
            "tau": self.model["tau"],
            "n_steps": self.buffer["n_steps"],
        }
        goals = self.buffer.get("transform")
        if goals is not None:
            share = goals["her_proportion"]
            kinds = {"n_sampled_goal": round(share / (1 - share)), "goal_selection_strategy": goals["strategy"]}
            told |= {"replay_buffer_class": HerReplayBuffer, "replay_buffer_kwargs": kinds}
        return told

    def _dqn(self) -> Arguments:
        data, model = self.data, self.model
        return {
            **self._replay(),
            "target_update_interval": round(model["target_interval"] * data["frames_per_update"]),
            "exploration_fraction": model["epsilon_frames"] / data["total_frames"],
            "exploration_initial_eps": model["epsilon_start"],
            "exploration_final_eps": model["epsilon_end"],
            "max_grad_norm": model["max_grad_norm"],
        }

    def _sac(self) -> Arguments:
        model = self.model
        target = model["target_entropy"]
        return {
            **self._replay(),
            "ent_coef": f"auto_{model['alpha']}" if model["learn_alpha"] else model["alpha"],
            "target_entropy": "auto" if target is None else target,
            "target_update_interval": model["target_interval"],
        }

    def _td3(self) -> Arguments:
        model, size = self.model, self.recipe().action_space.shape[0]
        told: Arguments = {
            **self._replay(),
            "action_noise": NormalActionNoise(np.zeros(size), model["noise"] * np.ones(size)),
        }
        if self.kind is TD3:
            told |= {
                "policy_delay": model["target_interval"],
                "target_policy_noise": model["policy_noise"],
                "target_noise_clip": model["noise_clip"],
            }
        return told
