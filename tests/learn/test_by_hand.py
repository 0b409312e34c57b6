"""Gradients that are written down are those of autograd, and left to it where anything else takes part."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from kit.fake_data import FakeData
from kit.learners import OFF_POLICY, SPECS, data_of, learner
from kit.runs import parameters, trainer
from kit.specs import BOX, TWO_CHOICES
from kit.transitions import shake_targets, transitions
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.learn import ActorCriticModule, DQNModule, MLPNetwork, PPOModule, by_hand
from torchrl_lightning.learn.action_heads import GaussianLayer
from torchrl_lightning.learn.transitions import read_transitions

NETWORKS = {"relu": MLPNetwork([9, 8], "relu"), "tanh": MLPNetwork([8], "tanh", head_sizes=[6])}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dqn": ("dqn", {"double": False}),
    "double": ("dqn", {"loss_function": "l2"}),
    "sac": ("sac", {"alpha": 0.3}),
    "sac of three critics": ("sac", {"num_critics": 3, "learn_alpha": False, "loss_function": "smooth_l1"}),
    "td3": ("td3", {"target_interval": 1}),
    "td3 that rests": ("td3", {"target_interval": 2, "loss_function": "l1"}),
}


def gradients_of(module: Any) -> dict[nn.Parameter, torch.Tensor]:
    """Return where the gradients of a module's parameters go."""
    module.configure_optimizers()
    return {key: view for group in module._groups.values() for key, view in group.memory().items()}


def batch_of(case: str, rows: int = 32, weighted: bool = False) -> Any:
    torch.manual_seed(1)
    batch = transitions(SPECS[case], rows)
    if weighted:
        batch["priority_weight"] = torch.rand(rows) + 0.1
        batch["steps_to_next_obs"] = torch.randint(1, 4, (rows,))
    return read_transitions(batch, ["observation"], 0.9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_errors_and_random_numbers_are_autograds(name: str, network: str, weighted: bool) -> None:
    case, settings = CASES[name]
    module = learner(case, NETWORKS[network], **settings)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.ndim:
            parameter.data.mul_(2.0)
    shake_targets(module)
    memory = gradients_of(module)
    batch = batch_of(case, weighted=weighted)
    hand = module.by_hand(memory, 32)
    for _ in range(2):  # its memory is used again
        torch.manual_seed(2)
        found, found_error = hand(batch)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    terms, error = module.compute(batch)
    assert torch.equal(state, torch.get_rng_state())
    sum(value for key, value in terms.items() if key.startswith("loss_")).backward()
    expected = {key: float(value.detach()) for key, value in terms.items()}
    assert dict(sorted(found.items())) == pytest.approx(dict(sorted(expected.items())), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found_error, error, rtol=1e-5, atol=1e-5)
    assert {key for key in memory if key.grad is None} == set(hand.resting)
    for parameter, view in memory.items():
        if parameter.grad is not None:
            near = 1e-5 * float(parameter.grad.abs().max())
            torch.testing.assert_close(view, parameter.grad, rtol=1e-5, atol=near + 1e-8)


@pytest.mark.parametrize("case", [*OFF_POLICY, "ppo"])
def test_vectors_of_several_entries_are_read_as_one(case: str) -> None:
    specs, found = SPECS[case], []
    parts = Composite(left=Unbounded(1), right=Unbounded(3))
    for observation, keys in ((specs.observation, ["observation"]), (parts, ["left", "right"])):
        torch.manual_seed(0)
        kind = {**OFF_POLICY, "ppo": PPOModule}[case]
        module = kind(NETWORKS["relu"]).build(SimpleNamespace(observation=observation, action=specs.action))
        memory = gradients_of(module)
        torch.manual_seed(1)
        batch = mini_batch() if case == "ppo" else transitions(specs, 32)
        for level in (batch, batch.get("next", batch)):
            level["left"], level["right"] = level["observation"].split([1, 3], -1)
        read: Any = batch if case == "ppo" else read_transitions(batch, keys, 0.9)
        assert module.rows_by_hand(read) == 32
        told = module.by_hand(memory, 32)(read)
        terms, error = (told, torch.zeros(1)) if case == "ppo" else told
        found.append(([each.clone() for each in memory.values()], error, terms))
    torch.testing.assert_close(*(each[:2] for each in found), rtol=0, atol=0)
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
@pytest.mark.parametrize("case", [*OFF_POLICY, "ppo"])
def test_numbers_of_another_dtype_are_read_as_networks_read_them(case: str, dtype: torch.dtype) -> None:
    """MuJoCo's observations are float64, and images as vectors uint8."""
    found = []
    for read_as in (dtype, torch.float32):
        torch.manual_seed(0)
        module = learner(case, NETWORKS["relu"])
        memory = gradients_of(module)
        torch.manual_seed(1)
        batch = mini_batch() if case == "ppo" else transitions(SPECS[case], 32)
        for level in (batch, batch.get("next", batch)):
            level["observation"] = (9.0 * level["observation"].abs()).to(dtype).to(read_as)
        read: Any = batch if case == "ppo" else read_transitions(batch, ["observation"], 0.9)
        assert module.rows_by_hand(read) == 32
        module.by_hand(memory, 32)(read)
        found.append([each.clone() for each in memory.values()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def mini_batch(rows: int = 32, in_a_box: bool = False) -> TensorDict:
    """Steps of which some policies have moved far away; in a box, some of the actions lie on its bounds."""
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


@pytest.mark.parametrize("settings", [{}, {"entropy_coeff": 0.3, "loss_critic_type": "smooth_l1", "critic_coeff": 2.0}])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("in_a_box", [False, True])
def test_gradients_and_losses_of_ppo_are_autograds(in_a_box: bool, network: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = PPOModule(NETWORKS[network], **settings).build(BOX if in_a_box else TWO_CHOICES)
    for parameter in module.parameters():
        parameter.data.mul_(2.0)
    if in_a_box:
        module.policy.head.layers.log_std.data.copy_(torch.tensor([-0.4, 0.3]))
    memory = gradients_of(module)
    batch = mini_batch(in_a_box=in_a_box)
    if in_a_box:
        on_bounds = (batch["action"] == BOX.action.space.low) | (batch["action"] == BOX.action.space.high)
        assert 0.1 < on_bounds.float().mean() < 0.9
        with torch.no_grad():
            batch["action_log_prob"] = module.evaluate(batch)[0] + 0.3 * torch.randn(32)
    assert module.rows_by_hand(batch) == 32
    hand = module.by_hand(memory, 32)
    found = [hand(batch) for _ in range(2)][-1]  # its memory is used again
    terms = module.compute(batch)
    assert 0.1 < float(terms["clip_fraction"]) < 0.9
    sum(value for key, value in terms.items() if key.startswith("loss_")).backward()
    expected = {key: float(value.detach()) for key, value in terms.items()}
    assert dict(sorted(found.items())) == pytest.approx(dict(sorted(expected.items())), rel=1e-5, abs=1e-6)
    for parameter, view in memory.items():
        near = 1e-5 * float(parameter.grad.abs().max())
        torch.testing.assert_close(view, parameter.grad, rtol=1e-5, atol=near + 1e-8)


@pytest.mark.parametrize("key", [*AUTO_LOSS_MASK_KEYS, REPLAYED])
def test_steps_that_do_not_count_alike_are_left_to_autograd(key: Any) -> None:
    module, batch = learner("ppo"), mini_batch()
    batch[key] = torch.ones(32, 1, dtype=torch.bool)
    assert module.rows_by_hand(batch) is None
    assert module.rows_by_hand(mini_batch().reshape(8, 4)) is None


@pytest.mark.parametrize("key", ["observation", "action_log_prob", "advantage", "value_target"])
def test_steps_without_an_entry_are_left_to_autograd_which_names_it(key: str) -> None:
    assert learner("ppo").rows_by_hand(mini_batch().exclude(key)) is None


def test_another_layer_of_means_and_deviations_is_left_to_autograd() -> None:
    module = PPOModule(NETWORKS["relu"]).build(BOX)
    module.policy.head.layers.__class__ = type("Other", (GaussianLayer,), {})
    memory = gradients_of(module)
    with pytest.raises(ValueError, match="Other is not known"):
        module.by_hand(memory, 32)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of each update whether it was made by hand."""
    made: list[bool] = []
    original = by_hand.UpdatesByHand.__call__

    def call(self: Any, batch: Any) -> Any:
        found = original(self, batch)
        made.append(found is not None)
        return found

    monkeypatch.setattr(by_hand.UpdatesByHand, "__call__", call)
    return made


@pytest.mark.parametrize("case", [*OFF_POLICY, "ppo", "ppo in a box"])
def test_a_run_by_hand_learns_what_a_run_by_autograd_learns(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, metrics, errors = [], [], []
    made = spied(monkeypatch)
    for hand in (True, False):
        if not hand:
            monkeypatch.setattr(by_hand, "_is_ours", lambda module: False)
        if case == "ppo in a box":
            torch.manual_seed(0)
            module, data = PPOModule(NETWORKS["relu"], max_grad_norm=0.5).build(BOX), FakeData(4, specs=BOX)
        else:
            module, data = learner(case, max_grad_norm=0.5), data_of(case, batches=4)
        torch.manual_seed(5)
        trainer(max_epochs=2).fit(module, datamodule=data)
        ends.append(parameters(module))
        metrics.append(module.epoch_metrics)
        errors.append(data.served[-1].get("td_error", torch.zeros(1)))
    assert made == [True] * 8 + [False] * 8
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*errors, rtol=1e-4, atol=1e-4)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)


class Listens(L.Callback):
    def on_after_backward(self, *_: Any) -> None: ...


class Other(DQNModule):
    def terms(self, batch: Any) -> Any:
        return super().terms(batch)


def frozen(module: Any) -> None:
    next(module.parameters()).requires_grad_(False)


LEFT: dict[str, Callable[[], tuple[Any, L.Trainer]]] = {
    "loss": lambda: (Other(MLPNetwork([8])), trainer(max_epochs=1)),
    "callback": lambda: (learner("dqn"), trainer(max_epochs=1, callbacks=[Listens()])),
    "optimizer": lambda: (
        learner("dqn", optimizer=lambda each: type("Own", (torch.optim.SGD,), {})(each, lr=1e-2)),
        trainer(max_epochs=1),
    ),
    "values that are clipped": lambda: (learner("ppo", clip_value=0.2), trainer(max_epochs=1)),
    "a shared trunk": lambda: (learner("ppo", MLPNetwork([8], shared=True)), trainer(max_epochs=1)),
    "a tanh": lambda: (PPOModule(distribution="tanh_normal").build(BOX), trainer(max_epochs=1)),
    "another objective": lambda: (learner("a2c"), trainer(max_epochs=1)),
    "dueling": lambda: (learner("dqn", dueling=True), trainer(max_epochs=1)),
    "memory": lambda: (learner("dqn", "gru"), trainer(max_epochs=1)),
    "precision": lambda: (learner("dqn"), trainer(max_epochs=1, precision="bf16-mixed")),
    "anomalies": lambda: (learner("dqn"), trainer(max_epochs=1, detect_anomaly=True)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_more_is_left_to_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spied(monkeypatch)
    module, run = LEFT[name]()
    in_a_box = FakeData(3, specs=BOX) if name == "a tanh" else None
    run.fit(module, datamodule=in_a_box or data_of("ppo" if isinstance(module, ActorCriticModule) else "dqn"))
    assert made == [False] * 3


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda module: module.q_network.head.register_forward_hook(lambda *_: None),
    "gradient's hook": lambda module: module.q_network.head.weight.register_hook(lambda gradient: gradient),
    "layer": lambda module: setattr(module.q_network.trunk.encoder.layers, "1", nn.Sigmoid()),
    "frozen": frozen,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_network_that_is_changed_in_a_run_is_left_to_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, module = spied(monkeypatch), learner("dqn")
    data = data_of("dqn", note=lambda module: CHANGES[name](module) if made == [True] else None)
    trainer(max_epochs=1).fit(module, datamodule=data)
    assert made == [True, False, False]
