"""The guard of the suite: mutants of the package, each of which the tests should notice.

    python -m tests.guard draw            # 150 mutants -> tests/guard/mutants.csv
    python -m tests.guard cover WORK      # which tests execute each mutant's line, and their seconds -> WORK
    python -m tests.guard run WORK        # each mutant against those tests -> the last column of mutants.csv

A mutant is one change in the body of a function that numba does not compile: a comparison flipped, a constant moved, a
statement dropped. It is killed by the first test that fails, or that does not end; at most 100 tests are tried, the
fastest first, as long as all of them together usually take less than a minute. Kernels have brute-force twins instead.

A suite that is cut anew should kill the mutants that the old one has killed: keep a copy of ``mutants.csv``, then
``cover`` and ``run`` again.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests.guard.sites import PACKAGE, Site, draw, marked

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.csv")
SEED, COUNT = 0, 150
DRAWN = ("file", "line", "kind", "before", "after")
TESTS, USUAL_SECONDS, SECONDS = 100, 60.0, 120.0
IMPORTED = ("gymnasium", "hydra", "hypothesis", "lightning", "matplotlib.pyplot", "numba", "pytest", "scipy.stats")
IMPORTED += ("torchrl.collectors", "torchrl.data", "torchrl.envs", "torchrl.objectives")
OPTIONS = ["-q", "-p", "tests.guard.plugin"]
COPIED = ("plugin", "conf", "tests", "examples", "pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci")
NOTES = '''"""Write which test has come to a mark, once for each process and test."""
import os
_seen = set()


def note(mark):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if test and (mark, test) not in _seen:
        _seen.add((mark, test))
        file = os.open(os.environ["GUARD_WORK"] + "/hits", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{mark}\\t{test}\\n".encode())
        os.close(file)
'''


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("command", choices=("draw", "cover", "run"))
    arguments.add_argument("work", nargs="?", type=Path, help="a folder for copies and for what is measured")
    arguments.add_argument("--only", type=int, nargs="*", help="run these mutants, by their number, alone")
    given = arguments.parse_args()
    if given.command == "draw":
        write([(site, "") for site in draw(ROOT / PACKAGE, SEED, COUNT)])
    elif given.work is None:
        arguments.error(f"{given.command} needs a folder to work in")
    elif given.command == "cover":
        cover(given.work.resolve())
    else:
        run(given.work.resolve(), given.only)


def write(mutants: list[tuple[Site, str]]) -> None:
    with LIST.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["number", *DRAWN, "killed by"])
        for number, (site, killer) in enumerate(mutants):
            lines.writerow([number, *(getattr(site, name) for name in DRAWN), killer])


def read() -> list[tuple[Site, str]]:
    """The committed list, each entry found again in the package: nothing else is mutated than what was drawn."""
    with LIST.open(newline="") as file:
        rows = list(csv.DictReader(file))
    sites = draw(ROOT / PACKAGE, SEED, COUNT)
    if any(str(getattr(site, name)) != row[name] for site, row in zip(sites, rows, strict=True) for name in DRAWN):
        sys.exit("the package has changed since its mutants were drawn: draw again, and run the old suite, too")
    return [(site, row["killed by"]) for site, row in zip(sites, rows, strict=True)]


def copy_of_repository(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
        elif source.exists():
            shutil.copy2(source, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def cover(work: Path) -> None:
    """Run the whole suite over marked sources: each mark notes the test that passes it, in whichever process."""
    copy = copy_of_repository(work / "marked")
    (copy / "plugin" / "guard_notes.py").write_text(NOTES)
    numbered: dict[str, dict[int, Site]] = defaultdict(dict)
    for number, (site, _) in enumerate(read()):
        numbered[site.file][number] = site
    for file, sites in numbered.items():
        (copy / file).write_text(marked((copy / file).read_text(), sites))
    for name in ("hits", "seconds"):
        (work / name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-n", "2", "--dist", "loadfile", "--no-header"]
    with (work / "cover.log").open("w") as log:
        subprocess.run(command, cwd=copy, env=environment(copy, work), stdout=log, stderr=log, check=False)
    print((work / "cover.log").read_text().splitlines()[-1])


def environment(copy: Path, work: Path) -> dict[str, str]:
    path = os.pathsep.join([str(copy / "plugin"), str(copy)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GUARD_WORK": str(work)}


def run(work: Path, only: list[int] | None) -> None:
    mutants, tests = read(), tests_of_marks(work)
    copy = copy_of_repository(work / "mutated")
    os.environ.update(environment(copy, work))
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    warm_up()
    for number, (site, _) in enumerate(mutants):
        if only and number not in only:
            continue
        began, source = time.monotonic(), copy / site.file
        kept, times = source.read_text(), source.stat()
        source.write_text(site.applied_to(kept))
        # A time of its own: the compiled form of another mutant of this file is not taken for it.
        os.utime(source, (times.st_atime, times.st_mtime + number + 1))
        try:
            killer = first_failure(copy, tests[number], work)
        finally:
            source.write_text(kept)
            os.utime(source, (times.st_atime, times.st_mtime))
        mutants[number] = (site, killer)
        write(mutants)
        took = time.monotonic() - began
        print(f"{number:4d} {len(tests[number]):4d} tests {took:6.1f} s  {killer or 'SURVIVES'}", flush=True)
    killers = sorted({killer for _, killer in mutants if "::" in killer})
    if innocent := first_failure(copy, killers, work, seconds=3600):
        sys.exit(f"{innocent} fails without a mutant, too")
    print(f"killed: {sum(bool(killer) for _, killer in mutants)} of {len(mutants)}")


def tests_of_marks(work: Path) -> dict[int, list[str]]:
    """For each mutant the tests to try, the fastest first."""
    seconds: dict[str, float] = defaultdict(float)
    passed = set()
    for line in (work / "seconds").read_text().splitlines():
        took, when, test = line.split("\t")
        seconds[test] += float(took)
        if when == "call":
            passed.add(test)
    passing: dict[int, set[str]] = defaultdict(set)
    for line in (work / "hits").read_text().splitlines():
        mark, test = line.split("\t")
        if test in passed:
            passing[int(mark)].add(test)
    chosen: dict[int, list[str]] = defaultdict(list)
    for number, tests in passing.items():
        total = 0.0
        for test in sorted(tests, key=lambda test: (seconds[test], test))[:TESTS]:
            total += seconds[test]
            if total <= USUAL_SECONDS:
                chosen[number].append(test)
    return chosen


def warm_up() -> None:
    """Import what all tests import but the package, once, for the processes that are forked from this one."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert "torchrl_lightning" not in sys.modules
    sys.modules["torch"].set_num_threads(1)


def first_failure(copy: Path, tests: list[str], work: Path, seconds: float = SECONDS) -> str:
    """Run tests in a fork of this process until one fails; return its name, ``hang``, or nothing."""
    if not tests:
        return ""
    failed = work / "failed"
    failed.unlink(missing_ok=True)
    (work / "tests").write_text("\n".join(tests))
    child = multiprocessing.get_context("fork").Process(target=run_until_one_fails, args=(copy, tests, work))
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return "hang"
    if child.exitcode == 0:
        return ""
    return failed.read_text() if failed.exists() else f"exit status {child.exitcode}"


def run_until_one_fails(copy: Path, tests: list[str], work: Path) -> None:
    os.setsid()
    os.chdir(copy)
    log = os.open(work / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GUARD_TESTS"] = str(work / "tests")
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider"]
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    os._exit(sys.modules["pytest"].main(["-x", *OPTIONS, *ignored, *files]))


if __name__ == "__main__":
    main()
