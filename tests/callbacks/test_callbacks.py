from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers.logger import DummyLogger

from kit.actor_critic import fit, rollouts
from kit.runs import trainer
from torchrl_lightning import FramesProgressBar, LastCheckpoint, RolloutMetricsLogger
from torchrl_lightning.kernels.compiled import jitted

# Lightning warns if an epoch has fewer batches than log_every_n_steps; the callbacks do not depend on it.
pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")


class Rows(DummyLogger):
    """A logger that stores its rows."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


@pytest.mark.parametrize("data", [None, BoringDataModule()])
@pytest.mark.parametrize("callback", [FramesProgressBar(), RolloutMetricsLogger()])
def test_run_without_frames_is_unchanged(callback, data, tmp_path, capsys):
    rows = Rows()
    run = trainer(tmp_path, callbacks=[callback], logger=rows, enable_progress_bar=True, limit_train_batches=2)
    run.fit(BoringModel(), datamodule=data)
    assert run.global_step == 4
    assert rows.rows == []
    assert "frames/s" not in capsys.readouterr().err


def test_rows_are_logged_over_frames(tmp_path):
    rows = Rows()
    fit(tmp_path, max_epochs=5, callbacks=[RolloutMetricsLogger(every_n_epochs=2)], logger=rows)
    assert [step for step, _ in rows.rows] == [2 * 64, 4 * 64]
    for _, metrics in rows.rows:
        assert metrics["frames_per_second"] > 0
        assert metrics["time/collect"] > 0
        assert 1 <= metrics["train/return"] <= 500


def test_frames_per_second_of_a_resumed_run_exclude_earlier_frames(tmp_path):
    data, rows = rollouts(), Rows()
    data.setup("fit")
    state = data.state_dict()
    state["ranks"][0]["frames"] = 10**12
    data.load_state_dict(state)
    fit(tmp_path, data, max_epochs=1, callbacks=[RolloutMetricsLogger()], logger=rows)
    assert rows.rows[0][1]["frames_per_second"] < 10**7


class Terminal:
    """The terminal methods that tqdm calls."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def bar_lines(text):
    return [line for line in re.split("[\r\n]", text) if "frames/s" in line]


def test_bar_counts_the_frames_of_the_whole_run(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = FramesProgressBar(refresh_every=0.0)
    # Two rollouts of 64 frames exceed total_frames=100.
    data = rollouts(total_frames=100)
    fit(tmp_path, data, max_epochs=-1, callbacks=[bar], enable_progress_bar=True, limit_val_batches=1)
    lines = bar_lines(terminal.text)
    assert "  0%|" in lines[0]
    assert "0.00/100" in lines[0]
    assert "100%|" in lines[-1]
    assert "128/128" in lines[-1]
    assert re.search(r"return=\d+\.\d, eval=\d+\.\d\]", lines[-1])
    assert len(set(lines)) > 2


def test_bar_shows_a_total_that_is_raised_during_the_run(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    class Raising(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.datamodule.total_frames = 192

    fit(
        tmp_path,
        rollouts(total_frames=128),
        max_epochs=-1,
        callbacks=[FramesProgressBar(refresh_every=0.0), Raising()],
        enable_progress_bar=True,
    )
    lines = bar_lines(terminal.text)
    assert "/128" in lines[0]
    assert any("64.0/192" in line for line in lines)
    assert "192/192" in lines[-1]


def test_bar_stays_open_for_an_evaluation_of_the_end(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    callbacks = [FramesProgressBar(refresh_every=0.0), LastCheckpoint(tmp_path)]
    evaluated = {"limit_val_batches": 1, "check_val_every_n_epoch": 5}
    fit(tmp_path, max_epochs=1, callbacks=callbacks, enable_progress_bar=True, **evaluated)
    assert "eval=" in terminal.text


def test_bar_shows_that_kernels_compile_until_the_first_frames(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    class Compiling(Callback):
        def on_train_start(self, trainer, pl_module):
            namespace = {}
            exec("def halve(x): return x / 2", namespace)  # numba does not cache a function without a file
            jitted(namespace["halve"])(1.0)

    bar = FramesProgressBar(refresh_every=0.0)
    fit(tmp_path, max_epochs=1, callbacks=[bar, Compiling()], enable_progress_bar=True)
    lines = bar_lines(terminal.text)
    assert any(line.startswith("Compiling (first run only): ") for line in lines)
    assert lines[-1].startswith("training: ")


@pytest.mark.parametrize(("enabled", "lines"), [(True, {1, 2, 3}), (False, {0})])
def test_bar_writes_few_lines_to_a_file_and_none_if_disabled(enabled, lines, tmp_path, capsys):
    class Bar(FramesProgressBar):
        def setup(self, *args, **kwargs):
            super().setup(*args, **kwargs)
            if not enabled:
                self.disable()

    fit(tmp_path, max_epochs=5, callbacks=[Bar(refresh_every=0.0)], enable_progress_bar=True)
    assert len(bar_lines(capsys.readouterr().err)) in lines


def test_bar_shows_the_metrics_of_all_ranks(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    own = {"train/return": 1.0, "collector/deaths": 1.0, "demos/D_R": 2.0}
    data = SimpleNamespace(frames=64, total_frames=128, metrics=lambda: own)
    combined = {"train/return": 7.5, "eval/return": 3.0, "collector/deaths": 4.0, "demos/D_R": 6.0}
    metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in combined.items()}
    for world_size, expected in (
        (1, "return=1.0, eval=3.0, deaths=1, D_R=2"),
        (2, "return=7.5, eval=3.0, deaths=4, D_R=6"),
    ):
        run = SimpleNamespace(datamodule=data, world_size=world_size, callback_metrics=metrics)
        bar = FramesProgressBar(refresh_every=0.0)
        bar.on_train_start(run, None)
        bar.on_fit_end(run, None)
        assert expected in bar_lines(terminal.text)[-1]
