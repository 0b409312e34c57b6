"""Analytic updates equal autograd, and unsupported agents, batches and runs use autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from kit.fake_data import FakeData
from kit.learners import OFF_POLICY, SPECS, data_of, learner
from kit.runs import ListensToBackward, parameters, trainer
from kit.specs import BOX, ONE_HOT, TWO_CHOICES, specs_of
from kit.transitions import shake_targets, transitions
from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, SACModule
from torchrl_lightning.agents.analytic import make_analytic_update
from torchrl_lightning.agents.networks.action_heads import GaussianLayer
from torchrl_lightning.agents.transitions import read_transitions

ROWS = 32
MASKED = specs_of(Categorical(3), observation=Unbounded(4), action_mask=Binary(3))
NETWORKS = {"relu": MLPNetwork([9, 8], "relu"), "tanh": MLPNetwork([8], "tanh", head_sizes=[6])}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dqn": ("dqn", {"double": False}),
    "double": ("dqn", {"loss_function": "l2"}),
    "sac": ("sac", {"alpha": 0.3}),
    "sac of three critics": ("sac", {"num_critics": 3, "learn_alpha": False, "loss_function": "smooth_l1"}),
    "td3": ("td3", {"target_interval": 1}),
    "td3 that rests": ("td3", {"target_interval": 2, "loss_function": "l1"}),
    "ppo": ("ppo", {}),
    "ppo of all terms": ("ppo", {"entropy_coeff": 0.3, "loss_critic_type": "smooth_l1", "critic_coeff": 2.0}),
    "ppo in a box": ("ppo in a box", {}),
    "ppo in a box of all terms": ("ppo in a box", {"entropy_coeff": 0.3, "loss_critic_type": "l1"}),
}


def start_update(module: Any) -> Any:
    """Attach a trainer and optimizers as at the start of a fit; return the update."""
    module.trainer = trainer(max_epochs=1)
    module.configure_optimizers()
    return make_analytic_update(module)


def module_of(case: str, network: Any, **settings: Any) -> Any:
    if case != "ppo in a box":
        return learner(case, network, **settings)
    torch.manual_seed(0)
    return PPOModule(network, **settings).build(BOX)


def mini_batch(in_a_box: bool = False, rows: int = ROWS) -> TensorDict:
    """Return steps with large policy ratios; in a box, some actions are on its bounds."""
    torch.manual_seed(1)
    low, high = BOX.action.space.low, BOX.action.space.high
    entries = {
        "observation": torch.randn(rows, 4),
        "action": (3.0 * torch.randn(rows, 2)).clamp(low, high) if in_a_box else torch.randint(0, 2, (rows,)),
        "action_log_prob": -torch.rand(rows),
        "advantage": torch.randn(rows, 1),
        "value_target": torch.randn(rows, 1),
    }
    return TensorDict(entries, [rows])


def batch_of(case: str, edit: Callable[[TensorDict], Any] = lambda level: None, keys: Any = ("observation",)) -> Any:
    """Build a batch of a module; ``edit`` changes the TensorDicts that contain observations."""
    torch.manual_seed(1)
    batch = mini_batch(case == "ppo in a box") if case.startswith("ppo") else transitions(SPECS[case], ROWS)
    for level in (batch, batch.get("next", None)):
        if level is not None:
            edit(level)
    return batch if case.startswith("ppo") else read_transitions(batch, list(keys), 0.9)


def gradients(module: Any) -> list[torch.Tensor | None]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in trained]


@pytest.mark.parametrize(
    ("name", "weighted"), [(name, flag) for name in CASES for flag in (False, True) if not (flag and "ppo" in name)]
)
@pytest.mark.parametrize("network", NETWORKS)
def test_analytic_update_equals_autograd(name: str, network: str, weighted: bool) -> None:
    case, settings = CASES[name]
    module = module_of(case, NETWORKS[network], **settings)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.ndim:
            parameter.data.mul_(2.0)
    batch = batch_of(case)
    if case in OFF_POLICY:
        shake_targets(module)
        if weighted:
            batch.weight, batch.discount = torch.rand(ROWS) + 0.1, 0.9 ** torch.randint(1, 4, (ROWS,))
    elif case == "ppo in a box":
        module.policy.head.layers.log_std.data.copy_(torch.tensor([-0.4, 0.3]))
        on_bounds = (batch["action"] == BOX.action.space.low) | (batch["action"] == BOX.action.space.high)
        assert 0.1 < on_bounds.float().mean() < 0.9
        with torch.no_grad():
            batch["action_log_prob"] = module.evaluate(batch)[0] + 0.3 * torch.randn(ROWS)
    update = start_update(module)
    for _ in range(2):  # the second call reuses the arrays
        torch.manual_seed(2)
        written = update(batch)
    analytic, state = gradients(module), torch.get_rng_state()
    torch.manual_seed(2)
    for parameter in module.parameters():
        parameter.grad = None
    computed = module.compute(batch)
    assert torch.equal(state, torch.get_rng_state())
    if case in OFF_POLICY:
        torch.testing.assert_close(written[1], computed[1], rtol=1e-5, atol=1e-5)
        written, computed = written[0], computed[0]
    else:
        assert 0.1 < float(computed["clip_fraction"]) < 0.9
    sum(value for key, value in computed.items() if key.startswith("loss_")).backward()
    expected = {key: float(value.detach()) for key, value in computed.items()}
    assert dict(sorted(written.items())) == pytest.approx(dict(sorted(expected.items())), rel=1e-5, abs=1e-6)
    for grad, expected_grad in zip(analytic, gradients(module), strict=True):
        assert (grad is None) == (expected_grad is None)
        if expected_grad is not None:
            atol = 1e-5 * float(expected_grad.abs().max()) + 1e-8
            torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("rows", [256, 257, 700])
@pytest.mark.parametrize("case", ["ppo", "ppo in a box"])
def test_analytic_update_of_several_blocks_equals_autograd(case: str, rows: int) -> None:
    module = module_of(case, NETWORKS["tanh"], entropy_coeff=0.1)
    batch = mini_batch(case == "ppo in a box", rows)
    with torch.no_grad():
        batch["action_log_prob"] = module.evaluate(batch)[0] + 0.3 * torch.randn(rows)
    update = start_update(module)
    for _ in range(2):  # the second call overwrites the sums of the first
        written = update(batch)
    analytic = gradients(module)
    for parameter in module.parameters():
        parameter.grad = None
    computed = module.compute(batch)
    sum(value for key, value in computed.items() if key.startswith("loss_")).backward()
    expected = {key: float(value.detach()) for key, value in computed.items()}
    assert dict(sorted(written.items())) == pytest.approx(dict(sorted(expected.items())), rel=1e-5, abs=1e-6)
    for grad, expected_grad in zip(analytic, gradients(module), strict=True):
        assert grad is not None
        assert expected_grad is not None
        atol = 1e-5 * float(expected_grad.abs().max()) + 1e-8
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("case", [*OFF_POLICY, "ppo"])
def test_analytic_update_concatenates_entries(case: str) -> None:
    results, parts = [], Composite(left=Unbounded(1), right=Unbounded(3))

    def split(level: TensorDict) -> None:
        level["left"], level["right"] = level["observation"].split([1, 3], -1)

    for observation, keys in ((SPECS[case].observation, ["observation"]), (parts, ["left", "right"])):
        torch.manual_seed(0)
        specs = SimpleNamespace(observation=observation, action=SPECS[case].action)
        module = {**OFF_POLICY, "ppo": PPOModule}[case](NETWORKS["relu"]).build(specs)
        torch.manual_seed(2)
        written = start_update(module)(batch_of(case, split, keys))
        results.append((written if case == "ppo" else written[0], gradients(module)))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
@pytest.mark.parametrize("case", [*OFF_POLICY, "ppo"])
def test_analytic_update_converts_dtypes(case: str, dtype: torch.dtype) -> None:
    """MuJoCo's observations are float64, and flattened images are uint8."""
    results = []
    for read_as in (dtype, torch.float32):
        module = learner(case, NETWORKS["relu"])
        torch.manual_seed(2)

        def convert(level: TensorDict, read_as: torch.dtype = read_as) -> None:
            level["observation"] = (9.0 * level["observation"].abs()).to(dtype).to(read_as)

        assert start_update(module)(batch_of(case, convert)) is not None
        results.append(gradients(module))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("key", [*AUTO_LOSS_MASK_KEYS, REPLAYED])
def test_masked_and_replayed_steps_need_autograd(key: Any) -> None:
    update, batch = start_update(learner("ppo")), mini_batch()
    batch[key] = torch.ones(ROWS, 1, dtype=torch.bool)
    assert update(batch) is None
    assert update(mini_batch().reshape(8, 4)) is None


@pytest.mark.parametrize("key", ["observation", "action_log_prob", "advantage", "value_target"])
def test_missing_entry_needs_autograd(key: str) -> None:
    assert start_update(learner("ppo"))(mini_batch().exclude(key)) is None


def losses_of(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Any]:
    """Return a list that receives the batches of ``losses``, which only autograd calls."""
    batches: list[Any] = []
    terms = type(module).losses

    def computed(self: Any, batch: Any) -> Any:
        batches.append(batch)
        return terms(self, batch)

    monkeypatch.setattr(type(module), "losses", computed)
    return batches


@pytest.mark.parametrize("case", [*OFF_POLICY, "ppo", "ppo in a box"])
def test_analytic_run_equals_autograd_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results, metrics, errors, counts = [], [], [], []
    for callbacks in ([], [ListensToBackward()]):
        module = module_of(case, NETWORKS["relu"], max_grad_norm=0.5)
        data = FakeData(4, specs=BOX) if case == "ppo in a box" else data_of(case, batches=4)
        with monkeypatch.context() as patch:
            losses = losses_of(patch, module)
            torch.manual_seed(5)
            trainer(max_epochs=2, callbacks=callbacks).fit(module, datamodule=data)
        counts.append(len(losses))
        results.append(parameters(module))
        metrics.append(module.last_epoch_metrics)
        errors.append(data.served[-1].get("td_error", torch.zeros(1)))
    assert counts == [0, 8]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*errors, rtol=1e-4, atol=1e-4)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)


class OtherLoss(DQNModule):
    def losses(self, batch: Any) -> Any:
        return super().losses(batch)


class OtherCriticLoss(PPOModule):
    def critic_terms(self, batch: Any, values: Any) -> Any:
        return super().critic_terms(batch, values)


def other_layer() -> Any:
    module = PPOModule(NETWORKS["relu"]).build(BOX)
    module.policy.head.layers.__class__ = type("Other", (GaussianLayer,), {})
    return module


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "loss": lambda: OtherLoss(MLPNetwork([8])),
    "part of a loss": lambda: OtherCriticLoss(MLPNetwork([8])),
    "optimizer": lambda: learner(
        "dqn", optimizer=lambda params: type("OtherSGD", (torch.optim.SGD,), {})(params, lr=1e-2)
    ),
    "values that are clipped": lambda: learner("ppo", clip_value=0.2),
    "a shared trunk": lambda: learner("ppo", MLPNetwork([8], shared=True)),
    "a tanh": lambda: PPOModule(distribution="tanh_normal").build(BOX),
    "another layer of means and deviations": other_layer,
    "another objective": lambda: learner("a2c"),
    "dueling": lambda: learner("dqn", dueling=True),
    "memory": lambda: learner("dqn", "gru"),
    "normalised layers": lambda: SACModule(MLPNetwork([8], "relu", layer_norm=True)).build(BOX),
    "masks of actions, ppo": lambda: PPOModule(MLPNetwork([8])).build(MASKED),
    "masks of actions, dqn": lambda: DQNModule(MLPNetwork([8])).build(MASKED),
    "one-hot actions": lambda: DQNModule(MLPNetwork([8])).build(ONE_HOT),
    "margins": lambda: learner("dqn", margin_coeff=0.1),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_agent_needs_autograd(name: str) -> None:
    module = UNSUPPORTED[name]()
    if not module.is_built:
        module.build(TWO_CHOICES)
    assert start_update(module) is None


RUNS: dict[str, dict[str, Any]] = {
    "callback": {"callbacks": [ListensToBackward()]},
    "precision": {"precision": "bf16-mixed"},
    "anomalies": {"detect_anomaly": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_unsupported_run_uses_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = learner("dqn")
    losses = losses_of(monkeypatch, module)
    trainer(max_epochs=1, **RUNS[name]).fit(module, datamodule=data_of("dqn"))
    assert len(losses) == 3


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda module: module.q_network.head.register_forward_hook(lambda *_: None),
    "gradient's hook": lambda module: module.q_network.head.weight.register_hook(lambda gradient: gradient),
    "layer": lambda module: setattr(module.q_network.trunk.encoder.layers, "1", nn.Sigmoid()),
    "frozen": lambda module: next(module.parameters()).requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_network_changed_in_a_run_uses_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = learner("dqn")
    losses = losses_of(monkeypatch, module)
    data = data_of("dqn", note=lambda module: CHANGES[name](module) if len(data.noted) == 1 else None)
    trainer(max_epochs=1).fit(module, datamodule=data)
    assert len(losses) == 2


def test_second_fit_uses_the_analytic_update(monkeypatch: pytest.MonkeyPatch) -> None:
    module = learner("dqn")
    losses = losses_of(monkeypatch, module)
    for _ in range(2):
        trainer(max_epochs=1).fit(module, datamodule=data_of("dqn"))
        before = parameters(module)
    assert losses == []
    module.to(torch.float64).to(torch.float32)  # moves the parameters
    trainer(max_epochs=1).fit(module, datamodule=data_of("dqn"))
    assert losses == []
    assert not torch.equal(parameters(module), before)
