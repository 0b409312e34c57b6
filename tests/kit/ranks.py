"""Runs on two ranks, each a process, and what these write down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit.forks import Forked, as_script


def run_ranks(script: Path, folder: Path, *arguments: str) -> Path:
    """Run a script in a process of its own, which writes into a folder and ends well; return the folder."""
    process = Forked(as_script(script, str(folder), *arguments), folder)
    status = process.ends(600)
    assert status == 0, process.said
    return folder


def reports(folder: Path, name: str) -> list[Any]:
    """Return what each of the ranks wrote down."""
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]
