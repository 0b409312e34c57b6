"""A table of Lightning's callbacks, settings and tuner methods: each one works, raises an error or is untested.

An effect is computed from a run, and must be equal for our learners and for a supervised module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch import callbacks as c
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from kit.runs import parameters
from kit.supervised import Run


class Works(NamedTuple):
    """Has the same effect as for a supervised module; ``settings`` are arguments of :class:`kit.supervised.Run`."""

    effect: Callable[[Run], Any]
    settings: dict[str, Any] = {}


class Refused(NamedTuple):
    """Raises an error of one line that matches the pattern in the first field."""

    says: str
    settings: dict[str, Any] = {}


class Untried(NamedTuple):
    """Needs something that no test machine has."""

    reason: str


Row = Works | Refused | Untried


def of(*kinds: Callable[[], L.Callback]) -> dict[str, Any]:
    """Return the settings of a run with callbacks."""
    return {"callbacks": lambda folder: [kind() for kind in kinds]}


def saved(name: str = ".", **arguments: Any) -> dict[str, Any]:
    """Return the settings of a run with a ``ModelCheckpoint``."""
    return {"callbacks": lambda folder: [c.ModelCheckpoint(folder / name, **arguments)]}


def files(run: Run) -> Any:
    return run.files


def length(run: Run) -> Any:
    return run.length


def evaluations(run: Run) -> Any:
    return run.watch.evaluations


def checkpoint(run: Run, name: str = "") -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(run.folder / (name or run.files[-1]), weights_only=False)
    return loaded


def contents(run: Run) -> Any:
    """Return for each file whether it has optimizer states, and whether it has the weights of its step."""
    found = {}
    for name in run.files:
        stored, step = checkpoint(run, name), checkpoint(run, name)["global_step"]
        vector = torch.cat([stored["state_dict"][key].reshape(-1) for key, _ in run.module.named_parameters()])
        found[name] = ("optimizer_states" in stored, torch.equal(vector, run.watch.weights[step - 1]))
    return found


def ranks(run: Run) -> Any:
    """Return the files, and the indices of the evaluations with their scores."""
    (callback,) = run.callbacks
    return run.files, [run.watch.scores.index(float(score)) for score in callback.best_k_models.values()]  # type: ignore[attr-defined]


def best(mode: str) -> Callable[[Run], Any]:
    """Return a function that checks that a callback keeps the checkpoints with the two best scores."""

    def effect(run: Run) -> Any:
        (callback,), scores = run.callbacks, sorted(run.watch.scores, reverse=mode == "max")
        kept = sorted((float(score) for score in callback.best_k_models.values()), reverse=mode == "max")
        return len(run.files), kept == scores[:2], float(callback.best_model_score) == scores[0]

    return effect


class StopAt(L.Callback):
    """A callback that raises an error before a step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("stopped")


FAILS: dict[str, Any] = {"raises": RuntimeError}


class Calls:
    """Counts the calls of hooks."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        names = [name for name in dir(L.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
        self.hooks: dict[str, Any] = {name: partial(self.count, name) for name in names}

    def count(self, name: str, *_: Any, **__: Any) -> None:
        self.counts[name] += 1


class Hooked(L.Callback):
    """A callback that counts its hooks as attributes of the instance."""

    def __init__(self) -> None:
        self.calls = Calls()
        vars(self).update(self.calls.hooks)


class HookedLambda(c.LambdaCallback):
    def __init__(self) -> None:
        self.calls = Calls()
        super().__init__(**self.calls.hooks)


def calls(run: Run) -> Any:
    return run.callbacks[0].calls.counts  # type: ignore[attr-defined]


class OwnCheckpoint(c.Checkpoint):
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own-{trainer.global_step}.ckpt")


class CountingTimer(c.Timer):
    """A timer that counts steps instead of seconds."""

    steps = 0

    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        self.steps += 1
        super().on_train_batch_end(*arguments, **keywords)

    def time_elapsed(self, stage: str = "train") -> float:
        return self.steps


class OwnBar(c.ProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.seen.append((self.total_train_batches, arguments[-1]))


def averaged(decay: float | None) -> Callable[[Run], bool]:
    """Return a function that checks that the run ends with the average of the weights after each step."""

    def effect(run: Run) -> bool:
        average: Tensor | None = None
        for number, weights in enumerate(run.watch.weights):
            weight = 1 / (number + 1) if decay is None else 1 - decay
            average = weights if average is None else torch.lerp(average, weights, weight)
        assert average is not None
        return torch.allclose(parameters(run.module), average, atol=1e-6)

    return effect


def rates(run: Run) -> list[float]:
    """Return the logged learning rates divided by the first one."""
    values = run.logger.values("lr-")
    return [round(value / values[0], 4) for value in values]


def steps_are_frames(run: Run) -> None:
    """Check that all rows of our runs count frames, and that their steps never decrease."""
    if hasattr(run.data, "frames"):
        steps = [step for step, _ in run.logger.rows]
        assert steps == sorted(steps)
        assert steps[-1] == run.data.frames


def rows_of(name: str) -> Callable[[Run], Any]:
    def effect(run: Run) -> Any:
        steps_are_frames(run)
        return len(run.logger.values(name))

    return effect


def logged_rates(run: Run) -> Any:
    steps_are_frames(run)
    return rates(run)


def search_rate(run: L.Trainer, module: Any, data: Any) -> None:
    Tuner(run).lr_find(module, datamodule=data, num_training=3)


def search_size(run: L.Trainer, module: Any, data: Any, method: Any = "fit") -> None:
    data.batch_size = 8
    Tuner(run).scale_batch_size(module, datamodule=data, method=method, max_trials=1)


def predict(run: L.Trainer, module: Any, data: Any) -> None:
    run.predict(module, datamodule=data)


def test(run: L.Trainer, module: Any, data: Any) -> Any:
    return run.test(module, datamodule=data, verbose=False)


class Writer(c.BasePredictionWriter):
    def write_on_epoch_end(self, *_: Any) -> None: ...


class State(L.Callback):
    """Record global switches of torch in a training step and in an evaluation."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        deterministic, anomaly = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
        self.seen.add((deterministic, torch.backends.cudnn.benchmark, anomaly))

    def on_validation_batch_end(self, *_: Any) -> None:
        self.seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))


def state(run: Run) -> Any:
    return run.callbacks[0].seen  # type: ignore[attr-defined]


class LogsSteps(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        pl_module.log("own", 1.0, on_step=True, on_epoch=False)


def stop_early() -> L.Callback:
    """Return a callback that stops after the first evaluation."""
    return c.EarlyStopping("eval/return", mode="max", stopping_threshold=-1e9)


def count_loaders(module: Any, data: Any) -> None:
    original, data.loaders = data.train_dataloader, 0

    def train_dataloader() -> Any:
        data.loaders += 1
        return original()

    data.train_dataloader = train_dataloader


def add_settings(module: Any, data: Any) -> None:
    module.save_hyperparameters({"own": 1})


def bar(run: Run) -> Any:
    progress: Any = run.trainer.progress_bar_callback
    return type(progress).__name__, progress.total_train_batches


def summary(run: Run) -> bool:
    return any("Trainable params" in text for text in run.messages)


NO_LOGGER: dict[str, Any] = {"logger": None, "callbacks": lambda folder: ()}

CALLBACKS: dict[str, Row] = {
    "BackboneFinetuning": Refused("replaces parameters", of(c.BackboneFinetuning)),
    "BaseFinetuning": Refused("replaces parameters", of(c.BackboneFinetuning)),
    "BasePredictionWriter": Refused("predict", {**of(partial(Writer, "epoch")), "use": predict}),
    "BatchSizeFinder": Refused("Set the size of mini-batches", of(c.BatchSizeFinder)),
    "Callback": Works(calls, of(Hooked)),
    "Checkpoint": Works(contents, of(OwnCheckpoint)),
    "DeviceStatsMonitor": Works(rows_of("DeviceStatsMonitor.on_train_batch_end/cpu_percent"), of(c.DeviceStatsMonitor)),
    "EarlyStopping": Works(length, of(partial(c.EarlyStopping, "eval/return", mode="max", min_delta=1e9, patience=1))),
    "GradientAccumulationScheduler": Refused("mini-batches", of(partial(c.GradientAccumulationScheduler, {0: 2}))),
    "LambdaCallback": Works(calls, of(HookedLambda)),
    "LearningRateFinder": Refused("automatic_optimization", of(c.LearningRateFinder)),
    "LearningRateMonitor": Works(logged_rates, of(partial(c.LearningRateMonitor, "epoch"))),
    "ModelCheckpoint": Works(contents, saved()),
    "ModelPruning": Refused("replaces parameters", of(partial(c.ModelPruning, "l1_unstructured", amount=0.5))),
    "ModelSummary": Works(summary, of(c.ModelSummary)),
    "OnExceptionCheckpoint": Works(
        contents, {"callbacks": lambda folder: [c.OnExceptionCheckpoint(folder, "failed"), StopAt()], **FAILS}
    ),
    "ProgressBar": Works(lambda run: run.callbacks[0].seen, {**of(OwnBar), "enable_progress_bar": True}),  # type: ignore[attr-defined]
    "RichModelSummary": Works(lambda run: "Trainable params" in run.output, of(c.RichModelSummary)),
    "RichProgressBar": Works(bar, {**of(c.RichProgressBar), "enable_progress_bar": True}),
    "StochasticWeightAveraging": Refused("EMAWeightAveraging", of(partial(c.StochasticWeightAveraging, 1e-3))),
    "SpikeDetection": Refused("automatic_optimization", of(c.SpikeDetection)),
    "ThroughputMonitor": Works(
        rows_of("train|batches"), of(partial(c.ThroughputMonitor, lambda batch: 8, separator="|"))
    ),
    "Timer": Works(length, of(partial(CountingTimer, timedelta(seconds=6)))),
    "TQDMProgressBar": Works(
        lambda run: (run.callbacks[0].train_progress_bar.n, run.callbacks[0].train_progress_bar.total),  # type: ignore[attr-defined]
        {**of(c.TQDMProgressBar), "enable_progress_bar": True},
    ),
    "EMAWeightAveraging": Works(averaged(0.5), of(partial(c.EMAWeightAveraging, decay=0.5))),
    "WeightAveraging": Works(averaged(None), of(c.WeightAveraging)),
}

CHECKPOINT: dict[str, Row] = {
    "dirpath": Works(files, saved("here")),
    "filename": Works(contents, saved(filename="{epoch}-of-{step}", save_top_k=-1)),
    "monitor": Works(best("min"), saved(monitor="eval/return", filename="{step}", save_top_k=2)),
    "verbose": Works(
        lambda run: [text[:24] for text in run.messages if "global step" in text],
        saved(monitor="eval/return", filename="{step}", save_top_k=-1, verbose=True),
    ),
    "save_last": Works(contents, saved(save_last=True)),
    "save_top_k": Works(best("max"), saved(monitor="eval/return", mode="max", filename="{step}", save_top_k=2)),
    "save_on_exception": Works(
        contents,
        {"callbacks": lambda folder: [c.ModelCheckpoint(folder, save_on_exception=True), StopAt()], **FAILS},
    ),
    "save_weights_only": Works(contents, saved(save_weights_only=True)),
    "mode": Works(best("max"), saved(monitor="eval/return", mode="max", filename="{step}", save_top_k=2)),
    "auto_insert_metric_name": Works(files, saved(filename="{epoch}-{step}", auto_insert_metric_name=False)),
    "every_n_train_steps": Works(contents, saved(every_n_train_steps=3, save_top_k=-1)),
    "train_time_interval": Works(contents, saved(train_time_interval=timedelta(0), save_top_k=-1)),
    "every_n_epochs": Works(contents, saved(every_n_epochs=2, save_top_k=-1)),
    "save_on_train_epoch_end": Works(
        contents, {**saved(save_on_train_epoch_end=False, save_top_k=-1), "check_val_every_n_epoch": 2}
    ),
    "enable_version_counter": Works(files, saved(filename="same", save_top_k=-1, enable_version_counter=False)),
}

SETTINGS: dict[str, Row] = {
    "accelerator": Works(lambda run: run.trainer.strategy.root_device.type, {"accelerator": "cpu"}),
    "strategy": Works(lambda run: type(run.trainer.strategy).__name__, {"strategy": "auto"}),
    "devices": Works(lambda run: run.trainer.world_size, {"devices": 1}),
    "num_nodes": Works(lambda run: run.trainer.num_nodes, {"num_nodes": 1}),
    "precision": Works(lambda run: (length(run), run.trainer.precision), {"precision": "bf16-mixed"}),
    "logger": Works(lambda run: len(run.logger.values("eval/return")) == len(run.watch.scores)),
    "callbacks": Works(calls, of(Hooked)),
    "fast_dev_run": Works(lambda run: (length(run), evaluations(run), run.files), {**saved(), "fast_dev_run": 2}),
    "max_epochs": Works(length, {"max_epochs": 2}),
    "min_epochs": Works(length, {**of(stop_early), "min_epochs": 2}),
    "max_steps": Works(length, {"max_steps": 5, "max_epochs": -1}),
    "min_steps": Works(length, {**of(stop_early), "min_steps": 6}),
    "max_time": Works(length, {"max_time": timedelta(0)}),
    "limit_train_batches": Works(length, {"limit_train_batches": 0.5}),
    "limit_val_batches": Works(evaluations, {"limit_val_batches": 0}),
    "limit_test_batches": Works(lambda run: bool(run.result), {"limit_test_batches": 0, "use": test}),
    "limit_predict_batches": Refused("predict", {"limit_predict_batches": 1, "use": predict}),
    "overfit_batches": Refused("overfit_batches must be 0, got 1", {"overfit_batches": 1}),
    "val_check_interval": Works(evaluations, {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    "check_val_every_n_epoch": Works(evaluations, {"check_val_every_n_epoch": 2}),
    "num_sanity_val_steps": Works(evaluations, {"num_sanity_val_steps": 2}),
    "log_every_n_steps": Works(rows_of("own"), {**of(LogsSteps), "log_every_n_steps": 2}),
    "enable_checkpointing": Works(files, {**NO_LOGGER, "enable_checkpointing": True, "logger": False}),
    "enable_progress_bar": Works(bar, {"enable_progress_bar": True}),
    "enable_model_summary": Works(summary, {"enable_model_summary": True}),
    "accumulate_grad_batches": Refused("accumulate_grad_batches", {"accumulate_grad_batches": 2}),
    "gradient_clip_val": Refused("gradient_clip_val", {"gradient_clip_val": 0.5}),
    "gradient_clip_algorithm": Refused("gradient_clip_val must be set", {"gradient_clip_algorithm": "norm"}),
    "deterministic": Works(state, {**of(State), "deterministic": True}),
    "benchmark": Works(state, {**of(State), "benchmark": True}),
    "inference_mode": Works(state, {**of(State), "inference_mode": False}),
    "use_distributed_sampler": Works(length, {"use_distributed_sampler": False}),
    "profiler": Works(
        lambda run: len(run.trainer.profiler.recorded_durations["run_training_batch"]),  # type: ignore[attr-defined]
        {"profiler": "simple"},
    ),
    "detect_anomaly": Works(state, {**of(State), "detect_anomaly": True}),
    "barebones": Works(
        lambda run: (length(run), run.trainer.loggers, run.files),
        {"barebones": True, "logger": None, "log_every_n_steps": None, "enable_checkpointing": None},
    ),
    "plugins": Works(contents, {**saved(every_n_train_steps=2, save_top_k=-1), "plugins": [AsyncCheckpointIO()]}),
    "sync_batchnorm": Untried("needs several GPUs"),
    "reload_dataloaders_every_n_epochs": Works(
        lambda run: run.data.loaders, {"prepare": count_loaders, "reload_dataloaders_every_n_epochs": 1}
    ),
    "default_root_dir": Works(lambda run: Path(run.trainer.default_root_dir) == run.folder),
    "enable_autolog_hparams": Works(
        lambda run: run.logger.settings, {"prepare": add_settings, "enable_autolog_hparams": False}
    ),
    "model_registry": Untried("needs an account of Lightning's model hub"),
}

TUNER: dict[str, Row] = {
    "lr_find": Refused("Tuner.lr_find must not be used", {"use": search_rate}),
    "scale_batch_size": Refused("Tuner.scale_batch_size must not be used", {"use": search_size}),
}

VALUES: dict[str, Row] = {
    "precision=64-true": Refused("precision must be", {"precision": "64-true"}),
    "overfit_batches=0.5": Refused("^overfit_batches must be 0, got 0.5", {"overfit_batches": 0.5}),
    "limit_train_batches=0.1": Refused("^limit_train_batches must be at least 0.25", {"limit_train_batches": 0.1}),
    "limit_val_batches=0.5": Refused("^limit_val_batches must be at least 1", {"limit_val_batches": 0.5}),
    "val_check_interval=50": Refused("^val_check_interval must be at most 4", {"val_check_interval": 50}),
    "val_check_interval=3": Refused(
        "^val_check_interval must be at most 2", {"val_check_interval": 3, "limit_train_batches": 2}
    ),
}
"""Values that raise an error, although other values of the setting work."""
