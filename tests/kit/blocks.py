"""Run the code of pages and notebooks block by block, with fewer frames."""

from __future__ import annotations

import re
import sys
from typing import Any

END = "\0\n"  # the separator after the output of a block
FILLING = ("torchrl_lightning.configs", "torchrl.trainers.algorithms.configs")  # their import fills Hydra's store


def few_frames(text: str) -> str:
    """Return the code with a small number of frames."""
    return re.sub(r"(total_(?:frames|timesteps)(?:=|\": ))[\d_]+", r"\g<1>1024", text)


def run_blocks(blocks: list[str]) -> None:
    """Run the blocks in order, and write ``END`` after the output of each."""
    made: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, "")  # as the interactive interpreter does
    for module in [each for each in sys.modules if each.startswith(FILLING)]:
        del sys.modules[module]
    for number, text in enumerate(blocks):
        exec(compile(text, f"block {number}", "exec"), made)
        sys.stdout.write(END)
