"""The list of mutants. Each one is a text in a file and its replacement."""

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
        file: the path of the file in the repository.
        text: an exact text that occurs once in the file.
        replacement: the faulty text.
        tests: test files or tests; at least one of them must fail.
    """

    file: Path
    text: str
    replacement: str
    tests: tuple[str, ...]

    def apply_to(self, source: str) -> str:
        """Return the faulty source.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"text must occur once in {self.file}, got {count} times: {self.text!r}.")
        return source.replace(self.text, self.replacement)

    def error(self, root: Path) -> str:
        """Return the reason if the mutant cannot be tried in a copy of the repository, else an empty string."""
        if not (root / self.file).is_file():
            return f"{self.file} must be a file."
        for test in self.tests:
            file, _, name = test.partition("::")
            if not (root / file).is_file() or (name and f"def {name}(" not in (root / file).read_text()):
                return f"tests of {self.file} must be test files or tests in them, got {test}."
        try:
            self.apply_to((root / self.file).read_text())
        except ValueError as error:
            return str(error)
        return ""


def read_mutants() -> list[Mutant]:
    """Read the list of mutants."""
    entries = tomllib.loads(LIST.read_text())["mutant"]
    return [
        Mutant(PACKAGE / entry["file"], entry["text"], entry["replacement"], tuple(entry["tests"])) for entry in entries
    ]
