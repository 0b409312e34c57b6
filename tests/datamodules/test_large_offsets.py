"""Runs with small changes around a large observation learn from the same numbers as runs around zero."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import GymWrapper

from kit.replay import BUFFERS, SIZE, replay_data
from kit.runs import parameters, trainer
from torchrl_lightning import (
    AsynchronousCollector,
    EnvironmentRecipe,
    OnPolicyDataModule,
    SimpleReplayBuffer,
    load_policy,
    make_vector_env,
    play_episodes,
)
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, RandomNetworkDistillation
from torchrl_lightning.deploy.export import export_policy

STEPS = np.random.default_rng(0).integers(-8, 9, size=(1 << 14, 2)) / 4


class Clock(gymnasium.Env[Any, Any]):
    """Observe an origin plus multiples of a quarter for any action; an episode has 20 steps.

    Args:
        origin: The number that is added to the clock.
        dtype: The dtype of the observation; quarters become whole numbers if it is an integer.
        nested: Observe a Dict of the clock and a float32 number.
        constant: Observe only the origin.
        continuous: Take actions from a Box.
    """

    def __init__(
        self,
        origin: float = 0.0,
        dtype: str = "float64",
        nested: bool = False,
        constant: bool = False,
        continuous: bool = False,
    ) -> None:
        self.origin, self.dtype, self.nested, self.constant = origin, np.dtype(dtype), nested, constant
        whole = self.dtype.kind in "iu"
        self.scale = 4 if whole else 1
        bounds = (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max) if whole else (-np.inf, np.inf)
        self.observation_space: Any = spaces.Box(*bounds, (1,), self.dtype)
        if nested:
            small = spaces.Box(-np.inf, np.inf, (1,), np.float32)
            self.observation_space = spaces.Dict(
                {"small": small, "inner": spaces.Dict({"clock": self.observation_space})}
            )
        self.action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)

    def _shown(self) -> Any:
        clock, small = STEPS[self.first + self.t] * (not self.constant)
        shown = np.array([int(clock * 4) + int(self.origin) if self.scale > 1 else clock + self.origin], self.dtype)
        return {"small": np.array([small], np.float32), "inner": {"clock": shown}} if self.nested else shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.first = 0, int(self.np_random.integers(len(STEPS) - 32))
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._shown(), 1.0, False, self.t >= 20, {}


ORIGIN = 1700000037.0
KINDS = [(ORIGIN, "float64"), (ORIGIN, "int64"), (ORIGIN, "int32"), (-5412345.5, "float64")]


class Watching:
    """Store each training batch of a module."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("seen", []).append(batch.clone())


class PPO(Watching, PPOModule):
    CONFIG_NAME = None


class DQN(Watching, DQNModule):
    CONFIG_NAME = None


def rollouts(env: Any, **settings: Any) -> OnPolicyDataModule:
    sizes: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 128, "num_epochs": 1, "num_mini_batch": 1}
    common = {"normalize_observation": True, "seed": 0, "eval_episodes": 2}
    return OnPolicyDataModule(env, **{**sizes, **common, **settings})


def fitted(data: Any, module: Any, epochs: int = 3, **settings: Any) -> tuple[Any, Any]:
    """Fit a module; return it and its trainer."""
    run = trainer(max_epochs=epochs, limit_val_batches=0, **settings)
    run.fit(module, datamodule=data)
    return module, run


def seen(module: Any, *key: str) -> Tensor:
    """Return an entry of all training batches except the first batch, which is not normalised."""
    return torch.cat([batch[key].flatten() for batch in module.seen[1:]]).double()


def agent(cls: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return cls(MLPNetwork([8]), **settings)


def check_alike(near: Any, far: Any, *keys: tuple[str, ...]) -> None:
    """Compare the training batches of two modules, one around zero and one around a large value."""
    for key in keys:
        expected, found = seen(near, *key), seen(far, *key)
        assert expected.unique().numel() > 10
        assert 0.5 < float(expected.std()) < 2.0
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)


WAYS: dict[str, Any] = {
    "sync": lambda env: rollouts(env),
    "async": lambda env: rollouts(EnvironmentRecipe(env, vectorization="async")),
    "ready": lambda env: rollouts(make_vector_env(env, 2), eval_env=env),
    "workers": lambda env: rollouts(env, collector=partial(AsynchronousCollector, num_workers=1)),
    "torchrl": lambda env: rollouts(lambda: GymWrapper(env())),
    "rewards, too": lambda env: rollouts(env, normalize_reward=True),
}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", WAYS)
def test_small_differences_are_kept_by_all_collectors(way: str) -> None:
    module, _ = fitted(WAYS[way](partial(Clock, ORIGIN)), agent(PPO))
    found = seen(module, "observation")
    assert found.unique().numel() > 30
    assert abs(float(found.mean())) < 0.3
    assert 0.8 < float(found.std()) < 1.2


@pytest.mark.parametrize(("origin", "dtype"), KINDS)
@pytest.mark.parametrize("nested", [False, True])
def test_small_differences_are_kept_in_all_dtypes_nested_or_not(nested: bool, origin: float, dtype: str) -> None:
    keys = [("small",), ("inner", "clock")] if nested else [("observation",)]
    pairs = [fitted(rollouts(partial(Clock, each, dtype, nested)), agent(PPO))[0] for each in (0.0, origin)]
    check_alike(*pairs, *keys)
    torch.testing.assert_close(parameters(pairs[1]), parameters(pairs[0]), atol=1e-2, rtol=0.0)


@pytest.mark.parametrize("constant", [1e9 + 0.1, ORIGIN + 0.3, -0.1])
@pytest.mark.parametrize("way", ["sync", "torchrl"])
def test_constant_is_exactly_zero(way: str, constant: float) -> None:
    module, _ = fitted(WAYS[way](partial(Clock, constant, constant=True)), agent(PPO))
    assert (seen(module, "observation") == 0).all()


REPLAYS = [*(name for name in BUFFERS if name not in ("sequence", "simple")), "simple of one number"]


@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize(("origin", "dtype"), KINDS[:2])
def test_small_differences_are_kept_by_all_replay_buffers(name: str, origin: float, dtype: str) -> None:
    simple = partial(SimpleReplayBuffer, 1, None, SIZE, 8)
    buffer = (lambda num_envs: simple(num_envs=num_envs)) if name.startswith("simple of") else BUFFERS[name]
    modules = []
    for each in (0.0, origin):
        data = replay_data(buffer, env=partial(Clock, each, dtype), normalize_observation=True, warmup_frames=60)
        modules.append(fitted(data, agent(DQN, epsilon_frames=10**9))[0])
    first = [module.seen[1]["observation"] for module in modules]
    torch.testing.assert_close(first[1], first[0], atol=1e-4, rtol=0.0)
    assert first[1].unique().numel() > 4
    if "prioritized" not in name:  # prioritized samples depend on the last bits of the errors
        check_alike(*modules, ("observation",), ("next", "observation"))


def test_intrinsic_rewards_are_those_around_zero() -> None:
    rewards = []
    for each in (0.0, ORIGIN):
        torch.manual_seed(0)
        module: Any = PPO(MLPNetwork([8]), intrinsic=RandomNetworkDistillation(MLPNetwork([8])))
        data = rollouts(partial(Clock, each), normalize_observation=False)
        fitted(data, module)
        rewards.append(module.seen[0]["next", "intrinsic_reward"])
    torch.testing.assert_close(rewards[1], rewards[0], atol=1e-5, rtol=1e-3)


@pytest.fixture
def trained(tmp_path: Any) -> Any:
    """Train with observations around a large value; return module, data and checkpoint."""
    data = rollouts(partial(Clock, ORIGIN))
    module, run = fitted(data, agent(PPO), default_root_dir=tmp_path)
    run.save_checkpoint(tmp_path / "at.ckpt")
    return module, data, tmp_path / "at.ckpt"


def test_loaded_policy_and_evaluation_read_the_observations_of_the_module(trained: Any) -> None:
    module, data, path = trained
    loaded = load_policy(path, agent(PPO))
    shown = torch.arange(-8, 9)[:, None].double() / 4 + ORIGIN
    normalizer = loaded.policy.normalizer
    assert normalizer.normalize("observation", shown).unique().numel() == 17
    raw = data.evaluate(module.policy, 2)
    assert (data.evaluate(loaded, 2)["episode_length"] == raw["episode_length"]).all()
    assert play_episodes(partial(Clock, ORIGIN), loaded, 2)["episode_length"].tolist() == [20, 20]
    chosen = loaded.policy.get_dist(TensorDict({"observation": shown}, [17])).probs
    assert chosen.unique(dim=0).shape[0] == 17


@pytest.mark.parametrize("format", ["torch", "onnx"])
@pytest.mark.parametrize(("origin", "dtype"), KINDS)
def test_exported_file_takes_the_dtype_of_the_space(tmp_path: Any, format: Any, origin: float, dtype: str) -> None:
    if format == "onnx":
        for name in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(name)
    _, run = fitted(rollouts(partial(Clock, origin, dtype, continuous=True)), agent(PPO))
    run.save_checkpoint(tmp_path / "at.ckpt")
    loaded = load_policy(tmp_path / "at.ckpt", agent(PPO))
    described = export_policy(loaded, tmp_path / "policy", format=format)
    assert described["inputs"] == {"observation": {"shape": ["N", 1], "dtype": dtype, "position": 0}}
    shown = (torch.arange(-8, 9)[:, None] / (4 if dtype == "float64" else 1)).double() + origin
    shown = shown.to(getattr(torch, dtype))
    expected = torch.as_tensor(loaded.act(shown.numpy()))
    assert expected.unique().numel() > 10
    if format == "torch":
        found = torch.export.load(tmp_path / "policy").module()(shown)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(tmp_path / "policy"), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(None, {"observation": shown.numpy()})[0])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


def test_resumed_run_repeats_an_uninterrupted_one_bit_for_bit(tmp_path: Any) -> None:
    settings = {"reset_at_each_batch": True}
    whole, _ = fitted(rollouts(partial(Clock, ORIGIN), **settings), agent(PPO), 4)
    _, run = fitted(rollouts(partial(Clock, ORIGIN), **settings), agent(PPO), 2)
    run.save_checkpoint(tmp_path / "at.ckpt")
    resumed, run = agent(PPO), trainer(max_epochs=4, limit_val_batches=0)
    run.fit(resumed, datamodule=rollouts(partial(Clock, ORIGIN), **settings), ckpt_path=tmp_path / "at.ckpt")
    assert torch.equal(parameters(resumed), parameters(whole))
    assert torch.equal(resumed.seen[-1]["observation"], whole.seen[-1]["observation"])
