"""The code of pages and notebooks, run block by block with less to do."""

from __future__ import annotations

import re
import sys
from typing import Any

END = "\0\n"  # of what a block prints
FILLING = ("torchrl_lightning.configs", "torchrl.trainers.algorithms.configs")  # Hydra's store, where imported anew


def few_frames(text: str) -> str:
    """Return code that collects few frames."""
    return re.sub(r"(total_(?:frames|timesteps)(?:=|\": ))[\d_]+", r"\g<1>1024", text)


def run_blocks(blocks: list[str]) -> None:
    """Run blocks in turn, and end what each prints."""
    made: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, "")  # as python has it
    for module in [each for each in sys.modules if each.startswith(FILLING)]:
        del sys.modules[module]
    for number, text in enumerate(blocks):
        exec(compile(text, f"block {number}", "exec"), made)
        sys.stdout.write(END)
