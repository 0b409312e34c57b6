"""Our Adam computes what torch's does, and leaves to it whatever is out of the ordinary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, optimizer

from torchrl_lightning.learn.adam import LeanAdam


def pair(**settings: Any) -> tuple[list[nn.Parameter], list[nn.Parameter], LeanAdam, Adam]:
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5,), (3, 2))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    lean, ordinary = LeanAdam(ours, lr=0.1, eps=1e-5), Adam(theirs, lr=0.1, eps=1e-5, fused=True)
    for each in (lean, ordinary):
        each.param_groups[0].update(settings)
    return ours, theirs, lean, ordinary


def learn(parameters: list[nn.Parameter], stepping: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    for step in range(first, first + steps):
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * step + number)
            # The second one has no gradient at every third step.
            idle = number == 1 and step % 3 == 1
            parameter.grad = None if idle else torch.randn(parameter.shape, generator=generator)
        stepping.step()


def same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.1, "betas": (0.5, 0.9)}, {"maximize": True}, {"amsgrad": True}]
)
def test_steps_equal_torchs_bit_for_bit(settings: dict[str, Any]) -> None:
    ours, theirs, lean, ordinary = pair(**settings)
    learn(ours, lean)
    learn(theirs, ordinary)
    lean.param_groups[0]["lr"] = ordinary.param_groups[0]["lr"] = 0.01
    learn(ours, lean, first=5)
    learn(theirs, ordinary, first=5)
    assert same(ours, theirs)
    for mine, other in zip(lean.state.values(), ordinary.state.values(), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_states_are_torchs() -> None:
    ours, theirs, lean, ordinary = pair()
    learn(ours, lean)
    ordinary.load_state_dict(copy.deepcopy(lean.state_dict()))
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            other.copy_(mine)
    learn(ours, lean, first=5)
    learn(theirs, ordinary, first=5)
    assert same(ours, theirs)
    lean.load_state_dict(copy.deepcopy(ordinary.state_dict()))
    learn(ours, lean, first=10)
    learn(theirs, ordinary, first=10)
    assert same(ours, theirs)


def test_a_closure_computes_the_gradients() -> None:
    (parameter, _), _, lean, _ = pair()

    def loss() -> float:
        value = parameter.square().sum()
        parameter.grad = None
        value.backward()
        return value.item()

    with torch.no_grad():
        values = [lean.step(loss) for _ in range(4)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 4


@pytest.mark.parametrize("register", [None, optimizer.register_optimizer_step_post_hook])
def test_hooks_run_once_a_step(register: Callable[..., Any] | None) -> None:
    ours, theirs, lean, ordinary = pair()
    seen: list[object] = []
    hook = (register or lean.register_step_post_hook)(lambda stepped, *_: seen.append(stepped))
    try:
        learn(ours, lean, 3)
    finally:
        hook.remove()
    assert seen == [lean] * 3
    learn(ours, lean, 3, first=3)
    learn(theirs, ordinary, 6)
    assert seen == [lean] * 3
    assert same(ours, theirs)


def test_an_overflow_under_a_scaler_skips_the_step() -> None:
    (parameter, other), _, lean, _ = pair()
    learn([parameter, other], lean, 2)
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
