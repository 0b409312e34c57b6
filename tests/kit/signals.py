"""Signals that reach a run at a chosen place, and what comes of runs that they stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kit.runs import trainer
from kit.states import differences
from torchrl_lightning import BestCheckpoint, LastCheckpoint
from torchrl_lightning.files import read_state

WHERE = ("torchrl_lightning", "lightning/pytorch", "torch/optim")
IGNORED = ("/interrupts.py",)


@contextmanager
def at_return(is_due: Callable[[FrameType], bool], *numbers: int) -> Iterator[list[str]]:
    """Send this process signals when a function returns for which ``is_due`` is true; yield its name, once sent."""
    sent: list[str] = []
    left = list(numbers)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and left and is_due(frame):
            sent.append(frame.f_code.co_qualname)
            os.kill(os.getpid(), left.pop(0))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield sent
    finally:
        sys.setprofile(before)


def nth_return(number: int, name: str | None = None) -> Callable[[FrameType], bool]:
    """Be true from the ``number``-th return on, of a function of this name, or of any of the packages in ``WHERE``."""
    seen = 0

    def is_due(frame: FrameType) -> bool:
        nonlocal seen
        file = frame.f_code.co_filename
        if name is None:
            is_counted = any(each in file for each in WHERE) and not file.endswith(IGNORED)
        else:
            is_counted = frame.f_code.co_qualname == name
        seen += is_counted
        return seen >= number

    return is_due


def run(folder: Path, make: Callable[[Path], tuple[Any, Any]], ckpt_path: Path | None = None, **settings: Any) -> Path:
    """Fit with the checkpoints of our commands, to the end or to a signal; return the last checkpoint."""
    last = LastCheckpoint(folder)
    best = BestCheckpoint(folder, "best", monitor="eval/return", mode="max")
    module, data = make(folder)
    made = trainer(folder, **{"max_epochs": -1, "callbacks": [best, last], **settings})
    with suppress(SystemExit):
        made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return last.path


def content(path: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds but times and folders."""
    stored = torch.load(path, weights_only=True)
    (name,) = (name for name in stored if name.endswith("DataModule"))
    (own,) = stored[name]["ranks"]
    own = {key: value for key, value in own.items() if key != "metrics"}
    if "snapshot" in own:
        snapshot = own.pop("snapshot")
        own["buffer"] = read_state(Path(snapshot["folder"]) / snapshot["name"])
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    return {"data": own, "normalization": stored[name]["normalization"], **{each: stored[each] for each in names}}


def changed(whole: Path, resumed: Path) -> list[str]:
    """Name the entries in which the last checkpoints of two runs differ."""
    return [each.partition(":")[0] for each in differences(content(whole), content(resumed))]
