"""The message and the exit status of a rank after another rank has ended."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from torchrl_lightning._core import ranks
from torchrl_lightning.callbacks import LastCheckpoint
from torchrl_lightning.cli import rank_failures
from torchrl_lightning.cli.rank_failures import reported_rank_failures

LOST = "[/w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:17318: Connection reset by peer."


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(rank_failures, "_PATIENCE", 0.0)


def ended(
    monkeypatch: pytest.MonkeyPatch, codes: list[int | None], local: int = 0, node: int = 0, environment: Any = None
) -> int:
    """Return the exit status of a rank that has lost its connection."""
    processes = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    monkeypatch.setattr(rank_failures.rank_stop, "processes", processes)
    trainer = SimpleNamespace(
        global_rank=2 * node + local,
        local_rank=local,
        callbacks=[LastCheckpoint("run")],
        strategy=SimpleNamespace(cluster_environment=LightningEnvironment() if environment is None else environment),
    )
    with pytest.raises(SystemExit) as end, reported_rank_failures(trainer):
        raise RuntimeError(LOST)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    ("codes", "node", "status", "line"),
    [
        ([-9], 0, 137, "error: rank 1 was killed by SIGKILL; "),
        ([None, -11], 1, 139, "error: rank 4 was killed by SIGSEGV; "),
        ([None, 0], 0, 1, "error: rank 2 ended with status 0; "),
        ([1], 0, 1, "error: rank 1 ended with status 1; "),  # rank 1 may have printed its own error
        ([143], 1, 143, "error: rank 3 ended with status 143; "),
        ([255], 0, 255, "error: rank 1 ended with status 255; "),
        ([None], 0, 1, "error: another rank has ended; "),
        ([], 0, 1, "error: another rank has ended; "),
    ],
)
def test_first_rank_reports_the_rank_that_ended(
    codes: list[int | None],
    node: int,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, codes, node=node) == status
    assert capsys.readouterr().err == f"{line}there is no checkpoint yet.\n"


def test_launched_rank_leaves_the_report_to_the_first_rank_while_it_lives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, [], local=1) == 1
    assert capsys.readouterr().err == ""
    parents = iter([1, 2])
    monkeypatch.setattr(rank_failures.os, "getppid", lambda: next(parents))
    assert ended(monkeypatch, [], local=1, node=1) == 1
    assert capsys.readouterr().err == "error: rank 2 has ended; there is no checkpoint yet.\n"


def test_error_of_the_first_rank_is_not_reported_by_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(rank_failures.rank_stop, "processes", [SimpleNamespace(terminate=lambda: told.append("1"))])
    with pytest.raises(SystemExit), reported_rank_failures(trainer=_single()):
        raise SystemExit(143)  # all ranks have agreed to stop
    assert told == []
    with pytest.raises(ValueError, match="motor"), reported_rank_failures(trainer=_single()):
        raise ValueError("the motor is broken")
    assert told == ["1"]
    monkeypatch.setattr(rank_failures.rank_stop, "_signals", {signal.SIGTERM: 0.0})
    monkeypatch.setattr(rank_failures, "_has_ended", lambda parent: True)
    assert ended(monkeypatch, [], local=1) == 1
    assert capsys.readouterr().err == ""


def test_each_rank_of_another_launcher_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, [], local=1, environment=TorchElasticEnvironment()) == 1
    assert capsys.readouterr().err == "error: another rank has ended; there is no checkpoint yet.\n"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(LOST), True),
        (RuntimeError("[1] Connection closed by peer [127.0.0.1]:3"), True),
        (RuntimeError("NCCL Error 6: ncclRemoteError"), True),
        (RuntimeError("NCCL Error 5: invalid usage"), False),
        (RuntimeError("[/w/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"), False),
        (RuntimeError("size mismatch"), False),
        (ValueError(LOST), False),
    ],
)
def test_lost_rank_is_told_from_other_errors(error: Exception, is_lost: bool) -> None:
    assert ranks.is_lost_rank(error) is is_lost
    with pytest.raises(type(error) if not is_lost else SystemExit), reported_rank_failures(trainer=_single()):
        raise error


def _single() -> Any:
    environment = TorchElasticEnvironment()
    return SimpleNamespace(
        global_rank=0, local_rank=0, callbacks=[], strategy=SimpleNamespace(cluster_environment=environment)
    )
