"""Several optimizers with one gradient scaler clip and step as without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from kit.fake_data import FakeReplay, Loader
from kit.learners import data_of, learner
from kit.runs import trainer
from kit.specs import BOX
from torchrl_lightning import UpdateBatches

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.01, fused=True)


class Scaling(MixedPrecision):
    """A gradient scaler in single precision; its scale must not change updates."""

    def autocast_context_manager(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def fit(case: str, scaler: torch.amp.GradScaler | None, data: Any = None, **options: Any) -> Any:
    module = learner(case, **options)
    plugins = [] if scaler is None else [Scaling("16-mixed", "cpu", scaler)]
    trainer(max_epochs=1, limit_val_batches=0, plugins=plugins).fit(module, datamodule=data or data_of(case))
    return module


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("ppo", {"optimizer": SGD, "max_grad_norm": 0.05}),
        ("ppo", {"optimizer": ADAM, "critic_optimizer": SGD, "max_grad_norm": 0.05}),
        ("ppo", {"optimizer": ADAM, "critic_optimizer": SGD, "max_grad_norm": None}),
        ("sac", {"optimizer": SGD, "critic_optimizer": SGD, "alpha_optimizer": SGD, "max_grad_norm": 0.5}),
        ("td3", {"optimizer": SGD, "critic_optimizer": SGD, "max_grad_norm": 0.5}),
        ("td3", {"optimizer": ADAM, "critic_optimizer": ADAM}),
    ],
)
def test_gradient_scaler_does_not_change_updates(case: str, options: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    scaled, plain = fit(case, scaler, **options), fit(case, None, **options)
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # One update of the scale for each of the three updates, for any number of optimizers.
    assert scaler.get_scale() == 2.0**13
    assert scaled.trainer.global_step == plain.trainer.global_step


class OneStep(FakeReplay):
    """All batches of an epoch as the updates of one step."""

    def train_dataloader(self) -> Any:
        return Loader(1, lambda: iter([UpdateBatches(self.epoch())]))


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)])
def test_later_updates_of_a_step_equal_separate_steps(scaler: torch.amp.GradScaler | None) -> None:
    options = {"optimizer": SGD, "alpha_optimizer": SGD, "max_grad_norm": 0.5}
    modules = [fit("sac", None, **options), fit("sac", scaler, OneStep(specs=BOX), **options)]
    assert [module.updates for module in modules] == [3, 3]
    assert [module.trainer.global_step for module in modules] == [3, 1]  # with two optimizers
    assert scaler is None or scaler.get_scale() == 2.0**13
    for a, b in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_overflow_skips_the_update_once() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=float(torch.finfo(torch.float32).max), backoff_factor=2.0**-4)
    module = fit("sac", scaler, optimizer=SGD, critic_optimizer=SGD, max_grad_norm=0.5)
    assert scaler.get_scale() < 2.0**125
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_optimizers_report_their_own_gradient_norms() -> None:
    expected = {"train/grad_norm", "train/alpha_grad_norm"}
    for settings, names in (({}, expected), ({"critic_optimizer": SGD}, {*expected, "train/critic_grad_norm"})):
        module = fit("sac", None, alpha_optimizer=SGD, max_grad_norm=0.5, **settings)
        assert {name for name in module.last_epoch_metrics if name.endswith("grad_norm")} == names
