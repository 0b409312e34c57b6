from __future__ import annotations

import re
import sys

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from torchrl_lightning import ExperienceLog, FramesProgressBar, LastCheckpoint

# An epoch has fewer batches than Lightning's interval between two rows; callbacks do not mind it.
pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


@pytest.mark.parametrize("callback", [FramesProgressBar(), ExperienceLog()])
def test_a_datamodule_without_frames_is_left_alone(callback, make_trainer, capsys):
    rows = Rows()
    trainer = make_trainer(callbacks=[callback], logger=rows, enable_progress_bar=True, limit_train_batches=2)
    trainer.fit(BoringModel(), datamodule=BoringDataModule())
    assert trainer.global_step == 6
    assert rows.rows == []
    assert "frames/s" not in capsys.readouterr().err


@pytest.mark.parametrize("callback", [FramesProgressBar(), ExperienceLog()])
def test_no_datamodule_at_all_is_fine(callback, make_trainer):
    trainer = make_trainer(max_epochs=1, callbacks=[callback], enable_progress_bar=True, limit_train_batches=2)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2


def test_rows_are_logged_over_frames(make_data, make_trainer, make_module):
    rows = Rows()
    make_trainer(max_epochs=5, callbacks=[ExperienceLog(every_n_epochs=2)], logger=rows).fit(
        make_module(), datamodule=make_data()
    )
    assert [step for step, _ in rows.rows] == [2 * 64, 4 * 64]
    for _, metrics in rows.rows:
        assert metrics["frames_per_second"] > 0
        assert metrics["time/collect"] > 0
        assert 1 <= metrics["train/return"] <= 500


def test_frames_per_second_of_a_resumed_run_leave_out_what_came_before(make_data, make_trainer, make_module):
    data, rows = make_data(), Rows()
    data.frames = 10**12
    make_trainer(max_epochs=1, callbacks=[ExperienceLog()], logger=rows).fit(make_module(), datamodule=data)
    assert rows.rows[0][1]["frames_per_second"] < 10**7


class Terminal:
    """What tqdm asks of a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def drawn(text):
    return [line for line in re.split("[\r\n]", text) if "frames/s" in line]


def test_the_bar_counts_the_frames_of_the_whole_run(make_data, make_trainer, make_module, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    data = make_data(total_frames=100)  # 2 rollouts of 64: a few more frames than were asked for
    bar = FramesProgressBar(refresh_every=0.0)
    make_trainer(max_epochs=-1, callbacks=[bar], enable_progress_bar=True, limit_val_batches=1).fit(
        make_module(), datamodule=data
    )
    lines = drawn(terminal.text)
    assert "  0%|" in lines[0]
    assert "0.00/100" in lines[0]
    assert "100%|" in lines[-1]
    assert "128/128" in lines[-1]
    assert re.search(r"return=\d+\.\d, eval=\d+\.\d\]", lines[-1])
    assert len(set(lines)) > 2


def test_the_bar_stays_open_for_an_evaluation_of_the_end(make_data, make_trainer, make_module, monkeypatch, tmp_path):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    callbacks = [FramesProgressBar(refresh_every=0.0), LastCheckpoint(tmp_path)]
    make_trainer(
        max_epochs=1,
        callbacks=callbacks,
        enable_checkpointing=True,
        enable_progress_bar=True,
        limit_val_batches=1,
        check_val_every_n_epoch=5,
    ).fit(make_module(), datamodule=make_data())
    assert "eval=" in terminal.text


def test_a_file_gets_few_lines(make_data, make_trainer, make_module, capsys):
    bar = FramesProgressBar(refresh_every=0.0)
    make_trainer(max_epochs=5, callbacks=[bar], enable_progress_bar=True).fit(make_module(), datamodule=make_data())
    assert 1 <= len(drawn(capsys.readouterr().err)) <= 3


def test_a_disabled_bar_draws_nothing(make_data, make_trainer, make_module, capsys):
    bar = FramesProgressBar()
    trainer = make_trainer(max_epochs=1, callbacks=[bar], enable_progress_bar=True)
    bar.disable()
    trainer.fit(make_module(), datamodule=make_data())
    assert "frames/s" not in capsys.readouterr().err


def test_csv_rows_hold_the_rollouts(tmp_path, make_data, make_trainer, make_module):
    logger = CSVLogger(tmp_path, name="csv", version="")
    make_trainer(max_epochs=2, callbacks=[ExperienceLog()], logger=logger).fit(make_module(), datamodule=make_data())
    header, *rows = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert {"step", "frames", "train/return"} <= set(header.split(","))
    assert len(rows) == 2
