"""Settings of world models and planners that can have no effect, or cannot work, are refused in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kit.dynamics import model_data
from kit.runs import trainer
from kit.world_models import POINT, targets_of
from torchrl_lightning import DynamicsTargets, GaussianEnsemble, MBPOModule, OutsideBox, WorldModel
from torchrl_lightning.learn import CrossEntropyPlanner, DynamicsEnsemble, RandomShootingPlanner, WorldModelFit
from torchrl_lightning.learn.world_env import WorldModelEnvironment

MEAN = {"probabilistic": False}
ONE = {"num_members": 1, "num_elites": 1}
BOX = OutsideBox([-1.0, None], [1.0, None])


def model(members: int = 3, probabilistic: bool = True, **settings: Any) -> WorldModel:
    return WorldModel(GaussianEnsemble(members, 3, 3, [4], probabilistic=probabilistic), targets_of(), **settings)


def ensemble(members: int = 3, **settings: Any) -> DynamicsEnsemble:
    return DynamicsEnsemble([4], **settings).build(POINT, num_members=members)


def fitted(**settings: Any) -> WorldModel:
    return WorldModelFit([4], **settings).build(POINT)


def planner(kind: Any, members: int = 3, world: Any = None, **settings: Any) -> Any:
    return kind(WorldModelEnvironment(model(members, **(world or {}))), **settings)


shooting, cem = partial(planner, RandomShootingPlanner), partial(planner, CrossEntropyPlanner)
REFUSED: list[tuple[str, str, Callable[..., Any], dict[str, Any]]] = [
    ("sample", "probabilistic", DynamicsEnsemble, {**MEAN, "sample": True}),
    ("sample", "probabilistic", model, {**MEAN, "sample": True}),
    ("activation", "hidden_sizes", DynamicsEnsemble, {"hidden_sizes": [], "activation": "tanh"}),
    ("activation", "hidden_sizes", WorldModelFit, {"hidden_sizes": [], "activation": "tanh"}),
    ("propagation", "elite", model, {"members": 1, "propagation": "trajectory"}),
    ("propagation", "elite", model, {"num_elites": 1, "propagation": "trajectory"}),
    ("propagation", "elite", ensemble, {"members": 1, "propagation": "trajectory"}),
    ("propagation", "elite", ensemble, {"num_elites": 1, "propagation": "trajectory"}),
    ("propagation", "elite", WorldModelFit, {**ONE, "propagation": "trajectory"}),
    ("propagation", "elite", WorldModelFit, {"num_elites": 1, "propagation": "trajectory"}),
    ("patience", "max_epochs", WorldModelFit, {"max_epochs": 1, "patience": 2}),
    ("min_improvement", "max_epochs", WorldModelFit, {"max_epochs": 1, "min_improvement": 0.5}),
    ("reward_key", "reward", DynamicsTargets, {"reward": print, "reward_key": "gain"}),
    ("warm_start", "horizon", cem, {"warm_start": True, "horizon": 1}),
    ("particles", "elite", cem, {"members": 1, "particles": 3}),
    ("particles", "elite", shooting, {"members": 1, "particles": 3}),
    ("particles", "elite", shooting, {"world": {"num_elites": 1}, "particles": 3}),
    ("particles", "candidates", shooting, {"particles": 3, "candidates": 1}),
    ("horizon", "candidates", shooting, {"horizon": 3, "candidates": 1}),
]


def made(make: Callable[..., Any], settings: dict[str, Any]) -> Any:
    specs = (POINT.observation, POINT.action) if make is DynamicsTargets else ()
    return make(*specs, **settings)


@pytest.mark.parametrize(("name", "needs", "make", "settings"), REFUSED)
def test_a_setting_without_effect_is_refused(
    name: str, needs: str, make: Callable[..., Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}.*{needs}") as refusal:
        made(make, settings)
    assert "\n" not in str(refusal.value)


WRONG: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    ("num_elites must be at most num_members=3, got 4", model, {"num_elites": 4}),
    ("num_elites must be a positive integer, got 0", model, {"num_elites": 0}),
    ("initial_std must be a finite number, got inf", cem, {"initial_std": math.inf}),
    ("learning_rate must be a finite number, got inf", WorldModelFit, {"learning_rate": math.inf}),
    ("observation_keys must name at least one", DynamicsTargets, {"observation_keys": []}),
    ("observation_keys must name each .* once", DynamicsTargets, {"observation_keys": ["observation"] * 2}),
    ("low and high must hold at least one bound", OutsideBox, {"low": [], "high": []}),
    ("low and high must hold at least one bound", OutsideBox, {"low": [None, None], "high": [None, None]}),
    ("low and high must hold at least one bound", OutsideBox, {"low": [-math.inf], "high": [math.inf]}),
    (r"low must be at most high, got 1.0 and -1.0", OutsideBox, {"low": [0.0, 1.0], "high": [None, -1.0]}),
    (r"low must be at most high, got nan and 1.0", OutsideBox, {"low": [math.nan], "high": [1.0]}),
    ("terminated must .*2 numbers.* 1 bound", fitted, {"terminated": OutsideBox([0.0], [1.0])}),
    ("terminated must .*2 numbers.* 3 bound", ensemble, {"terminated": OutsideBox([0.0] * 3, [1.0] * 3)}),
    ("terminated must return a tensor of one", fitted, {"terminated": lambda o, a, n: (n > 0).any()}),
    ("terminated must return a tensor of one", ensemble, {"terminated": lambda o, a, n: n > 0}),
    ("terminated must return a tensor of one", ensemble, {"terminated": lambda o, a, n: False}),
    ("terminated must return .*IndexError", ensemble, {"terminated": lambda o, a, n: n[:, 7] > 0}),
]


@pytest.mark.parametrize(("message", "make", "settings"), WRONG)
def test_a_setting_that_cannot_work_is_refused(
    message: str, make: Callable[..., Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        made(make, settings)
    assert "\n" not in str(refusal.value)


TAKEN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (DynamicsEnsemble, {**MEAN, "sample": False}),
    (fitted, MEAN),
    (fitted, {**MEAN, "sample": False}),
    (fitted, {**ONE, "propagation": "step"}),
    (ensemble, {"members": 1, "propagation": "step"}),
    (ensemble, {"num_elites": 2, "propagation": "trajectory"}),
    (ensemble, {"num_elites": 3}),
    (WorldModelFit, {"max_epochs": 1}),
    (WorldModelFit, {"max_epochs": 2, "patience": 1, "min_improvement": 0.0}),
    (WorldModelFit, {"hidden_sizes": []}),
    (DynamicsTargets, {"reward": print}),
    (DynamicsTargets, {"reward_key": "gain"}),
    (cem, {"horizon": 1, "candidates": 2, "elites": 2, "iterations": 1}),
    (cem, {"horizon": 2, "warm_start": True, "noise": 0.0}),
    (cem, {"members": 1, "world": {"sample": True}, "particles": 3}),
    (shooting, {"candidates": 1}),
    (shooting, {"members": 1, "particles": 1}),
    (shooting, {"particles": 3}),
    (ensemble, {"terminated": BOX}),
    (ensemble, {"terminated": OutsideBox([0.7, 0.0], [0.7, 0.0])}),
    (fitted, {"terminated": lambda o, a, n: n[:, :1] > 0}),
    (fitted, {"terminated": lambda o, a, n: n[:, 0]}),
]


@pytest.mark.parametrize(("make", "settings"), TAKEN)
def test_a_setting_with_an_effect_is_taken(make: Callable[..., Any], settings: dict[str, Any]) -> None:
    assert made(make, settings) is not None


TINY = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=1)
INSIDE = OutsideBox([-2.0, None, None], [2.0, None, None])
FITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "reward must return a tensor of one .* 1.0": ({}, {"reward": lambda o, a, n: 1.0}, {}),
    "reward must return a tensor of one": ({}, {"reward": lambda o, a, n: o}, {}),
    "reward must return .*division by zero": ({}, {"reward": lambda o, a, n: 1 / 0 if len(o) else n}, {}),
    "terminated must .*3 numbers.* 1 bound": ({"terminated": OutsideBox([0.0], [1.0])}, {}, {}),
    "data.terminated must be left at its default": ({"terminated": INSIDE}, {"terminated": True}, {}),
    "patience must be left at its default .*limit_val_batches": ({"patience": 2}, {}, {"limit_val_batches": 0}),
    "min_improvement must be left at its default .*limit_val_batches": (
        {"min_improvement": 0.5},
        {},
        {"limit_val_batches": 0},
    ),
    "observation_keys must name at least one": ({}, {"observation_keys": []}, {}),
}


@pytest.mark.parametrize("message", FITS)
def test_a_fit_that_cannot_use_a_setting_collects_nothing(message: str) -> None:
    of_model, of_data, of_trainer = FITS[message]
    data = model_data(**of_data)
    with pytest.raises(ValueError, match=message) as refusal:
        trainer(max_epochs=1, **of_trainer).fit(DynamicsEnsemble([4], planner=TINY, **of_model), datamodule=data)
    assert data.frames == 0
    assert "\n" not in str(refusal.value)


def test_a_box_of_another_width_is_refused_when_it_is_asked() -> None:
    with pytest.raises(ValueError, match=r"3 numbers.* 2 bound"):
        BOX(torch.zeros(4, 3), torch.zeros(4, 1), torch.zeros(4, 3))


def test_a_planner_of_means_over_an_ensemble_of_means_runs() -> None:
    world = fitted(**MEAN)
    assert not world.sample
    assert MBPOModule(dynamics=WorldModelFit([4], **MEAN)).build(POINT).world_model is not None
