"""A resumed run makes the evaluation that was due when its checkpoint was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from kit.actor_critic import rollouts
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import parameters, trainer
from torchrl_lightning import BestCheckpoint, LastCheckpoint
from torchrl_lightning.agents import DynamicsEnsemble, MLPNetwork, PPOModule

# A resumed run writes into the folder of the interrupted run.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


class Evaluations(Callback):
    """Record epoch, step and score of each evaluation of a fit."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        score = float(trainer.callback_metrics["eval/return"])
        self.seen.append((trainer.current_epoch, trainer.global_step, score))


class StopAt(Callback):
    """Stop the run at the ``count``-th call of a hook; first save a checkpoint if ``path`` is not None."""

    def __init__(self, hook: str, count: int, path: Path | None) -> None:
        self.left, self.path = count, path
        setattr(self, hook, self.stop)

    def stop(self, trainer: L.Trainer, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            if self.path is not None:
                trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def ppo() -> tuple[Any, Any]:
    torch.manual_seed(0)
    data = rollouts(total_frames=64 * 4, reset_at_each_batch=True, num_epochs=1, updates_per_step=1)
    return PPOModule(MLPNetwork([8]), learning_rate=0.01), data


def deep_q() -> tuple[Any, Any]:
    sizes = {"updates_per_epoch": 2, "frames_per_batch": 4, "frames_per_update": 4, "updates_per_step": 1}
    return dqn(), replay_data(total_frames=40 + 4 * 8, reset_at_each_batch=True, **sizes)


STREAMS = {"ppo": ppo, "dqn": deep_q}
SCHEDULES: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "every other epoch": {"check_val_every_n_epoch": 2},
    "each step": {"val_check_interval": 1},
    "every third step": {"val_check_interval": 3, "check_val_every_n_epoch": None},
}
HOOKS = ("on_train_batch_end", "on_validation_start", "on_validation_batch_start", "on_validation_batch_end")
STEPS = 8


def run(folder: Path, make: Any, schedule: dict[str, Any], *more: Callback, ckpt_path: Any = None) -> Any:
    """Fit; return the evaluations, the best score, the weights and the progress; a stopped fit returns evaluations."""
    module, data = make()
    evaluations, best = Evaluations(), BestCheckpoint(folder, "best", monitor="eval/return", mode="max")
    made = trainer(folder, max_epochs=4, callbacks=[evaluations, *more, best], **schedule)
    try:
        made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    except SystemExit:
        return evaluations.seen
    reached = made.current_epoch, made.global_step
    return evaluations.seen, float(best.best_model_score or 0.0), parameters(module), reached


def check_same(folder: Path, make: Any, schedule: dict[str, Any], before: Any, path: Path, whole: Any) -> None:
    seen, score, weights, reached = run(folder, make, schedule, ckpt_path=path)
    assert (before + seen, score, reached) == (whole[0], whole[1], whole[3])
    assert torch.equal(weights, whole[2])


class SaveAtEachCall(Callback):
    """Save a checkpoint at each call of the hooks, with the evaluations and the folder of this time."""

    def __init__(self, folder: Path, into: Path) -> None:
        self.folder, self.into = folder, into
        self.evaluations: Evaluations | None = None
        self.saved: dict[str, list[tuple[Path, list[tuple[int, int, float]]]]] = {hook: [] for hook in HOOKS}
        for hook in HOOKS:
            setattr(self, hook, partial(self.save, hook))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.evaluations = next(each for each in trainer.callbacks if isinstance(each, Evaluations))

    def save(self, hook: str, trainer: L.Trainer, *_: Any) -> None:
        assert self.evaluations is not None
        copied = self.into / f"{hook} {len(self.saved[hook]) + 1}"
        self.folder.mkdir(exist_ok=True)
        shutil.copytree(self.folder, copied)
        trainer.save_checkpoint(copied / "stopped.ckpt")
        self.saved[hook].append((copied, list(self.evaluations.seen)))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Return a function that makes each run once: the folder, the result, and what was saved at each call of a hook."""

    @cache
    def make(stream: str, schedule: str) -> Any:
        folder = tmp_path_factory.mktemp("saved")
        saving = SaveAtEachCall(folder / "run", folder)
        whole = run(folder / "run", STREAMS[stream], SCHEDULES[schedule], saving)
        assert whole[2].equal(run(folder / "alone", STREAMS[stream], SCHEDULES[schedule])[2])
        return folder / "run", whole, saving.saved

    return make


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stream", STREAMS)
def test_resumed_run_evaluates_as_an_uninterrupted_one(stream: str, schedule: str, hook: str, saved_run: Any) -> None:
    folder, whole, saved = saved_run(stream, schedule)
    assert len(saved[hook]) == (STEPS if hook == "on_train_batch_end" else len(whole[0]))
    for copied, before in saved[hook]:
        shutil.rmtree(folder)
        shutil.copytree(copied, folder)
        check_same(folder, STREAMS[stream], SCHEDULES[schedule], before, folder / "stopped.ckpt", whole)


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_interrupted_evaluation_is_made_again(make: Any, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", make, {})
    last = LastCheckpoint(tmp_path / "cut")
    before = run(tmp_path / "cut", make, {}, StopAt("on_validation_batch_start", 2, None), last)
    check_same(tmp_path / "cut", make, {}, before, last.path, whole)


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_early_stopping_counts_the_evaluation_that_was_due(make: Any, tmp_path: Path) -> None:
    def patience() -> EarlyStopping:
        return EarlyStopping("eval/return", min_delta=1e9, patience=2, mode="max")

    whole = run(tmp_path / "whole", make, {}, patience())
    assert len(whole[0]) == 3
    path = tmp_path / "cut.ckpt"
    before = run(tmp_path / "cut", make, {}, StopAt("on_train_batch_end", 4, path), patience())
    seen, _, weights, reached = run(tmp_path / "cut", make, {}, patience(), ckpt_path=path)
    assert (before + seen, reached) == (whole[0], whole[3])
    assert torch.equal(weights, whole[2])


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
def test_run_without_evaluations_has_none_due(tmp_path: Path) -> None:
    path, schedule = tmp_path / "cut.ckpt", {"limit_val_batches": 0}
    run(tmp_path / "cut", ppo, schedule, StopAt("on_train_batch_end", 2, path))
    seen, *_ = run(tmp_path / "cut", ppo, schedule, ckpt_path=path)
    assert seen == []


class Validations(Callback):
    """Record epoch and step of each evaluation of a fit."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append((trainer.current_epoch, trainer.global_step))


FIT_STEPS = 20  # three fits of two epochs, with three, three and four batches in each epoch


def fitted(schedule: dict[str, Any], *more: Callback, ckpt_path: Any = None, max_steps: int = -1) -> Any:
    """Fit a dynamics model; return the evaluations, the weights, the counters of the progress, and the trainer."""
    torch.manual_seed(0)
    module, data, validations = DynamicsEnsemble([4]), model_data(max_epochs_per_fit=2), Validations()
    made = trainer(max_epochs=-1, max_steps=max_steps, callbacks=[validations, *more], **schedule)
    with suppress(SystemExit):
        made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return validations.seen, parameters(module), (made.current_epoch, made.global_step, data.frames, data.fits), made


@pytest.mark.parametrize("ends", ["interrupted", "max_steps"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 6, "check_val_every_n_epoch": None},
    ],
)
def test_resumed_fits_of_a_dynamics_model_evaluate_as_an_uninterrupted_run(
    schedule: dict[str, Any], ends: str, tmp_path: Path
) -> None:
    whole = fitted(schedule)
    assert whole[2] == (6, FIT_STEPS, 60, 3)
    for step in (12, 18):  # at the end of a fit, and at an evaluation within the last epoch
        path = tmp_path / f"{step}.ckpt"
        if ends == "interrupted":
            before, *_ = fitted(schedule, StopAt("on_train_batch_end", step, path))
        else:
            before, *_, made = fitted(schedule, max_steps=step)
            made.save_checkpoint(path)
        seen, weights, reached, _ = fitted(schedule, ckpt_path=path)
        assert (before + seen, reached) == (whole[0], whole[2]), step
        assert torch.equal(weights, whole[1]), step
