"""The list of mutants, each a text of a file and its replacement."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = Path("plugin/torchrl_lightning")
LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One small fault.

    Args:
        file: the file below the package's folder.
        text: an exact text that occurs once in the file.
        replacement: the faulty text.
        tests: the test files of which one must fail.
    """

    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def apply_to(self, source: str) -> str:
        """Return the faulty source.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"text must occur once in {self.file}, got {count} times: {self.text!r}. Update the list.")
        return source.replace(self.text, self.replacement)


def read_mutants() -> list[Mutant]:
    """Read the list."""
    entries = tomllib.loads(LIST.read_text())["mutant"]
    return [
        Mutant(str(PACKAGE / entry["file"]), entry["text"], entry["replacement"], tuple(entry["tests"]))
        for entry in entries
    ]
