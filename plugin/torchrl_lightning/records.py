"""What the command leaves of a run for others: where it says what it was told, and its score. Imports nothing heavy."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMAND = "command"  # where a checkpoint holds the groups chosen and the overrides given
# Column of the score of a run: the mean return of the evaluation after training, which a sweeper gets.
SCORE = "final/return"
ENDED_EARLY = "final/ended_early"  # of a run that was ended for doing badly: after how many frames
METRICS = Path("csv") / "metrics.csv"


def score_of(checkpoint: Path, config: Mapping[str, Any]) -> float | None:
    """Return the mean return of the evaluation after training of a checkpoint in the folder of its run.

    None where that run has not ended, has no CSV log, or evaluated another of its checkpoints.
    """
    folder = checkpoint.resolve().parent
    evaluated = config.get("eval_checkpoint", "best")
    if evaluated == "best" and not (folder / "best.ckpt").is_file():
        evaluated = "last"
    metrics = folder.parent / METRICS
    if folder.name != "checkpoints" or checkpoint.stem != evaluated or not metrics.is_file():
        return None
    with metrics.open(newline="") as file:
        found = [row[SCORE] for row in csv.DictReader(file) if row.get(SCORE)]
    return float(found[-1]) if found else None
