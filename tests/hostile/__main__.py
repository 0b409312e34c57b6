"""Read all hostile files by all functions that read their kind, and print what is wrong."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "plugin")]


def main(words: list[str]) -> int:
    """Return 1 if anything is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = os.environ["XDG_STATE_HOME"] = folder  # where keys of signatures are kept
        from hostile.base import make_base, warm_up
        from hostile.corpus import all_cases
        from hostile.readers import READERS
        from hostile.running import problems_of

        base = make_base(Path(folder))
        wrong = warm_up(base, Path(folder) / "whole")
        print(*wrong, sep="\n", flush=True)
        files = reads = 0
        for number, case in enumerate(all_cases()):
            if words and not any(word in f"{case.kind}: {case.name}" for word in words):
                continue
            files += 1
            for name, read in READERS[case.kind].items():
                reads += 1
                began = time.monotonic()
                found = problems_of(case, name, read, base, Path(folder) / f"{number}_{reads}")
                wrong += found
                for problem in found:
                    print(f"{problem} ({time.monotonic() - began:.1f} s)", flush=True)
        print(f"{files} files, {reads} readings, {len(wrong)} problems")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
