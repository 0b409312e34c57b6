"""Our Adam and flat parameters compute what torch computes of parameters that are stored apart, and save its states."""

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
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),  # looks at rows and columns
}


def pair(**settings: Any) -> tuple[list[nn.Parameter], list[nn.Parameter], FusedAdam, Adam]:
    ours = [nn.Parameter(torch.randn(shape, generator=generator(0))) for shape in ((5,), (3, 2))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    lean, ordinary = FusedAdam(ours, lr=0.1, eps=1e-5), Adam(theirs, lr=0.1, eps=1e-5, fused=True)
    for each in (lean, ordinary):
        each.param_groups[0].update(settings)
    return ours, theirs, lean, ordinary


def step(parameters: list[nn.Parameter], stepping: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    for number in range(first, first + steps):
        for place, parameter in enumerate(parameters):
            # The second one has no gradient at every third step.
            idle = place == 1 and number % 3 == 1
            noise = torch.randn(parameter.shape, generator=generator(10 * number + place))
            parameter.grad = None if idle else noise
        stepping.step()


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1, "betas": (0.5, 0.9)}, {"maximize": True}, {"amsgrad": True}, {"fused": False}],
)
def test_steps_of_our_adam_equal_torchs_bit_for_bit(settings: dict[str, Any]) -> None:
    ours, theirs, lean, ordinary = pair(**settings)
    for first, rate in ((0, 0.1), (5, 0.01)):
        lean.param_groups[0]["lr"] = ordinary.param_groups[0]["lr"] = rate
        step(ours, lean, first=first)
        step(theirs, ordinary, first=first)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(list(lean.state.values()), list(ordinary.state.values()), rtol=0, atol=0)


def test_states_of_our_adam_and_torchs_are_loaded_by_each_other() -> None:
    ours, theirs, lean, ordinary = pair()
    step(ours, lean)
    ordinary.load_state_dict(copy.deepcopy(lean.state_dict()))
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            other.copy_(mine)
    for first in (5, 10):
        step(ours, lean, first=first)
        step(theirs, ordinary, first=first)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        lean.load_state_dict(copy.deepcopy(ordinary.state_dict()))


def test_closure_computes_the_gradients() -> None:
    (parameter, _), _, lean, _ = pair()

    def loss() -> float:
        value = parameter.square().sum()
        parameter.grad = None
        value.backward()
        return value.item()

    with torch.no_grad():
        values = [lean.step(loss) for _ in range(4)]
    assert values == sorted(set(values), reverse=True)


@pytest.mark.parametrize("register", [None, optimizer.register_optimizer_step_post_hook])
def test_hooks_run_once_a_step(register: Callable[..., Any] | None) -> None:
    ours, theirs, lean, ordinary = pair()
    seen: list[object] = []
    hook = (register or lean.register_step_post_hook)(lambda stepped, *_: seen.append(stepped))
    try:
        step(ours, lean, 3)
    finally:
        hook.remove()
    step(ours, lean, 3, first=3)
    step(theirs, ordinary, 6)
    assert seen == [lean] * 3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_overflow_under_a_scaler_skips_the_step() -> None:
    (parameter, other), _, lean, _ = pair()
    step([parameter, other], lean, 2)
    before = parameter.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.tensor(1.0))
    parameter.grad, other.grad = torch.full((5,), torch.inf), torch.zeros(3, 2)
    scaler.step(lean)
    scaler.update()
    assert torch.equal(parameter, before)
    assert scaler.get_scale() == 2.0
    parameter.grad = torch.ones(5)
    scaler.step(lean)
    assert not torch.equal(parameter, before)


class Own(torch.optim.Adam):
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
def test_learning_equals_that_of_parameters_which_are_stored_apart(name: str) -> None:
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
    assert len(optimizer.state) == (4 if name == "adafactor" else 1)  # the others step one tensor


def test_settings_of_groups_types_and_frozen_parameters_are_kept() -> None:
    model = nn.ModuleDict({"a": network(), "b": network().double(), "c": nn.Linear(2, 2)})
    model["c"].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    steps = []
    for each in (model, twin):
        matrices = [p for p in each.parameters() if p.ndim == 2]
        vectors = [p for p in each.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
        steps.append((each, optimizer, list(each.parameters())))
    optimized = OptimizedParameters(steps[0][1], [list(part.parameters()) for part in model.values()])
    assert float(optimized.clip(1.0)) == 0.0  # without gradients
    for each, optimizer, _ in steps:
        (each["a"](torch.ones(1, 3)).sum() + each["b"](torch.ones(1, 3).double()).sum()).backward()
        if each is model:
            optimized.gather()
        optimizer.step()
    torch.testing.assert_close(steps[0][2], steps[1][2])


def test_part_without_gradients_rests_and_a_parameter_without_one_counts_as_zero() -> None:
    resting, partly, twin = network(), network(), network()
    parts = [list(resting.parameters()), list(partly.parameters())]
    optimizer = torch.optim.AdamW([*parts[0], *parts[1]], lr=0.1, weight_decay=0.5)
    optimized, other = (
        OptimizedParameters(optimizer, parts),
        torch.optim.AdamW(twin.parameters(), 0.1, weight_decay=0.5),
    )
    for last in (3, 1):  # the second step leaves the last layer out
        optimized.clear()
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for model in (partly, twin):
            model[:last](torch.ones(1, 3)).sum().backward()
        optimized.gather()
        optimizer.step()
        other.step()
    torch.testing.assert_close(parts[1], list(twin.parameters()))
    torch.testing.assert_close(parts[0], list(network().parameters()), rtol=0, atol=0)


def test_names_loading_copies_and_files_stay_those_of_the_module() -> None:
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
    # A copy learns by itself, as the original does.
    learn(twin, twin_optimized, twin_optimizer)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)
    learn(model, optimized, optimizer)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=0, atol=0)


def test_parameters_that_were_moved_are_followed() -> None:
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


@pytest.mark.parametrize("case", ["ppo", "td3"])  # TD3's actor rests at every other update; PPO moves all at each
def test_modules_learn_as_with_parameters_that_are_stored_apart(case: str) -> None:
    results = []
    for settings in ({}, {"optimizer": partial(Own, lr=0.01, eps=learner(case).adam_eps)}):
        run = trainer(max_epochs=1, limit_val_batches=0)
        module = learner(case, learning_rate=0.01, max_grad_norm=0.5, **settings)
        run.fit(module, datamodule=data_of(case, 4))
        results.append(module.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5)
