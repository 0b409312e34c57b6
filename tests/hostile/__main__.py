"""Read all hostile files with all functions for their kind, and print the problems."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

SHOWN = 5  # the number of printed readings in each list
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "plugin")]


def main(words: list[str]) -> int:
    """Read the files with one of the words in their names; return 1 if a reading has a problem."""
    with tempfile.TemporaryDirectory() as folder:
        from hostile.base import make_base, warm_up
        from hostile.corpus import all_cases
        from hostile.readers import READERS
        from hostile.running import Reading, readings_of

        base = make_base(Path(folder))
        wrong = warm_up(base, Path(folder) / "whole")
        print(*wrong, sep="\n", flush=True)
        files, readings = 0, dict[str, Reading]()
        for number, case in enumerate(all_cases()):
            if words and not any(word in f"{case.kind}: {case.name}" for word in words):
                continue
            files += 1
            for name, reading in readings_of(case, READERS[case.kind], base, Path(folder) / str(number)):
                readings[f"{case.kind}: {case.name}, {name}"] = reading
                wrong += reading.problems
                print(*reading.problems, sep="\n", end="\n" * bool(reading.problems), flush=True)
        print(f"{files} files, {len(readings)} readings, {len(wrong)} problems")
        print("The most memory beyond three times the file (200 MB are allowed):")
        for name, reading in sorted(readings.items(), key=lambda entry: -entry[1].beyond_size)[:SHOWN]:
            print(f"  {reading.beyond_size >> 20} MB ({reading.memory >> 20} MB, file {reading.size >> 20} MB): {name}")
        print("The most processor time (10 s are allowed):")
        for name, reading in sorted(readings.items(), key=lambda entry: -entry[1].seconds)[:SHOWN]:
            print(f"  {reading.seconds:.2f} s: {name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
