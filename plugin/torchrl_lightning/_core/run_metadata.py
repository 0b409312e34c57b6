"""Names of the stored command and score of a run, and functions that read them. This module imports nothing heavy."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.file_limits import LOG_BYTES, LOG_LINE, LOG_LINES
from torchrl_lightning._core.untrusted import open_regular, printable

COMMAND = "command"  # checkpoint entry with the chosen config groups and the overrides
# Column of a run's score, the mean return of the evaluation after training. Sweepers receive this score.
SCORE = "final/return"
ENDED_EARLY = "final/ended_early"  # frames after which a badly performing run was stopped
METRICS = Path("csv") / "metrics.csv"


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and the non-empty rows of a CSV file, each with its line number.

    Raises:
        OSError: The file does not exist, or is not a regular file.
        ValueError: The file is not a CSV file, or exceeds a limit; the message is one line.
    """
    with open_regular(path, LOG_BYTES) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        try:
            rows = csv.reader(_lines(text))
            for row in rows:
                if rows.line_num > LOG_LINES:
                    raise ValueError(f"it has more than {LOG_LINES:,} lines")
                if row:
                    yield rows.line_num, row
        except (csv.Error, ValueError) as error:
            raise UserError(f"{printable(path)} must be a CSV file: {printable(error)}") from error


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(LOG_LINE):
        if len(line) == LOG_LINE:
            raise ValueError(f"a line has more than {LOG_LINE:,} characters")
        yield line


def evaluation_score(checkpoint: Path, config: Mapping[str, Any]) -> float | None:
    """Return the mean return of a checkpoint in the evaluation after training, read from the folder of its run.

    Return None if the run has not ended, has no CSV log, or evaluated another checkpoint.
    """
    folder = checkpoint.resolve().parent
    evaluated_name = config.get("eval_checkpoint", "best")
    if evaluated_name == "best" and not (folder / "best.ckpt").is_file():
        evaluated_name = "last"
    metrics = folder.parent / METRICS
    if folder.name != "checkpoints" or checkpoint.stem != evaluated_name or not metrics.is_file():
        return None
    score, column_index = "", None
    for _, row in read_rows(metrics):
        if column_index is None:
            column_index = {name: number for number, name in enumerate(row)}
        elif column_index.get(SCORE, len(row)) < len(row):
            score = row[column_index[SCORE]] or score
    try:
        return float(score) if score else None
    except ValueError as error:
        raise UserError(f"{printable(metrics)}: {SCORE} must be a number, got {printable(score)!r}.") from error
