"""Compare replay buffers with plain lists: ``python tests/random_operations.py --seeds 300``."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from kit.operations import run
from kit.replay_settings import Settings


def main() -> None:
    """Run the seeds, and report the failed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    logging.disable(logging.WARNING)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--operations", type=int, default=30)
    options = parser.parse_args()
    began, failed = time.perf_counter(), 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            run(seed, options.operations)
        except Exception as error:
            failed += 1
            sys.stdout.write(f"seed {seed} failed: {Settings.of(seed)}: {type(error).__name__}: {error}\n")
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{options.seeds - failed} of {options.seeds} seeds passed in {seconds:.0f} s\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
