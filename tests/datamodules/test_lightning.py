"""Each callback and setting of Lightning has its effect on our learners, or raises an error before training."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as c
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.tuner import Tuner

from datamodules import lightning_rows as rows
from datamodules.lightning_rows import CALLBACKS, CHECKPOINT, SETTINGS, TUNER, VALUES, Refused, Untried, Works
from kit.processes import PROJECT
from kit.runs import trainer
from kit.supervised import EPOCHS, LEARNERS, STEPS, Run, supervised
from torchrl_lightning.datamodules._run.trainer_checks import check_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*WeightAveraging callback with a model that overrides"),
    pytest.mark.filterwarnings("ignore:.*flops_per_batch"),
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path"),
    pytest.mark.filterwarnings("ignore:.*barebones=True"),
]
GROUPS = {
    "Callbacks": CALLBACKS,
    "Arguments of `ModelCheckpoint`": CHECKPOINT,
    "Settings of `Trainer`": SETTINGS,
    "Methods of `Tuner`": TUNER,
}
PAGE = (PROJECT / "examples" / "guide" / "lightning.md").read_text()
TABLE = {f"{group}-{name}": row for group, part in {**GROUPS, "values": VALUES}.items() for name, row in part.items()}
learners = pytest.mark.parametrize("make", LEARNERS.values(), ids=LEARNERS)


@pytest.fixture(autouse=True)
def torch_switches() -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def test_table_is_complete() -> None:
    def arguments(kind: Any) -> set[str]:
        return {*inspect.signature(kind).parameters}

    assert {*CALLBACKS} == {*c.__all__}
    assert {*CHECKPOINT} == arguments(c.ModelCheckpoint)
    assert {*SETTINGS} == arguments(L.Trainer)
    assert {*TUNER} == {name for name in vars(Tuner) if not name.startswith("_")}


@pytest.mark.parametrize("heading", GROUPS)
def test_page_lists_the_table(heading: str) -> None:
    results = {Works: "works", Refused: "refused", Untried: "untried"}
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = {
        name: result
        for names, result in re.findall(r"^\| (`.*`) \| (\w+) \|", section, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert found == {name: results[type(row)] for name, row in GROUPS[heading].items()}


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if isinstance(row, Works)])
def test_callback_or_setting_has_the_effect_that_it_has_on_a_supervised_module(name: str, tmp_path: Path) -> None:
    effect, settings = TABLE[name]  # type: ignore[misc]
    effects = {}
    for kind, make in {"supervised": supervised, **LEARNERS}.items():
        folder = tmp_path / kind
        folder.mkdir()
        effects[kind] = effect(Run(make, folder, **settings))
    assert all(found == effects["supervised"] for found in effects.values()), effects


@learners
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if isinstance(row, Refused)])
def test_callback_or_setting_is_refused_in_one_line_before_training(name: str, make: Any, tmp_path: Path) -> None:
    says, settings = TABLE[name]  # type: ignore[misc]
    run = Run(make, tmp_path, raises=Exception, **settings)
    assert re.search(says, str(run.error))
    assert "\n" not in str(run.error)
    assert (run.data.frames, run.data.collector, run.watch.weights) == (0, None, [])
    assert (run.folder, run.files) == (tmp_path, [])


def compare(effect: Any, tmp_path: Path, **settings: Any) -> None:
    """Check that an effect is the same for a supervised module and for all learners."""
    expected = effect(Run(supervised, tmp_path / "supervised", **settings))
    for kind, make in LEARNERS.items():
        assert effect(Run(make, tmp_path / kind, **settings)) == expected, kind


def test_time_interval_counts_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(L.Callback):
        seconds = 0

        def on_train_start(self, *_: Any) -> None:
            Clock.seconds = 0

        def on_train_batch_start(self, *_: Any) -> None:
            Clock.seconds += 2

    monkeypatch.setattr("lightning.pytorch.callbacks.model_checkpoint.time.monotonic", lambda: Clock.seconds)
    saver = partial(c.ModelCheckpoint, train_time_interval=timedelta(seconds=5), save_top_k=-1)
    compare(rows.contents, tmp_path, callbacks=lambda folder: [Clock(), saver(folder)])


@pytest.mark.parametrize("settings", [{"every_n_train_steps": 2}, {"train_time_interval": timedelta(0)}])
def test_checkpoint_before_an_evaluation_is_ranked_by_its_score(settings: Any, tmp_path: Path) -> None:
    arguments = {"monitor": "eval/return", "save_top_k": -1, "save_on_train_epoch_end": False, "filename": "{step}"}
    compare(rows.ranks, tmp_path, **rows.saved(**arguments, **settings))


@learners
def test_several_updates_in_a_step_are_one_step(make: Any, tmp_path: Path) -> None:
    module, data = make("auto")
    saver = c.ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), save_top_k=-1)
    run = trainer(tmp_path, callbacks=[saver], max_epochs=EPOCHS, limit_val_batches=0)
    run.fit(module, datamodule=data)
    assert run.global_step == EPOCHS
    assert len(list(tmp_path.glob("*.ckpt"))) == EPOCHS


@pytest.mark.parametrize(
    ("effect", "settings"),
    [
        (rows.length, {"max_steps": 5, "max_epochs": -1}),
        (rows.length, {"min_steps": 6, **rows.of(rows.stop_early)}),
        (rows.contents, rows.saved(every_n_train_steps=3, save_top_k=-1)),
        (rows.length, {"limit_train_batches": 3}),
    ],
)
def test_step_of_several_optimizers_is_one_step(effect: Any, settings: Any, tmp_path: Path) -> None:
    adam = partial(torch.optim.Adam, lr=1e-3)
    optimizers = {"ppo": {"critic_optimizer": adam}, "sac": {"critic_optimizer": adam, "alpha_optimizer": adam}}
    expected = effect(Run(supervised, tmp_path / "supervised", **settings))
    for kind, own in optimizers.items():
        assert effect(Run(partial(LEARNERS[kind], **own), tmp_path / kind, **settings)) == expected, kind


@learners
def test_module_hears_of_cleared_gradients(make: Any, tmp_path: Path) -> None:
    def listen(module: Any, data: Any) -> None:
        module.heard = []
        hook = lambda optimizer: module.heard.append(type(optimizer).__name__)  # noqa: E731
        object.__setattr__(module, "on_before_zero_grad", hook)

    run = Run(make, tmp_path, prepare=listen)
    assert run.module.heard == ["FusedAdam"] * EPOCHS * STEPS


@learners
def test_sanity_check_changes_no_later_score(make: Any, tmp_path: Path) -> None:
    with_check, without = (Run(make, tmp_path, num_sanity_val_steps=number) for number in (2, 0))
    assert with_check.watch.evaluations[0] == (True, 0)
    assert with_check.watch.scores == without.watch.scores
    assert torch.equal(with_check.watch.weights[-1], without.watch.weights[-1])


@learners
@pytest.mark.parametrize("method", ["fit", "validate", "test"])
def test_search_of_the_batch_size_changes_nothing(method: str, make: Any, tmp_path: Path) -> None:
    run = Run(make, tmp_path, use=partial(rows.search_size, method=method), raises=ValueError)
    assert "Tuner.scale_batch_size" in str(run.error)
    assert (run.data.batch_size, run.data.frames, run.watch.evaluations) == (8, 0, [])


@learners
@pytest.mark.parametrize("search", [rows.search_rate, rows.search_size])
def test_trainer_is_usable_after_a_refused_search(search: Any, make: Any, tmp_path: Path) -> None:
    def search_and_fit(run: L.Trainer, module: Any, data: Any) -> None:
        with pytest.raises(ValueError, match="Tuner"):
            search(run, module, data)
        run.fit(module, datamodule=data)

    assert Run(make, tmp_path, use=search_and_fit).length == (EPOCHS, EPOCHS * STEPS, EPOCHS * STEPS)


@learners
def test_throughput_of_several_updates_in_a_step_is_refused(make: Any, tmp_path: Path) -> None:
    monitor = rows.of(partial(c.ThroughputMonitor, len))
    run = Run(partial(make, 2), tmp_path, raises=ValueError, **monitor)
    assert re.search("updates_per_step must be 1 or 'auto' with a ThroughputMonitor, got 2", str(run.error))
    assert run.data.frames == 0


@learners
def test_limits_of_a_second_fit_count_updates(make: Any, tmp_path: Path) -> None:
    module, data = make("auto")
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, limit_train_batches=0.5)
    run.fit(module, datamodule=data)
    assert run.global_step == STEPS // 2


@learners
def test_minimum_beyond_the_frames_is_announced(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, data = make()
    data.total_frames = 44
    trainer(tmp_path, min_epochs=4, max_epochs=6, limit_val_batches=0).fit(module, datamodule=data)
    messages = [record.getMessage() for record in caplog.records]
    assert (
        sum("total_frames=44 may be exceeded, because the trainer has min_epochs=4" in message for message in messages)
        == 1
    )


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
@learners
def test_strategy_that_divides_the_weights_is_refused(make: Any, strategy: Any) -> None:
    (module, data), run = make(), trainer()
    vars(run._accelerator_connector)["strategy"] = strategy()
    with pytest.raises(ValueError, match=f"strategy must be 'auto' or a form of 'ddp', got a {strategy.__name__}"):
        check_trainer(run, module, data)
    vars(run._accelerator_connector)["strategy"] = DDPStrategy()
    check_trainer(run, module, data)


@learners
@pytest.mark.parametrize("fails", [False, True])
def test_callbacks_have_their_own_hooks_after_a_fit(fails: bool, make: Any, tmp_path: Path) -> None:
    def callbacks(folder: Path) -> Any:
        saver = c.ModelCheckpoint(folder, every_n_train_steps=3)
        return [c.LearningRateMonitor(), c.DeviceStatsMonitor(), saver, *([rows.StopAt()] if fails else [])]

    run = Run(make, tmp_path, callbacks=callbacks, raises=RuntimeError)
    assert (run.error is not None) == fails
    assert not any(name.startswith("on_") for callback in run.callbacks for name in vars(callback))


class OwnCheckpoint(c.ModelCheckpoint):
    """Counts its calls in an attribute of the module."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        assert isinstance(pl_module, L.LightningModule)
        pl_module.calls = getattr(pl_module, "calls", 0) + 1  # type: ignore[assignment, operator]
        super().on_train_batch_end(trainer, pl_module, *arguments)


@learners
def test_subclass_of_a_checkpoint_callback_gets_the_module(make: Any, tmp_path: Path) -> None:
    run = Run(make, tmp_path, callbacks=lambda folder: [OwnCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)])
    assert (run.module.calls, len(run.files)) == (EPOCHS * STEPS, EPOCHS * STEPS // 3)


@learners
def test_rates_and_statistics_keep_the_loggers(make: Any, tmp_path: Path) -> None:
    run = Run(make, tmp_path, **rows.of(c.LearningRateMonitor, c.DeviceStatsMonitor))
    assert run.trainer.loggers == [run.logger]
    rows.steps_are_frames(run)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@learners
def test_mixed_precision_is_accepted(make: Any, precision: Any, tmp_path: Path) -> None:
    expected, run = Run(make, tmp_path), Run(make, tmp_path, precision=precision)
    assert torch.equal(expected.watch.weights[-1], run.watch.weights[-1]) == (precision == "32-true")
