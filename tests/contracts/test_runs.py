"""A run that is stopped and resumed is the run that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.agents import RUNS, Run
from kit.runs import SaveAt, trainer
from kit.states import differences


def run(make: Run, seed: int, folder: Path, resume: Path | None = None, *callbacks: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    module, data = make()
    fit = trainer(folder, max_epochs=3, inference_mode=False, limit_val_batches=1, callbacks=[*callbacks])
    fit.fit(module, datamodule=data, ckpt_path=resume)
    return module, data


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole, data = run(RUNS[name], 0, tmp_path)
    first, _ = run(RUNS[name], 0, tmp_path, None, SaveAt(tmp_path / "at.ckpt", "on_train_epoch_end"))
    # Another seed: everything comes from the checkpoint, which is read with weights_only.
    resumed, again = run(RUNS[name], 9, tmp_path, tmp_path / "at.ckpt")
    assert not differences(dict(resumed.state_dict()), dict(whole.state_dict()))
    unlike = differences(again.state_dict(), data.state_dict())
    assert not [each for each in unlike if ".metrics.time/" not in each]
    assert differences(dict(first.state_dict()), dict(whole.state_dict()))
    assert getattr(resumed, "updates", 0) == getattr(whole, "updates", 0)
    if shown := getattr(data, "exploration", None):
        assert again.exploration == shown[3:]
