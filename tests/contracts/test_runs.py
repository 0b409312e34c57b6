"""A run that is stopped and resumed is the run that was not."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch

from contracts.agents import FOREIGN, RUNS, Run
from kit.runs import SaveAt, trainer
from kit.states import check_refused, differences
from torchrl_lightning._core.checksums import CHECKSUMS_KEY

CASES = [
    pytest.param(name, number, id=f"{name}, {' '.join(str(part) for part in stop if part is not None)}")
    for name, row in RUNS.items()
    for number, stop in enumerate(row.stops)
]


def fit(row: Run, seed: int, folder: Path, resume: Path | None = None, *callbacks: Any) -> tuple[L.Trainer, Any]:
    torch.manual_seed(seed)
    module, data = row.make()
    limits = {"max_epochs": 3, "limit_val_batches": 1, **row.limits}
    run = trainer(folder, inference_mode=False, callbacks=[*callbacks], **limits)
    run.fit(module, datamodule=data, ckpt_path=resume)
    return run, data


def ended(run: L.Trainer, data: Any) -> dict[str, Any]:
    """All that a run is at its end, without what it took and how often it was begun."""
    run.save_checkpoint(Path(run.default_root_dir) / "end.ckpt")
    state = torch.load(Path(run.default_root_dir) / "end.ckpt", weights_only=True)
    for name in ("loops", "callbacks", CHECKSUMS_KEY):
        state.pop(name, None)
    for rank in state[type(data).__name__].get("ranks", ()):
        rank.pop("snapshot", None)
    if getattr(data, "buffer", None) is not None:
        state["buffer"] = data.buffer.state_dict()
    state["metrics"] = data.metrics() if hasattr(data, "metrics") else {}
    return state


def unlike(one: Any, other: Any) -> list[str]:
    return [each for each in differences(one, other) if ".time/" not in each]


class Stopped(NamedTuple):
    """A run, how it ended, and the folder of the checkpoints that it wrote on its way."""

    row: Run
    data: Any
    end: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stopped]:
    """What makes each run once."""

    @lru_cache(1)
    def make(name: str) -> Stopped:
        row, folder = RUNS[name], tmp_path_factory.mktemp("stopped")
        run, data = fit(row, 0, folder)
        end = ended(run, data)
        stops = enumerate(row.stops)
        saving = [SaveAt(folder / f"{i}.ckpt", at.hook, at.count, epoch=at.epoch, then="go on") for i, at in stops]
        assert not unlike(ended(*fit(row, 0, folder, None, *saving)), end), "a checkpoint changes the run"
        return Stopped(row, data, end, folder)

    return make


@pytest.mark.parametrize(("name", "number"), CASES)
def test_resumed_run_equals_an_uninterrupted_one(name: str, number: int, stopped: Callable[[str], Stopped]) -> None:
    row, whole, end, folder = stopped(name)
    checkpoint = folder / f"{number}.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] < end["global_step"]
    # Another seed: everything comes from the checkpoint, which is read with weights_only.
    run, data = fit(row, 9, folder, checkpoint)
    assert not unlike(ended(run, data), end)
    if shown := getattr(whole, "noted", None):
        assert data.noted == shown[3:]


@pytest.mark.parametrize(("make", "settings", "says"), FOREIGN, ids=lambda each: each if isinstance(each, str) else "")
def test_checkpoint_of_another_run_is_refused(make: Any, settings: dict[str, Any], says: str) -> None:
    written, other = made = make(), make(**settings)
    for data in made:
        data.setup("fit")
    check_refused(other, written.state_dict(), says)
    for data in made:
        data.close()


@pytest.mark.parametrize("make", dict.fromkeys(row[0] for row in FOREIGN))
def test_checkpoint_of_another_version_or_of_other_ranks_is_refused(make: Any) -> None:
    data = make()
    data.setup("fit")
    state = data.state_dict()
    check_refused(data, {**state, "schema_version": 0}, "version 0, this release reads version 2")
    check_refused(data, {**state, "ranks": state["ranks"] * 2}, r"of 2 rank\(s\), but this run has 1")
    data.close()
