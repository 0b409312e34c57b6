"""The LightningModule of model-based agents: fits, early stopping, stored weights, metrics, loading."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.dynamics import model_data
from kit.fake_data import FakeData
from kit.runs import parameters, trainer
from kit.world_models import POINT, FakeDynamics, pushed, targets_of
from torchrl_lightning import MBPOModule, QuadraticReward
from torchrl_lightning.agents import CrossEntropyPlanner, DynamicsEnsemble, OutsideBox, WorldModelFit


def small(**kwargs: Any) -> DynamicsEnsemble:
    torch.manual_seed(0)
    return DynamicsEnsemble([8], **({"learning_rate": 0.01} | kwargs))


def built(**kwargs: Any) -> DynamicsEnsemble:
    return small(**kwargs).build(POINT, num_members=3)


def test_fit_lowers_the_error_and_logs_it_over_frames() -> None:
    module, data = small(learning_rate=0.03), FakeDynamics()
    fit = trainer(max_epochs=1)
    fit.fit(module, datamodule=data)
    first = float(fit.callback_metrics["val/error"])
    assert module.world_model.ensemble.num_members == data.num_members
    fit.fit_loop.max_epochs = 20
    fit.fit(module, datamodule=data)
    assert float(fit.callback_metrics["val/error"]) < 0.5 * first
    assert "step" not in fit.callback_metrics
    epoch = module.last_epoch_metrics
    assert {"train/loss_error", "train/loss_variance", "train/loss_bounds", "train/error"} <= epoch.keys()
    assert all(math.isfinite(value) for value in epoch.values())


def test_members_with_lower_errors_are_stored() -> None:
    module = built(num_elites=2, min_improvement=0.1, patience=2)
    ensemble, model = module.ensemble, module.world_model
    stored_weights = [weight.clone() for weight in model.ensemble.weights]
    ensemble.weights[0].data += 1.0
    module.store_improved(torch.tensor([3.0, 1.0, 2.0]))
    assert torch.equal(model.ensemble.weights[0], ensemble.weights[0])
    assert model.elites.tolist() == [1, 2]
    ensemble.weights[0].data += 1.0
    # The second member improves by less than a tenth, the third does not improve.
    module.store_improved(torch.tensor([0.5, 0.95, 5.0]))
    torch.testing.assert_close(model.ensemble.weights[0][0], stored_weights[0][0] + 2.0)
    torch.testing.assert_close(model.ensemble.weights[0][1:], stored_weights[0][1:] + 1.0)
    assert model.elites.tolist() == [0, 1]
    assert module.best_errors.tolist() == [0.5, 1.0, 2.0]
    assert not module.fit_is_over
    module.store_improved(torch.tensor([0.5, 0.95, 5.0]))
    assert not module.fit_is_over
    module.store_improved(torch.tensor([0.5, 0.95, 5.0]))
    assert module.fit_is_over


def test_diverged_member_is_not_an_elite() -> None:
    module = built(num_elites=2)
    module.store_improved(torch.tensor([math.nan, 1.0, 2.0]))
    assert module.world_model.elites.tolist() == [1, 2]
    assert module.best_errors.tolist() == [math.inf, 1.0, 2.0]


def test_next_fit_starts_from_stored_weights_with_new_scales() -> None:
    module = built()
    stored_weights = parameters(module.world_model.ensemble)
    for weight in module.ensemble.weights:
        weight.data += 1.0
    module.store_improved(torch.full((3,), math.nan))  # stores nothing
    targets = targets_of().fit(pushed(50))
    module.begin_fit(targets)
    assert torch.equal(parameters(module.ensemble), stored_weights)
    torch.testing.assert_close(module.ensemble.input_std.double(), targets.input_scaler.std)
    assert module.best_errors.isinf().all()
    assert not module.fit_is_over
    # The world model keeps its scales until the next validation.
    assert not torch.equal(module.world_model.ensemble.input_std, module.ensemble.input_std)


def test_last_weights_act_without_holdout_rows() -> None:
    module, data = small(), FakeDynamics()
    trainer(limit_val_batches=0).fit(module, datamodule=data)
    assert torch.equal(parameters(module.world_model.ensemble), parameters(module.ensemble))
    assert torch.equal(module.world_model.ensemble.input_std, module.ensemble.input_std)


def module_without_data() -> DynamicsEnsemble:
    """A module as in load_policy: with specs, and without data."""
    module = small()
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(specs=POINT))  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("learns_terminated", [False, True])
def test_loading_without_data_builds_the_networks(tmp_path: Path, learns_terminated: bool) -> None:
    module, data = small(), FakeDynamics(members=4, terminated=learns_terminated)
    fit = trainer(max_epochs=1)
    fit.fit(module, datamodule=data)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    other = module_without_data()
    other.configure_model()
    other.on_load_checkpoint(stored)
    other.load_state_dict(stored["state_dict"])
    assert other.world_model.learns_terminated is learns_terminated
    td = TensorDict({"observation": torch.randn(5, 2)}, [5])
    torch.manual_seed(1)
    expected = module.policy(td.clone())["action"]
    torch.manual_seed(1)
    assert torch.equal(other.policy(td.clone())["action"], expected)


def test_reward_function_cannot_be_loaded(tmp_path: Path) -> None:
    module = small()
    data = FakeDynamics(reward=lambda observation, action, next_observation: -next_observation[:, 0].square())
    fit = trainer(max_epochs=1)
    fit.fit(module, datamodule=data)
    assert module.ensemble.outputs == 2
    fit.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="reward function"):
        module_without_data().on_load_checkpoint(torch.load(tmp_path / "last.ckpt", weights_only=True))


def test_quadratic_reward_is_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    reward = QuadraticReward([2.0, 1.0], [0.5, 0.0], constant=1.0)
    module, data = small(), FakeDynamics(reward=reward)
    fit = trainer(max_epochs=1)
    fit.fit(module, datamodule=data)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    other = module_without_data()
    other.on_load_checkpoint(stored)
    other.load_state_dict(stored["state_dict"])
    assert other.world_model.targets.reward.state == reward.state
    td = TensorDict({"observation": torch.randn(5, 2)}, [5])
    torch.manual_seed(1)
    expected = module.policy(td.clone())["action"]
    torch.manual_seed(1)
    assert torch.equal(other.policy(td.clone())["action"], expected)
    for damaged in ({"weights": [1.0, -1.0]}, {"weight": [1.0]}, 3.0, {"weights": "ab"}):
        stored["dynamics_ensemble"]["reward"] = damaged
        with pytest.raises(ValueError, match=r"weights|reward"):
            module_without_data().on_load_checkpoint(stored)


@pytest.mark.parametrize("learns_terminated", [False, True])
def test_checkpoint_with_other_termination_setting_raises(learns_terminated: bool) -> None:
    module, other = built(), small().build(POINT, targets=targets_of(terminated=True), num_members=3)
    module, other = (other, module) if learns_terminated else (module, other)
    checkpoint: dict[str, Any] = {}
    module.trainer = other.trainer = SimpleNamespace(datamodule=None)  # type: ignore[assignment]
    module.on_save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="learns" if learns_terminated else "does not learn"):
        other.on_load_checkpoint(checkpoint)
    del checkpoint["dynamics_ensemble"]["learns_terminated"]
    with pytest.raises(KeyError, match="learns_terminated"):
        module.on_load_checkpoint(checkpoint)


def test_termination_function_replaces_learnt_terminations() -> None:
    with_function = small(terminated=OutsideBox([-1.0, None], [1.0, None]))
    with_function.build(POINT, num_members=3, targets=targets_of(terminated=True))
    assert with_function.state_dict().keys() == built().state_dict().keys()
    assert not with_function.world_model.learns_terminated


def test_state_dict_contains_each_tensor_once() -> None:
    module = built()
    module.policy  # noqa: B018  # builds it
    pointers = [value.data_ptr() for value in module.state_dict().values()]
    assert len(pointers) == len(set(pointers))


def test_test_batches_log_returns() -> None:
    module, data = small(), FakeDynamics()
    data.test_dataloader = lambda: FakeData.val_dataloader(data)  # type: ignore[method-assign,arg-type]
    metrics = trainer().test(module, datamodule=data, verbose=False)
    assert metrics[0]["eval/return"] == 2.0


def test_other_datamodule_raises() -> None:
    with pytest.raises(RuntimeError, match=r"DynamicsDataModule.*FakeData"):
        trainer().fit(small(), datamodule=FakeData())


def test_more_elites_than_members_raise() -> None:
    with pytest.raises(ValueError, match=r"num_elites.*num_members=3.*4"):
        built(num_elites=4)


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
def test_unusable_setting_raises_before_collection(message: str) -> None:
    model_settings, data_settings, trainer_settings = FITS[message]
    data = model_data(**data_settings)
    with pytest.raises(ValueError, match=message) as error:
        trainer(max_epochs=1, **trainer_settings).fit(
            DynamicsEnsemble([4], planner=TINY, **model_settings), datamodule=data
        )
    assert data.frames == 0
    assert "\n" not in str(error.value)


def test_outside_box_of_another_width_raises_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"3 numbers.* 2 bound"):
        OutsideBox([-1.0, None], [1.0, None])(torch.zeros(4, 3), torch.zeros(4, 1), torch.zeros(4, 3))


def test_deterministic_ensemble_builds_a_world_model() -> None:
    dynamics = WorldModelFit([4], probabilistic=False)
    assert not dynamics.build(POINT).sample
    assert MBPOModule(dynamics=dynamics).build(POINT).world_model is not None
