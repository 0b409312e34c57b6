"""FusedAdam and flat parameters equal torch's Adam on separate parameters, and store the same states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, optimizer

from kit.files import through_file
from kit.learners import data_of, learner
from kit.runs import trainer
from kit.seeds import generator
from torchrl_lightning.agents.analytic import FusedAdam, OptimizedParameters, unflattenable_parameters

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),  # not elementwise
}


def pair(**settings: Any) -> tuple[list[nn.Parameter], list[nn.Parameter], FusedAdam, Adam]:
    parameters = [nn.Parameter(torch.randn(shape, generator=generator(0))) for shape in ((5,), (3, 2))]
    expected = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    fused, reference = FusedAdam(parameters, lr=0.1, eps=1e-5), Adam(expected, lr=0.1, eps=1e-5, fused=True)
    for adam in (fused, reference):
        adam.param_groups[0].update(settings)
    return parameters, expected, fused, reference


def step(parameters: list[nn.Parameter], stepping: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    for number in range(first, first + steps):
        for index, parameter in enumerate(parameters):
            # The second parameter has no gradient at every third step.
            is_idle = index == 1 and number % 3 == 1
            noise = torch.randn(parameter.shape, generator=generator(10 * number + index))
            parameter.grad = None if is_idle else noise
        stepping.step()


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1, "betas": (0.5, 0.9)}, {"maximize": True}, {"amsgrad": True}, {"fused": False}],
)
def test_fused_adam_steps_equal_torch_bit_for_bit(settings: dict[str, Any]) -> None:
    parameters, expected, fused, reference = pair(**settings)
    for first, rate in ((0, 0.1), (5, 0.01)):
        fused.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = rate
        step(parameters, fused, first=first)
        step(expected, reference, first=first)
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
    torch.testing.assert_close(list(fused.state.values()), list(reference.state.values()), rtol=0, atol=0)


def test_fused_adam_and_torch_load_each_others_state() -> None:
    parameters, expected, fused, reference = pair()
    step(parameters, fused)
    reference.load_state_dict(copy.deepcopy(fused.state_dict()))
    with torch.no_grad():
        for parameter, other in zip(parameters, expected, strict=True):
            other.copy_(parameter)
    for first in (5, 10):
        step(parameters, fused, first=first)
        step(expected, reference, first=first)
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
        fused.load_state_dict(copy.deepcopy(reference.state_dict()))


def test_closure_computes_the_gradients() -> None:
    (parameter, _), _, fused, _ = pair()

    def loss() -> float:
        value = parameter.square().sum()
        parameter.grad = None
        value.backward()
        return value.item()

    with torch.no_grad():
        values = [fused.step(loss) for _ in range(4)]
    assert values == sorted(set(values), reverse=True)


@pytest.mark.parametrize("register", [None, optimizer.register_optimizer_step_post_hook])
def test_hooks_run_once_a_step(register: Callable[..., Any] | None) -> None:
    parameters, expected, fused, reference = pair()
    calls: list[object] = []
    hook = (register or fused.register_step_post_hook)(lambda stepped, *_: calls.append(stepped))
    try:
        step(parameters, fused, 3)
    finally:
        hook.remove()
    step(parameters, fused, 3, first=3)
    step(expected, reference, 6)
    assert calls == [fused] * 3
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)


def test_overflow_under_a_scaler_skips_the_step() -> None:
    (parameter, other), _, fused, _ = pair()
    step([parameter, other], fused, 2)
    before = parameter.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.tensor(1.0))
    parameter.grad, other.grad = torch.full((5,), torch.inf), torch.zeros(3, 2)
    scaler.step(fused)
    scaler.update()
    assert torch.equal(parameter, before)
    assert scaler.get_scale() == 2.0
    parameter.grad = torch.ones(5)
    scaler.step(fused)
    assert not torch.equal(parameter, before)


class AdamSubclass(torch.optim.Adam):
    """A subclass may do anything with its parameters."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def optimize(model: nn.Module, factory: Any) -> tuple[OptimizedParameters, torch.optim.Optimizer]:
    optimizer = factory(model.parameters())
    return OptimizedParameters(optimizer, [list(model.parameters())], unflattenable_parameters(model)), optimizer


def learn(model: nn.Module, optimized: OptimizedParameters, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for number in range(steps):
        optimized.clear()
        model(torch.randn(8, 3, generator=generator(number))).square().mean().backward()
        optimized.gather()
        optimized.clip(0.1)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flat_parameters_learn_like_separate_ones(name: str) -> None:
    model, twin = network(), network()
    optimized, optimizer = optimize(model, OPTIMIZERS[name])
    other = OPTIMIZERS[name](twin.parameters())
    for number in range(4):
        x = torch.randn(8, 3, generator=generator(number))
        optimized.clear()
        model(x).square().mean().backward()
        optimized.gather()
        norm = optimized.clip(0.1)
        optimizer.step()
        other.zero_grad()
        twin(x).square().mean().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        other.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-6)
    assert len(optimizer.state) == (4 if name == "adafactor" else 1)  # elementwise optimizers step one tensor


def test_flat_parameters_keep_group_settings_and_dtypes() -> None:
    model = nn.ModuleDict({"a": network(), "b": network().double(), "c": nn.Linear(2, 2)})
    model["c"].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    steps = []
    for networks in (model, twin):
        matrices = [p for p in networks.parameters() if p.ndim == 2]
        vectors = [p for p in networks.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
        steps.append((networks, optimizer, list(networks.parameters())))
    optimized = OptimizedParameters(steps[0][1], [list(part.parameters()) for part in model.values()])
    assert float(optimized.clip(1.0)) == 0.0  # without gradients
    for networks, optimizer, _ in steps:
        (networks["a"](torch.ones(1, 3)).sum() + networks["b"](torch.ones(1, 3).double()).sum()).backward()
        if networks is model:
            optimized.gather()
        optimizer.step()
    torch.testing.assert_close(steps[0][2], steps[1][2])


def test_part_without_gradients_is_not_stepped() -> None:
    idle, partial_model, twin = network(), network(), network()
    parts = [list(idle.parameters()), list(partial_model.parameters())]
    optimizer = torch.optim.AdamW([*parts[0], *parts[1]], lr=0.1, weight_decay=0.5)
    optimized, other = (
        OptimizedParameters(optimizer, parts),
        torch.optim.AdamW(twin.parameters(), 0.1, weight_decay=0.5),
    )
    for last in (3, 1):  # the second step leaves the last layer out
        optimized.clear()
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for model in (partial_model, twin):
            model[:last](torch.ones(1, 3)).sum().backward()
        optimized.gather()
        optimizer.step()
        other.step()
    torch.testing.assert_close(parts[1], list(twin.parameters()))
    torch.testing.assert_close(parts[0], list(network().parameters()), rtol=0, atol=0)


def test_flat_parameters_keep_names_loading_and_copies() -> None:
    model = network()
    names = list(model.state_dict())
    optimized, optimizer = optimize(model, OPTIMIZERS["adam"])
    assert list(model.state_dict()) == names
    other = copy.deepcopy(model)
    learn(model, optimized, optimizer)
    assert not torch.equal(model[0].weight, other[0].weight)
    model.load_state_dict(other.state_dict(), strict=True)
    twin, twin_optimized, twin_optimizer = copy.deepcopy((model, optimized, optimizer))
    assert torch.equal(through_file(twin.state_dict())["2.bias"], model[2].bias)
    # A copy learns independently of the original.
    learn(twin, twin_optimized, twin_optimizer)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)
    learn(model, optimized, optimizer)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=0, atol=0)


def test_moved_parameters_are_flattened_again() -> None:
    results = []
    for moves in (True, False):
        model = network()
        optimized, optimizer = optimize(model, OPTIMIZERS["sgd"])
        learn(model, optimized, optimizer, 2)
        if moves:
            model.to(torch.float64).to(torch.float32)
        learn(model, optimized, optimizer, 2)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case", ["ppo", "td3"]
)  # TD3's actor is idle at every other update; PPO updates all parameters
def test_modules_learn_the_same_with_flat_parameters(case: str) -> None:
    results = []
    for settings in ({}, {"optimizer": partial(AdamSubclass, lr=0.01, eps=learner(case).adam_eps)}):
        run = trainer(max_epochs=1, limit_val_batches=0)
        module = learner(case, learning_rate=0.01, max_grad_norm=0.5, **settings)
        run.fit(module, datamodule=data_of(case, 4))
        results.append(module.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5)
