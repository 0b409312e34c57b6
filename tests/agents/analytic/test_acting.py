"""Compiled acting equals the policy's module, and unsupported policies call their module."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import ExplorationType, set_exploration_type

from kit.specs import BOX, DISCRETE, ONE_HOT, TWO_CHOICES, specs_of
from torchrl_lightning.agents import Actor, DQNModule, MLPNetwork, PPOModule, RecurrentNetwork, SACModule, TD3Module
from torchrl_lightning.agents.networks.exploration import EpsilonGreedyPolicy
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.environments.policy_calls import bound_call

ROWS = 5
HALF_BOX = specs_of(Bounded(torch.tensor([-1.0, -0.3]), torch.tensor([math.inf, 0.5])))
MODULES: dict[str, Callable[[], Any]] = {
    "categorical": lambda: PPOModule().build(DISCRETE),
    "clipped": lambda: PPOModule(MLPNetwork([8], "relu", head_sizes=[6])).build(BOX),
    "half clipped": lambda: PPOModule().build(HALF_BOX),
    "greedy": lambda: DQNModule(MLPNetwork([9, 7], "tanh", head_sizes=[5])).build(DISCRETE),
    "squashed": lambda: SACModule(MLPNetwork([8], "relu", head_sizes=[6])).build(BOX),
    "noisy": lambda: TD3Module(MLPNetwork([8, 8], "relu")).build(BOX),
    "wide categorical": lambda: PPOModule(MLPNetwork([800, 800])).build(DISCRETE),
    "wide clipped": lambda: PPOModule(MLPNetwork([800, 800])).build(BOX),
    "wide greedy": lambda: DQNModule(MLPNetwork([800, 800])).build(DISCRETE),
}
UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "dueling": lambda: DQNModule(dueling=True).build(DISCRETE),
    "one-hot": lambda: DQNModule().build(ONE_HOT),
    "activation": lambda: DQNModule(MLPNetwork([8], "gelu")).build(DISCRETE),
    "distribution": lambda: PPOModule(distribution="tanh_normal").build(BOX),
    "memory": lambda: DQNModule(RecurrentNetwork(hidden_size=4)).build(DISCRETE),
}


def policy_of(name: str) -> Any:
    torch.manual_seed(0)
    policy = {**MODULES, **UNSUPPORTED}[name]().policy
    for parameter in policy.parameters():
        parameter.data.mul_(3.0)
    if name in ("greedy", "noisy"):
        policy.amount.fill_(0.5)
    return policy


def step_for(policy: Any) -> TensorDict:
    entries = {"observation": torch.zeros(ROWS, 4), "is_init": torch.zeros(ROWS, 1, dtype=torch.bool)}
    return TensorDict({**entries, "recurrent_state": torch.zeros(ROWS, 1, 4)}, [ROWS])


def is_compiled(policy: Any, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(type(policy), "compute_step", lambda *_: "the module's")
        return call() != "the module's"


def act_twice(policy: Any, call: Callable[[], Any], step: TensorDict) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """Act by the compiled call and by the module; check that both draw the same number of random numbers."""
    results, states = [], []
    for act in (call, lambda: policy.compute_step(step)):
        torch.manual_seed(7)
        with torch.no_grad():
            results.append({key: value.clone() for key, value in act().items()})
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    return results[0], results[1]


@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("name", MODULES)
def test_compiled_policy_equals_its_module(name: str, mode: ExplorationType, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(name)
    step = step_for(policy)
    call = bound_call(policy, step)
    assert call is not None
    assert is_compiled(policy, call, monkeypatch)
    with set_exploration_type(mode):
        for scale in (0.0, 0.3, 3.0):
            step["observation"].copy_(scale * torch.randn(ROWS, 4))
            compiled, expected = act_twice(policy, call, step)
            assert list(compiled) == list(expected)
            for key, value in expected.items():
                assert compiled[key].dtype == value.dtype
                torch.testing.assert_close(compiled[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1024, 1100])
def test_compiled_policy_of_many_rows_equals_its_module(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PPOModule(MLPNetwork([64, 64])).build(DISCRETE).policy
    step = TensorDict({"observation": torch.zeros(rows, 4)}, [rows])
    call = bound_call(policy, step)
    assert call is not None
    assert is_compiled(policy, call, monkeypatch)
    for _ in range(2):
        step["observation"].normal_()
        for parameter in policy.parameters():  # new values, and new memory
            parameter.data = 1.5 * parameter.data
        compiled, expected = act_twice(policy, call, step)
        assert (compiled["action"] == expected["action"]).float().mean() > 0.999
        torch.testing.assert_close(compiled["action_log_prob"], expected["action_log_prob"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("keys", [["observation"], ["left", "right"]])
@pytest.mark.parametrize("kind", [PPOModule, DQNModule, SACModule, TD3Module])
def test_compiled_policy_reads_several_entries_of_any_dtype(
    kind: Any, keys: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MuJoCo's observations are float64, flattened images are uint8, and goals have their own entries."""
    sizes = dict(zip(keys, ([4] if len(keys) == 1 else [1, 3]), strict=True))
    specs = BOX if kind in (SACModule, TD3Module) else DISCRETE
    torch.manual_seed(0)
    observation_spec = Composite({key: Unbounded(size, dtype=dtype) for key, size in sizes.items()})
    policy = kind(MLPNetwork([8])).build(SimpleNamespace(observation=observation_spec, action=specs.action)).policy
    step = TensorDict({key: torch.zeros(ROWS, size, dtype=dtype) for key, size in sizes.items()}, [ROWS])
    call = bound_call(policy, step)
    assert call is not None
    assert is_compiled(policy, call, monkeypatch)
    for _ in range(2):
        for key in keys:
            step[key].copy_((3.0 * torch.randn(step[key].shape)).abs())
        compiled, expected = act_twice(policy, call, step)
        for key, value in expected.items():
            torch.testing.assert_close(compiled[key], value, rtol=1e-6, atol=1e-6)


def test_uninitialised_memory_selects_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic acting draws no random numbers."""
    empty = torch.empty

    def filled_empty(*shape: int, **options: Any) -> Tensor:
        return empty(*shape, **options).fill_(-7)

    policy = policy_of("greedy")
    step = step_for(policy)
    monkeypatch.setattr(torch, "empty", filled_empty)
    call = bound_call(policy, step)
    monkeypatch.undo()
    assert call is not None
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(call()["action"], policy(step.copy())["action"])


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_policy_is_called_as_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(name)
    call = bound_call(policy, step_for(policy))
    assert call is not None
    assert not is_compiled(policy, call, monkeypatch)


def test_compiled_policy_reads_changed_and_moved_weights() -> None:
    policy = policy_of("greedy")
    step = step_for(policy)
    call = bound_call(policy, step)
    step["observation"].normal_()
    for change in (
        lambda: [parameter.data.mul_(-1.0) for parameter in policy.parameters()],
        lambda: [setattr(parameter, "data", parameter.data * 2.0 + 1.0) for parameter in policy.parameters()],
        lambda: policy.amount.fill_(0.0),
    ):
        change()
        compiled, expected = act_twice(policy, call, step)
        assert torch.equal(compiled["action"], expected["action"])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda network: network.trunk.encoder.layers[0].register_forward_hook(lambda *_: None),
    "layer": lambda network: network.trunk.encoder.layers.__setitem__(1, nn.Sigmoid()),
    "parametrization": lambda network: parametrizations.weight_norm(network.trunk.encoder.layers[0]),
    "bias": lambda network: setattr(network.trunk.encoder.layers[0], "bias", None),
    "shape": lambda network: setattr(network.head, "weight", nn.Parameter(torch.ones(4, 64))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_network_is_called_as_module(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = DQNModule().build(DISCRETE).policy
    call = bound_call(policy, step_for(policy))
    assert call is not None
    CHANGES[change](policy.network)
    assert not is_compiled(policy, call, monkeypatch)


def test_autocast_and_global_hooks_call_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("greedy")
    call = bound_call(policy, step_for(policy))
    assert call is not None
    with torch.autocast("cpu"):
        assert not is_compiled(policy, call, monkeypatch)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_compiled(policy, call, monkeypatch)
    handle.remove()
    assert is_compiled(policy, call, monkeypatch)


def test_overridden_act_is_not_bypassed() -> None:
    class LastAction(EpsilonGreedyPolicy):
        def act(self, entries: list[Tensor], explore: bool) -> Tensor:
            return torch.full((len(entries[0]),), 2)

    policy = LastAction(DQNModule().build(DISCRETE).q_network)
    call = bound_call(policy, step_for(policy))
    assert call is not None
    assert call()["action"].tolist() == [2] * ROWS


def test_overridden_select_action_is_not_bypassed() -> None:
    class LastAction(Actor):
        def select_action(self, *arguments: Any) -> dict[Any, Tensor]:
            outputs = super().select_action(*arguments)
            return {**outputs, "action": torch.full_like(outputs["action"], 2)}

    policy = PPOModule().build(DISCRETE).policy
    policy.__class__ = LastAction
    call = bound_call(policy, step_for(policy))
    assert call is not None
    assert call()["action"].tolist() == [2] * ROWS


@pytest.mark.parametrize("name", ["clipped", "squashed", "noisy"])
def test_nan_observation_gives_nan_action(name: str) -> None:
    policy = policy_of(name)
    step = step_for(policy)
    call = bound_call(policy, step)
    assert call is not None
    step["observation"][1] = math.nan
    with torch.no_grad():
        assert call()["action"].isnan().all(1).tolist() == [False, True, False, False, False]


def test_collector_collects_equal_rollouts_with_and_without_compilation() -> None:
    torch.manual_seed(0)
    policy = PPOModule().build(TWO_CHOICES).policy
    batches = []
    for _ in range(2):
        collector = GymnasiumCollector("CartPole-v1", policy, num_envs=3, frames_per_batch=30, seed=3)
        batches.append(collector.rollout())
        collector.shutdown()
        policy.trunk.encoder.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(dict(batches[0].flatten_keys()), dict(batches[1].flatten_keys()), rtol=1e-6, atol=1e-6)
