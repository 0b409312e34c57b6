from __future__ import annotations

import re
import sys
from functools import partial

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from kit.actor_critic import fit, rollouts
from kit.files import logged
from kit.runs import trainer
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


@pytest.mark.parametrize("make", [FramesProgressBar, ExperienceLog])
@pytest.mark.parametrize("data", [BoringDataModule, lambda: None], ids=["without frames", "none"])
def test_a_datamodule_without_frames_is_left_alone(make, data, tmp_path, capsys):
    rows = Rows()
    settings = {"logger": rows, "enable_progress_bar": True, "limit_train_batches": 2, "max_epochs": 1}
    run = trainer(tmp_path, callbacks=[make()], **settings)
    run.fit(BoringModel(), datamodule=data())
    assert run.global_step == 2
    assert rows.rows == []
    assert "frames/s" not in capsys.readouterr().err


def test_rows_are_logged_over_frames(tmp_path):
    rows, file = Rows(), CSVLogger(tmp_path, "csv", "")
    fit(tmp_path, max_epochs=5, callbacks=[ExperienceLog(every_n_epochs=2)], logger=[rows, file])
    assert [step for step, _ in rows.rows] == [2 * 64, 4 * 64]
    for _, metrics in rows.rows:
        assert metrics["frames_per_second"] > 0
        assert metrics["time/collect"] > 0
        assert 1 <= metrics["train/return"] <= 500
    written = logged(tmp_path / "csv")
    assert {"step", "frames", "train/return"} <= set(written[0])
    assert len(written) == 2


def test_frames_per_second_of_a_resumed_run_leave_out_what_came_before(tmp_path):
    data, rows = rollouts(), Rows()
    data.frames = 10**12
    fit(tmp_path, data, max_epochs=1, callbacks=[ExperienceLog()], logger=rows)
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


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def drawn(text):
    return [line for line in re.split("[\r\n]", text) if "frames/s" in line]


fit_with_bar = partial(fit, enable_progress_bar=True)


def test_the_bar_counts_the_frames_of_the_whole_run(terminal, tmp_path):
    data = rollouts(total_frames=100)  # 2 rollouts of 64: a few more frames than were asked for
    fit_with_bar(tmp_path, data, max_epochs=-1, callbacks=[FramesProgressBar(refresh_every=0.0)], limit_val_batches=1)
    lines = drawn(terminal.text)
    assert "  0%|" in lines[0]
    assert "0.00/100" in lines[0]
    assert "100%|" in lines[-1]
    assert "128/128" in lines[-1]
    assert re.search(r"return=\d+\.\d, eval=\d+\.\d\]", lines[-1])
    assert len(set(lines)) > 2


def test_the_bar_stays_open_for_an_evaluation_of_the_end(terminal, tmp_path):
    callbacks = [FramesProgressBar(refresh_every=0.0), LastCheckpoint(tmp_path)]
    fit_with_bar(tmp_path, max_epochs=1, callbacks=callbacks, limit_val_batches=1, check_val_every_n_epoch=5)
    assert "eval=" in terminal.text


def test_a_file_gets_few_lines(tmp_path, capsys):
    fit_with_bar(tmp_path, max_epochs=5, callbacks=[FramesProgressBar(refresh_every=0.0)])
    assert 1 <= len(drawn(capsys.readouterr().err)) <= 3


def test_a_disabled_bar_draws_nothing(tmp_path, capsys):
    bar = FramesProgressBar()
    bar.disable()
    fit_with_bar(tmp_path, max_epochs=1, callbacks=[bar])
    assert "frames/s" not in capsys.readouterr().err
