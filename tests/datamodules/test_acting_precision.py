"""The policy acts and learns in the same precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions as D
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import NormalParamExtractor

from kit.learners import data_of, learner
from kit.masked import Doors
from kit.runs import trainer
from torchrl_lightning import (
    A2CModule,
    AsynchronousCollector,
    DQNModule,
    ExperienceBuffer,
    GAEBuffer,
    OnPolicyDataModule,
    PPOModule,
    ReplayDataModule,
    RingStorage,
    RingWriter,
    SACModule,
    VTraceBuffer,
    VTraceModule,
)
from torchrl_lightning.agents import CNNNetwork, MLPNetwork, RecurrentNetwork, build_squashed_actor
from torchrl_lightning.agents.analytic.acting import CompiledLayers
from torchrl_lightning.agents.networks.encoders import MLPEncoder

FOUR = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Drawn(gymnasium.Env[Any, Any]):
    """Observations are normally distributed, the reward is 1, and an episode has seven steps."""

    def __init__(self, action: Any = None, observation: Any = FOUR) -> None:
        self.action_space = spaces.Discrete(3) if action is None else action
        self.observation_space = observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.shape(action) == self.action_space.shape
        self.count += 1
        return self.observe(), 1.0, False, self.count == 7, {}

    def observe(self) -> Any:
        space = self.observation_space
        return self.np_random.normal(size=space.shape).astype(space.dtype)


ENVS, STEPS = 4, 6
SIZES = {"num_envs": ENVS, "frames_per_batch": ENVS * STEPS}
BOX = spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 0.5]))
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "discrete": (Drawn, {}),
    "multi-discrete": (partial(Drawn, spaces.MultiDiscrete([2, 3])), {}),
    "multi-binary": (partial(Drawn, spaces.MultiBinary(3)), {}),
    "normal": (partial(Drawn, BOX), {}),
    "far from zero": (partial(Drawn, spaces.Box(1000.0, 1001.0, (2,), np.float32)), {}),
    "float64 actions": (partial(Drawn, spaces.Box(-1.0, 1.0, (2,), np.float64)), {}),
    "unbounded": (partial(Drawn, spaces.Box(-np.inf, np.inf, (2,), np.float32)), {}),
    "squashed": (partial(Drawn, BOX), {"distribution": "tanh_normal", "initial_std": 2.0}),
    "masked": (Doors, {}),
    "masked parts": (partial(Doors, (2, 3)), {}),
}
NETWORKS = {
    "mlp": MLPNetwork([32, 32]),
    "relu": MLPNetwork([32], "relu", shared=True, head_sizes=[16]),
    "gru": RecurrentNetwork("gru", 8),
    "lstm": RecurrentNetwork("lstm", 8),
}


class Compared(L.Callback):
    """Evaluate the rows of the first rollout again, in the batches ``[N]`` of the collection.

    Attributes:
        same: The largest absolute log-ratio of each batch.
        mixed: The largest absolute log-ratio of the first mini-batch.
    """

    def __init__(self) -> None:
        self.same, self.mixed, self.dtype = [-1.0], [-1.0], None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step:
            return  # processes collect the second rollout before the first update
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        rollout = data.buffer.rollout
        assert len(rollout) == STEPS
        with torch.no_grad(), trainer.precision_plugin.train_step_context():
            self.same += [moved(module, row) for row in rollout.unbind(0)]
            self.mixed.append(moved(module, batch))
        self.dtype = rollout["action_log_prob"].dtype


def moved(module: Any, rows: Any) -> float:
    log_prob = module.evaluate(rows)[0]
    assert log_prob.dtype == rows["action_log_prob"].dtype
    return float((log_prob - rows["action_log_prob"]).abs().max())


def compared(module: Any, env: Any, precision: Any = "32-true", **settings: Any) -> Compared:
    """Fit one rollout; return the log-ratios before the first update."""
    callback = Compared()
    options = {**SIZES, "num_epochs": 1, "num_mini_batch": 2, "seed": 3, "updates_per_step": 1, **settings}
    data = OnPolicyDataModule(env, **options)
    plugins = {"plugins": [precision]} if isinstance(precision, Precision) else {"precision": precision}
    trainer(max_epochs=1, callbacks=[callback], limit_val_batches=0, **plugins).fit(module, datamodule=data)
    assert len(callback.same) == 1 + STEPS
    return callback


class Doubled(PPOModule):
    """PPO with networks of double precision."""

    def configure_model(self) -> None:
        super().configure_model()
        self.double()


PRECISIONS = pytest.mark.parametrize(
    ("precision", "kind", "limit"),
    [("32-true", PPOModule, 1e-5), ("bf16-mixed", PPOModule, 0.0), ("32-true", Doubled, 1e-10)],
)


def torchrl_env(env: Any) -> SerialEnv:
    return SerialEnv(ENVS, lambda: GymWrapper(env(), categorical_action_encoding=True))


def in_processes(env: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv([env] * ENVS, autoreset_mode=AutoresetMode.SAME_STEP)


def a_torchrl_collector(env: Any, policy: Any) -> Collector:
    env = TransformedEnv(torchrl_env(env), InitTracker())
    return Collector(env, policy, frames_per_batch=ENVS * STEPS, total_frames=-1, trust_policy=True)


COLLECTORS: dict[str, Any] = {
    "gymnasium": lambda env: (env, {}),
    "processes of environments": lambda env: (
        in_processes(env),
        {"eval_env": env},
    ),
    "torchrl environment": lambda env: (lambda: torchrl_env(env), {}),
    "torchrl collector": lambda env: (lambda: torchrl_env(env), {"collector": partial(a_torchrl_collector, env)}),
    "processes": lambda env: (env, {"collector": partial(AsynchronousCollector, env, num_workers=1, **SIZES)}),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("head", HEADS)
def test_mixed_precision_acts_as_it_learns(head: str, network: str) -> None:
    env, options = HEADS[head]
    found = compared(PPOModule(NETWORKS[network], **options), env, "bf16-mixed")
    assert max(found.same) == 0.0
    assert found.dtype == torch.float32


@pytest.mark.parametrize("network", ["mlp", "gru"])
@pytest.mark.parametrize("head", HEADS)
def test_single_precision_acts_as_it_learns(head: str, network: str) -> None:
    env, options = HEADS[head]
    found = compared(PPOModule(NETWORKS[network], **options), env)
    assert 0.0 <= max(found.same) <= 1e-5
    assert 0.0 <= max(found.mixed) <= 1e-5


@pytest.mark.parametrize("network", ["mlp", "gru"])
@pytest.mark.parametrize("head", HEADS)
def test_double_precision_acts_as_it_learns(head: str, network: str) -> None:
    env, options = HEADS[head]
    found = compared(Doubled(NETWORKS[network], **options), env)
    assert found.dtype == torch.float64
    assert 0.0 <= max(found.same) <= 1e-10
    assert 0.0 <= max(found.mixed) <= 1e-10


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("collector", [name for name in COLLECTORS if name != "gymnasium"])
@PRECISIONS
@pytest.mark.parametrize("head", ["discrete", "squashed"])
def test_collectors_act_in_the_precision_of_learning(
    head: str, precision: str, kind: Any, limit: float, collector: str
) -> None:
    env, options = HEADS[head]
    source, settings = COLLECTORS[collector](env)
    found = compared(kind(NETWORKS["mlp"], **options), source, precision, **settings)
    assert 0.0 <= max(found.same) <= limit


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@PRECISIONS
def test_observations_are_processed_alike_in_acting_and_learning(
    precision: str, kind: Any, limit: float, dtype: Any, normalized: bool
) -> None:
    env = partial(Drawn, BOX, spaces.Box(-np.inf, np.inf, (3,), dtype))
    found = compared(kind(NETWORKS["mlp"]), env, precision, normalize_observation=normalized)
    assert 0.0 <= max(found.same) <= limit


@PRECISIONS
def test_pixels_are_processed_alike_in_acting_and_learning(precision: str, kind: Any, limit: float) -> None:
    network, pixels = CNNNetwork([4], [3], [2], [16]), spaces.Box(-9, 9, (2, 8, 8), np.float32)
    found = compared(kind(network), partial(Drawn, None, pixels), precision)
    assert 0.0 <= max(found.same) <= limit


@pytest.mark.parametrize("precision", [MixedPrecision("bf16-mixed", "cpu"), MixedPrecision("16-mixed", "cpu")])
def test_precision_plugin_applies_to_acting(precision: Precision) -> None:
    assert max(compared(PPOModule(NETWORKS["mlp"]), Drawn, precision).same) == 0.0


class OwnAutocast(Precision):
    """A plugin that uses autocast, but has the name of single precision."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield


def test_user_precision_plugin_applies_to_acting() -> None:
    found = compared(PPOModule(NETWORKS["mlp"]), Drawn, OwnAutocast())
    assert max(found.same) == 0.0


class Engine(Precision):
    """Replaces layers, as NVIDIA's transformer engine does."""

    precision = "transformer-engine"  # type: ignore[assignment]


class HalfBatches(Precision):
    """Converts batches, as the plugins of sharded strategies do."""

    def convert_input(self, data: Any) -> Any:
        return data.to(torch.bfloat16)


class HalfByDefault(Precision):
    """Changes the default dtype."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)


REFUSED = ["64-true", "bf16-true", "16-true", HalfPrecision("bf16-true"), Engine(), HalfBatches(), HalfByDefault()]


@pytest.mark.parametrize("own_data", [False, True])
@pytest.mark.parametrize("precision", REFUSED)
def test_another_precision_is_refused_before_anything_is_collected(precision: Any, own_data: bool) -> None:
    made: list[Drawn] = []

    def env() -> Drawn:
        made.append(Drawn())
        return made[-1]

    plugins = {"plugins": [precision]} if isinstance(precision, Precision) else {"precision": precision}
    data = data_of("ppo") if own_data else OnPolicyDataModule(env, **SIZES)
    with pytest.raises(ValueError, match="precision") as error:
        trainer(**plugins).fit(learner("ppo"), datamodule=data)
    assert "bf16-mixed" in str(error.value)
    assert "\n" not in str(error.value)
    assert not made


class Own(L.LightningModule):
    """A module of a user from TorchRL's parts, which ignore precision; each batch is one optimizer step."""

    def __init__(self, actions: str) -> None:
        super().__init__()
        if actions == "discrete":
            parts, keys, kind = [nn.Linear(8, 3)], ["logits"], D.Categorical
        else:
            parts, keys, kind = [nn.Linear(8, 4), NormalParamExtractor()], ["loc", "scale"], normal
        net = TensorDictModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *parts), ["observation"], keys)
        draw = ProbabilisticTensorDictModule(
            keys, ["action"], distribution_class=kind, return_log_prob=True, log_prob_key="action_log_prob"
        )
        self.policy = ProbabilisticTensorDictSequential(net, draw)
        self.critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
        self.dtypes: set[torch.dtype] = set()

    def evaluate(self, batch: Any) -> tuple[torch.Tensor]:
        log_prob = self.policy.get_dist(batch.copy()).log_prob(batch["action"])
        self.dtypes.add(log_prob.dtype)
        return (log_prob.to(batch["action_log_prob"].dtype),)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        log_prob = self.evaluate(batch)[0]
        value = self.critic(batch.copy())["state_value"]
        return -(log_prob * batch["advantage"].squeeze(-1)).mean() + (value - batch["value_target"]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def normal(loc: torch.Tensor, scale: torch.Tensor) -> D.Distribution:
    return D.Independent(D.Normal(loc, scale), 1)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("collector", ["gymnasium", "torchrl environment", "processes"])
@pytest.mark.parametrize("actions", ["discrete", "continuous"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_user_module_acts_as_it_learns(precision: str, actions: str, collector: str) -> None:
    module = Own(actions)
    env = Drawn if actions == "discrete" else partial(Drawn, spaces.Box(-np.inf, np.inf, (2,), np.float32))
    source, settings = COLLECTORS[collector](env)
    found = compared(module, source, precision, **settings)
    assert 0.0 <= max(found.same) <= (0.0 if precision == "bf16-mixed" else 1e-5)
    assert found.dtype == torch.float32
    if precision == "bf16-mixed" and actions == "discrete":
        assert torch.bfloat16 in module.dtypes


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("collector", ["gymnasium", "torchrl environment", "processes"])
@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_user_module_of_double_precision_acts_as_it_learns(actions: str, collector: str) -> None:
    space = None if actions == "discrete" else spaces.Box(-np.inf, np.inf, (2,), np.float32)
    env = partial(Drawn, space, spaces.Box(-np.inf, np.inf, (4,), np.float64))
    source, settings = COLLECTORS[collector](env)
    found = compared(Own(actions).double(), source, **settings)
    assert 0.0 <= max(found.same) <= 1e-10


class Squashing(PPOModule):
    """PPO with SAC's actor; its standard deviation depends on the observation."""

    def build(self, specs: Any) -> Any:
        super().build(specs)
        self.actor_network = build_squashed_actor(specs, NETWORKS["mlp"])
        with torch.no_grad():
            self.actor_network.head.layers.linear.bias.fill_(1.5)  # saturates the tanh
        return self


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_log_probability_of_a_squashed_action_is_that_of_the_stored_action(precision: str) -> None:
    found = compared(Squashing(NETWORKS["mlp"]), partial(Drawn, BOX), precision)
    assert 0.0 <= max(found.same) <= (0.0 if precision == "bf16-mixed" else 1e-5)


class Estimated(L.Callback):
    """Compute the values, and the log-probabilities for V-trace, again from the whole rollout in one batch."""

    checked = False

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step:
            return
        rows = trainer.datamodule.buffer.rollout.flatten(0, 1)  # type: ignore[attr-defined]
        with torch.no_grad(), trainer.precision_plugin.train_step_context():
            log_prob, _, values = module.evaluate(rows)
        torch.testing.assert_close(rows["state_value"], values[0].float(), rtol=0, atol=0)
        assert {rows[key].dtype for key in ("state_value", "advantage", "value_target")} == {torch.float32}
        if "current_action_log_prob" in rows.keys():  # noqa: SIM118
            torch.testing.assert_close(rows["current_action_log_prob"], log_prob, rtol=0, atol=1e-6)
        self.checked = True


@pytest.mark.parametrize("kind", [PPOModule, A2CModule, VTraceModule])
def test_values_are_estimated_as_they_are_learned(kind: Any) -> None:
    callback = Estimated()
    buffer = VTraceBuffer if kind is VTraceModule else GAEBuffer
    options = {**SIZES, "num_epochs": 2, "num_mini_batch": 2, "updates_per_step": 1}
    data = OnPolicyDataModule(Drawn, buffer=buffer, **options)
    module = kind(NETWORKS["mlp"])
    run = trainer(max_epochs=1, callbacks=[callback], limit_val_batches=0, precision="bf16-mixed")
    run.fit(module, datamodule=data)
    assert callback.checked


def ring(size: int, num_envs: int) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(size), writer=RingWriter(num_envs))


class Watched(Drawn):
    """Record whether the steps run under autocast."""

    noted: list[bool]

    def step(self, action: Any) -> Any:
        self.noted.append(torch.is_autocast_enabled("cpu"))
        return super().step(action)


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("case", ["dqn", "sac", "ppo"])
def test_autocast_in_acting_applies_only_to_the_policy(
    case: str, precision: str, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[bool] = []
    acted: list[bool] = []
    learned: list[bool] = []
    monkeypatch.setattr(Watched, "noted", stepped, raising=False)
    forward = MLPEncoder.forward

    def noted(self: Any, *entries: Any) -> Any:
        (learned if torch.is_grad_enabled() else acted).append(torch.is_autocast_enabled("cpu"))
        return forward(self, *entries)

    monkeypatch.setattr(MLPEncoder, "forward", noted)
    monkeypatch.setattr(CompiledLayers, "refresh", lambda self: False)
    network, env = MLPNetwork([8]), partial(Watched, BOX if case == "sac" else None)
    options = {"seed": 1, "eval_episodes": 1, "updates_per_step": updates, "num_envs": 2}
    if case == "ppo":
        data: Any = OnPolicyDataModule(env, frames_per_batch=16, **options)
    else:
        data = ReplayDataModule(
            env,
            buffer=lambda num_envs: ring(64, num_envs),
            batch_size=4,
            warmup_frames=4,
            updates_per_epoch=8,
            **options,
        )
    kinds = {"dqn": DQNModule, "sac": SACModule, "ppo": PPOModule}
    run = trainer(max_epochs=2, precision=precision)
    run.fit(kinds[case](network), datamodule=data)
    assert len(stepped) > 20
    assert not any(stepped)
    assert len(acted) > 8
    assert set(acted) == {precision == "bf16-mixed"}  # also in evaluation
