"""Runs on two CPU ranks, started in a separate process, and the reports of the ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from socket import socket
from typing import Any

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy

from kit.forks import Forked, as_script
from kit.runs import trainer


class Report(L.Callback):
    """Writes a report of the rank when its training ends."""

    def __init__(self, folder: Path, name: str, tell: Callable[[Any, Any], dict[str, Any]]) -> None:
        self.folder, self.name, self.tell = folder, name, tell

    def on_train_end(self, run: L.Trainer, module: Any) -> None:
        found = self.tell(module, run.datamodule)  # type: ignore[attr-defined]
        (self.folder / f"{self.name}_{run.global_rank}.json").write_text(json.dumps(found))


def fit_ranks(
    module: Any, data: Any, report: Report, *callbacks: L.Callback, resume: Path | None = None, **settings: Any
) -> None:
    """Fit on two ranks, without evaluations, with the report's folder as the root directory.

    The ranks are forked here, so that they need not import the modules of the tests. As with ``torchrun``, they read
    their number and the port of the first rank from environment variables.
    """
    settings = {"limit_val_batches": 0, "callbacks": [*callbacks, report], **settings}
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def fit_rank(rank: int) -> None:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = trainer(report.folder, devices=2, strategy="ddp", **settings)
        run.fit(module, datamodule=data, ckpt_path=resume)

    ranks = [multiprocessing.get_context("fork").Process(target=fit_rank, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    ended = wait([process.sentinel for process in ranks])
    for process in ranks:
        if process.sentinel not in ended and any(each.exitcode for each in ranks):
            process.kill()  # it would wait for the other rank
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]


def of_rank(rank: int, ranks: int) -> SingleDeviceStrategy:
    """Make a strategy for one process, with the rank and world size of a larger run."""
    strategy = SingleDeviceStrategy("cpu")
    strategy.global_rank, strategy.world_size = rank, ranks
    return strategy


def run_ranks(run: Callable[..., object] | Path, folder: Path, *arguments: Any, bare: bool = False) -> Path:
    """Call a function or a script with a folder in a separate process; assert its success and return the folder."""
    made = as_script(run, str(folder), *arguments) if isinstance(run, Path) else partial(run, folder, *arguments)
    process = Forked(made, folder, bare=bare)
    status = process.ends(600)
    assert status == 0, process.said
    return folder


def reports(folder: Path, name: str) -> list[Any]:
    """Return the reports of both ranks."""
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]
