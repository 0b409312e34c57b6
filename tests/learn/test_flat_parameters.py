"""Parameters in one tensor learn as those that lie apart, whatever the optimizer and wherever they go."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from kit.files import through_file
from kit.learners import data_of, learner
from kit.runs import trainer
from kit.seeds import generator
from torchrl_lightning.learn.flat_parameters import OptimizedParameters, settled_parameters

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),  # looks at rows and columns
}


class Own(torch.optim.Adam):
    """What a subclass does with its parameters is its own affair."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def optimize(model: nn.Module, factory: Any) -> tuple[OptimizedParameters, torch.optim.Optimizer]:
    optimizer = factory(model.parameters())
    return OptimizedParameters(optimizer, [list(model.parameters())], settled_parameters(model)), optimizer


def learn(model: nn.Module, optimized: OptimizedParameters, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        optimized.clear()
        x = torch.randn(8, 3, generator=generator(step))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimized.gather()
        optimized.clip(0.1)
        optimizer.step()


def sizes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[parameter.numel() for parameter in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learning_equals_that_of_parameters_which_lie_apart(name: str) -> None:
    model, twin = network(), network()
    optimized, optimizer = optimize(model, OPTIMIZERS[name])
    assert sizes(optimizer) == ([[12, 4, 8, 2]] if name == "adafactor" else [[26]])
    other = OPTIMIZERS[name](twin.parameters())
    for step in range(4):
        x = torch.randn(8, 3, generator=generator(step))
        optimized.clear()
        model(x).square().mean().backward()
        optimized.gather()
        norm = optimized.clip(0.1)
        optimizer.step()
        other.zero_grad()
        twin(x).square().mean().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        other.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_groups_parts_and_types_lie_apart_and_what_cannot_lie_flat_stays() -> None:
    model = nn.ModuleDict({"a": network(), "b": network().double(), "c": nn.Linear(2, 2)})
    frozen = model["c"].weight.requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    parts = [list(part.parameters()) for part in model.values()]
    optimized = OptimizedParameters(optimizer, parts)
    assert sizes(optimizer) == [[20, 20, 4], [6, 6, 2]]
    assert optimizer.param_groups[0]["params"][2] is frozen
    own = Own(model["a"].parameters(), lr=0.1)
    OptimizedParameters(own, [])
    assert own.param_groups[0]["params"] == list(model["a"].parameters())
    optimized.gather()
    assert not any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    assert float(optimized.clip(1.0)) == 0.0


def test_a_part_without_gradients_rests_and_a_parameter_without_one_counts_as_zero() -> None:
    resting, partly = network(), network()
    parts = [list(resting.parameters()), list(partly.parameters())]
    optimizer = torch.optim.AdamW([*parts[0], *parts[1]], lr=0.1, weight_decay=0.5)
    optimized = OptimizedParameters(optimizer, parts)
    before = copy.deepcopy(resting)
    for used in (partly, partly[0]):  # the second leaves the last layer out
        optimized.clear()
        used(torch.ones(1, 3)).sum().backward()
        optimized.gather()
        optimizer.step()
    assert len(optimizer.state) == 1
    assert optimizer.param_groups[0]["params"][1].grad[16:].eq(0).all()
    assert all(torch.equal(a, b) for a, b in zip(resting.parameters(), before.parameters(), strict=True))


def test_names_loading_copies_and_pickles_stay_those_of_the_module() -> None:
    model = network()
    names = list(model.state_dict())
    optimized, optimizer = optimize(model, OPTIMIZERS["adam"])
    assert list(model.state_dict()) == names
    other = copy.deepcopy(model)
    learn(model, optimized, optimizer)
    assert not torch.equal(model[0].weight, other[0].weight)
    model.load_state_dict(other.state_dict(), strict=True)
    flat = optimizer.param_groups[0]["params"][0]
    assert torch.equal(flat, nn.utils.parameters_to_vector(other.parameters()))
    twin, twin_optimized = copy.deepcopy((model, optimized))
    assert torch.equal(through_file(twin.state_dict())["2.bias"], model[2].bias)
    # A copy gathers from its own parameters.
    twin_optimized.clear()
    twin(torch.ones(1, 3)).sum().backward()
    twin_optimized.gather()
    assert float(twin_optimized.clip(math.inf)) > 0
    assert all(parameter.grad is None for parameter in other.parameters())


def test_parameters_that_were_moved_are_followed() -> None:
    model, twin = network(), network()
    for net in (model, twin):
        optimized, optimizer = optimize(net, OPTIMIZERS["sgd"])
        learn(net, optimized, optimizer, 2)
        if net is model:
            net.to(torch.float64).to(torch.float32)
        learn(net, optimized, optimizer, 2)
        flat = optimizer.param_groups[0]["params"][0]
        assert torch.equal(flat, nn.utils.parameters_to_vector(net.parameters()))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


# TD3's actor rests at every other update; PPO moves all at each.
@pytest.mark.parametrize(("case", "parts"), [("ppo", 1), ("td3", 2)])
def test_modules_learn_as_with_parameters_that_lie_apart(
    case: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for flat in (True, False):
        settings = {} if flat else {"optimizer": partial(Own, lr=0.01, eps=learner(case).adam_eps)}
        run = trainer(max_epochs=1, limit_val_batches=0)
        module = learner(case, learning_rate=0.01, max_grad_norm=0.5, **settings)
        run.fit(module, datamodule=data_of(case, 4))
        assert (len(run.optimizers[0].param_groups[0]["params"]) == parts) == flat
        results.append(module.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5)
