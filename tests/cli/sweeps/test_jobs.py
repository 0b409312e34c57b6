"""Any error of a job becomes one line and the sweep continues; Ctrl-C and SIGTERM end the sweep."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities.exceptions import SIGTERMException

from cli.sweeps.fake_tasks import sweep
from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning.cli.sweeps.jobs import JobError, is_stop, job_error, job_label


def ctrl_c_of_lightning() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)


def error_after_ctrl_c() -> None:
    interrupts.hold(STOPS)
    signal.raise_signal(signal.SIGINT)
    interrupts.release(STOPS)
    raise ValueError


def lost_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "last.ckpt")


def raises(error: BaseException) -> Any:
    raise error


class Picky(Exception):
    """An error that cannot be loaded from a pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}\nand {second}")


class Interrupted:
    """An object that gets Ctrl-C in its destructor. Python ignores the exception there."""

    def __del__(self) -> None:
        raise KeyboardInterrupt


ERRORS = {
    "user error": (lambda: raises(UserError("gamma must be below 1, got 2.")), "gamma must be below 1, got 2."),
    "two lines": (lambda: raises(UserError("one.\ntwo.")), "one. two."),
    "any error": (lambda: raises(ValueError("not finite")), "ValueError: not finite. HYDRA_FULL_ERROR=1 shows the"),
    "no message": (lambda: raises(AssertionError()), "AssertionError. HYDRA_FULL_ERROR=1 shows"),
    "no pickle": (lambda: raises(Picky("this", "that")), "Picky: this and that."),
    "full disk": (lost_disk, "No space left on device: 'last.ckpt'. Free space"),
    "exit with a line": (lambda: sys.exit("error: wrong."), "wrong."),
    "exit with a number": (lambda: sys.exit(3), "the run has exited with status 3."),
    "exit without a number": (lambda: sys.exit(), "the run has exited with status None."),
    "nan": (lambda: float("nan"), "the score of the run must be a number, got nan."),
}


@pytest.mark.parametrize("launcher", [["hydra/launcher=basic"], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]])
def test_error_of_one_job_is_one_line_and_the_others_run(launcher: list[str], tmp_path: Path) -> None:
    calls, messages = zip(*ERRORS.values(), strict=True)

    def task(cfg: Any) -> float:
        (tmp_path / str(cfg.seed)).touch()
        return calls[cfg.seed]() if cfg.seed < len(calls) else 1.0  # type: ignore[no-any-return]

    count = len(ERRORS) + 1
    arguments = [f"seed={','.join(map(str, range(count)))}", *launcher, "data.total_frames=64"]
    status, lines = sweep(tmp_path, task, "--multirun", *arguments)
    assert {path.name for path in tmp_path.glob("*") if path.is_file()} == {str(seed) for seed in range(count)}
    assert status == 1
    for seed, (line, message) in enumerate(zip(lines[:-1], messages, strict=True)):
        assert line.startswith(f"error: in the run seed={seed}: {message}")
    assert lines[-1] == f"error: {count - 1} of {count} runs failed."


def test_killed_process_of_a_job_is_one_line_and_the_others_run(tmp_path: Path) -> None:
    def task(cfg: Any) -> float:
        if cfg.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / str(cfg.seed)).touch()
        return 1.0

    arguments = ("--multirun", "seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    status, lines = sweep(tmp_path, task, *arguments)
    assert {path.name for path in tmp_path.glob("?")} == {"0", "2"}
    assert status == 1
    assert lines[0].startswith("error: in the run seed=1: TerminatedWorkerError")
    assert lines[1:] == ["error: 1 of 3 runs failed."]


def test_folder_that_cannot_be_created_fails_one_job(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "1").touch()
    seeds: list[int] = []

    def task(cfg: Any) -> float:
        seeds.append(cfg.seed)
        return 1.0

    _, lines = sweep(tmp_path, task, "--multirun", "seed=0,1,2", "hydra.sweep.dir=all", "hydra.sweep.subdir=${seed}")
    assert seeds == [0, 2]
    assert lines[0].startswith("error: in the run seed=1: FileExistsError")
    assert lines[1:] == ["error: 1 of 3 runs failed."]


STOPS = {
    "Ctrl-C": (lambda: raises(KeyboardInterrupt()), 130),
    "Ctrl-C in a trainer": (ctrl_c_of_lightning, 1),
    "SIGTERM in a trainer": (lambda: raises(SIGTERMException()), 143),
    "rank ended by SIGTERM": (lambda: sys.exit(143), 143),
    "Ctrl-C before an error": (error_after_ctrl_c, 130),
    "Ctrl-C in a destructor": (lambda: Interrupted(), 130),
}


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, because a shell's background jobs inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("name", STOPS)
def test_signal_ends_the_sweep(name: str, tmp_path: Path) -> None:
    call, expected = STOPS[name]
    seeds: list[int] = []

    def task(cfg: Any) -> float:
        seeds.append(cfg.seed)
        call()
        return 1.0

    status, lines = sweep(tmp_path, task, "--multirun", "seed=0,1")
    assert seeds == [0]
    assert status == expected
    assert not any("runs failed" in line for line in lines)


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_traceback_of_each_failed_job_stays_for_a_user_who_asks_for_it(launcher: str, tmp_path: Path) -> None:
    def broken(cfg: Any) -> float:
        raise UserError(f"seed {cfg.seed}")

    status, lines = sweep(tmp_path, broken, "--multirun", "seed=0,1", f"hydra/launcher={launcher}", full=True)
    assert status == 1
    assert sum(line.startswith("Traceback") for line in lines) == 2
    assert sum("in broken" in line for line in lines) == 2
    assert [line for line in lines if line.startswith("error: ")] == [
        *("error: in the run seed=0: seed 0", "error: in the run seed=1: seed 1", "error: 2 of 2 runs failed.")
    ]


@pytest.mark.parametrize("is_failure", [True, False])
def test_message_of_a_stopped_run_appears_unless_its_job_has_failed(
    is_failure: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def task(cfg: Any) -> float:
        logging.getLogger("torchrl_lightning.callbacks.checkpoints").warning("stopped by something")
        if is_failure:
            raise ValueError
        raise KeyboardInterrupt

    logged: list[str] = []
    with mock.patch.object(logging.Logger, "callHandlers", lambda self, record: logged.append(record.getMessage())):
        sweep(tmp_path, task, "--multirun", "seed=0")
    assert ("stopped by something" in logged) != is_failure


def test_sweep_without_errors_says_nothing(tmp_path: Path) -> None:
    numbers: list[int] = []

    def task(cfg: Any) -> float:
        numbers.append(HydraConfig.get().job.num)
        return float("inf")

    assert sweep(tmp_path, task, "--multirun", "seed=0,1,2") == (0, [])
    assert numbers == [0, 1, 2]


def test_error_of_a_job_travels_as_a_pickle() -> None:
    error = job_error(Picky("this", "that"), "the run seed=1")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.message, copy.details, copy.process) == (error.message, error.details, None)
    assert str(copy).startswith("error: in the run seed=1: Picky: this and that.")
    assert "Picky" in copy.details
    assert isinstance(copy, JobError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), True),
        (SIGTERMException(), True),
        (SystemExit(130), True),
        (SystemExit(143), True),
        (GeneratorExit(), True),
        (SystemExit(137), False),
        (SystemExit(1), False),
        (SystemExit("error: x"), False),
        (SystemExit(), False),
        (ValueError(), False),
    ],
    ids=repr,
)
def test_only_signals_stop_a_sweep(error: BaseException, expected: bool) -> None:
    assert is_stop(error) == expected


def test_label_of_a_job_has_the_settings_that_differ() -> None:
    assert job_label(["seed=1", "a=2"], None) == "the run seed=1 a=2"
    assert job_label(["a=2"], 0) == "trial 0 (a=2)"
    assert job_label([], 7) == "trial 7"
