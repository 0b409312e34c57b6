"""Run the tests against small faults in the package: each mutant in ``mutants.toml`` must make a test fail.

    python -m tests.mutants                  # all mutants, two at a time
    python -m tests.mutants 3 17 --jobs 1    # mutants number 3 and 17
    python -m tests.mutants draw 150 --seed 1  # print 150 random places of the package for new mutants

A mutant replaces one text, which occurs once in a file, and names the test files that must notice the change. It is
killed if a test fails, crashes or does not end, and passes without the mutant. If the tests cannot be imported with
the mutant, its result is "not tested". The exit status is 1 if a mutant is not killed.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.listed import PACKAGE, ROOT, Mutant, read_mutants

SECONDS = 240  # time limit of the tests, because a mutant may wait forever
PASSED, FAILED = 0, 1  # exit statuses of pytest
KILLS = ("killed", "timed out", "crashed")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
LIBRARIES = (
    "gymnasium", "hypothesis", "lightning", "numba", "pytest", "tensordict", "torch", "torchrl.collectors",
    "torchrl.data", "torchrl.envs", "torchrl.modules", "torchrl.objectives",
)  # fmt: skip
MUTABLE = (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.AugAssign, ast.Slice)
CALLS = {
    "min",
    "max",
    "any",
    "all",
    "sum",
    "mean",
    "clamp",
    "clip",
    "minimum",
    "maximum",
    "cumsum",
    "where",
    "copy",
    "clone",
}


def main() -> None:
    """Run the mutants that the command line names, or print random places."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("numbers", nargs="*", help="the numbers of the mutants (default: all), or draw COUNT")
    arguments.add_argument("--jobs", type=int, default=2, help="number of mutants to run in parallel")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the random places")
    options = arguments.parse_args()
    if options.numbers[:1] == ["draw"]:
        print("\n".join(draw_places(int(options.numbers[1]), options.seed)))
        return
    mutants = dict(enumerate(read_mutants()))
    chosen = {int(number): mutants[int(number)] for number in options.numbers} or mutants
    if outdated := [f"{number:4d} {error}" for number, mutant in chosen.items() if (error := mutant.error(ROOT))]:
        sys.exit("\n".join(["mutants.toml must fit the code. Update these mutants:", *outdated]))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        survivors = run_mutants(chosen, Path(folder), options.jobs)
    seconds = time.monotonic() - began
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed in {seconds:.0f} s")
    if survivors:
        print("not killed:", ", ".join(map(str, survivors)))
    sys.exit(bool(survivors))


def run_mutants(mutants: dict[int, Mutant], folder: Path, jobs: int) -> list[int]:
    """Try each mutant in one of ``jobs`` copies of the repository; return the numbers of the mutants not killed.

    Each mutant is tried in a fork of this process, because new imports of the libraries take longer than the tests.
    """
    preload_libraries()
    free = [copy_repository(folder / str(job)) for job in range(jobs)]
    waiting, running, survivors = list(mutants), list[Trial](), list[int]()
    try:
        while waiting or running:
            while waiting and free:
                number = waiting.pop(0)
                running.append(Trial(number, mutants[number], free.pop()))
            time.sleep(0.05)
            for trial in [trial for trial in running if trial.is_over()]:
                running.remove(trial)
                free.append(trial.copy)
                print(trial.describe(), flush=True)
                if trial.result not in KILLS:
                    survivors.append(trial.number)
    finally:
        for trial in running:
            trial.run.kill()
    return sorted(survivors)


def preload_libraries() -> None:
    """Import the libraries, but neither the package nor its tests."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def copy_repository(folder: Path) -> Path:
    """Copy all files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compileall.compile_dir(folder / PACKAGE, quiet=1)  # tests write no bytecode, which would contain mutants
    return folder


class Trial:
    """Run the tests of a mutant in a copy of the repository, then the failed test again without the mutant.

    The second run confirms that the mutant is the reason. Afterwards the copy is unchanged.

    Args:
        number: The mutant's number.
        mutant: The mutant.
        copy: The folder of the copy.
    """

    def __init__(self, number: int, mutant: Mutant, copy: Path) -> None:
        self.number, self.mutant, self.copy, self.result, self.reason = number, mutant, copy, "", ""
        self._began, self._file = time.monotonic(), copy / mutant.file
        self._source, self._times = self._file.read_text(), self._file.stat()
        # Numba does not notice a change of a function that it compiled into another one.
        self._cache = tempfile.TemporaryDirectory(dir=copy) if "kernels" in self._file.parts else None
        self._file.write_text(mutant.apply_to(self._source))
        self.run = PytestRun(copy, mutant.tests, self._cache.name if self._cache else str(copy / ".numba"))

    def is_over(self) -> bool:
        """Return True if both runs have ended. The second one begins after the first one."""
        if not self.run.is_over():
            return False
        if self.result:
            if self.run.outcome != "survived":
                self.result = "not tested"
                self.reason = f"{self.reason} also fails without the mutant:\n{self.run.read_output()}"
            return True
        self._restore()
        self.result, self.reason = self.run.outcome, self.run.failed_test
        if self.result not in KILLS:
            if self.result != "survived":
                self.reason = self.run.read_output()
            return True
        self.run = PytestRun(self.copy, [self.reason] if self.reason else self.mutant.tests, str(self.copy / ".numba"))
        return False

    def describe(self) -> str:
        """Return a line with the mutant, its result and the test that killed it."""
        seconds, change = time.monotonic() - self._began, " ".join(self.mutant.replacement.split()) or "(removed)"
        return f"{self.number:4d} {seconds:6.1f} s  {self.result:10s} {self.mutant.file.name}: {change}  {self.reason}"

    def _restore(self) -> None:
        self._file.write_text(self._source)
        os.utime(self._file, (self._times.st_atime, self._times.st_mtime))
        if self._cache is not None:
            self._cache.cleanup()


class PytestRun:
    """Run tests of a copy in a fork of this process.

    Args:
        copy: The folder of the copy.
        tests: The tests.
        cache: The folder of compiled functions.
    """

    def __init__(self, copy: Path, tests: Sequence[str], cache: str) -> None:
        self.outcome = ""
        self._began, self._output = time.monotonic(), copy / "output.txt"
        self._output.write_text("")
        sys.stdout.flush()
        self._process = os.fork()
        if not self._process:
            run_tests(copy, tests, self._output, cache)

    def is_over(self) -> bool:
        """Return True if the tests have ended; kill them after ``SECONDS``."""
        if time.monotonic() - self._began > SECONDS:
            self.kill()
            self.outcome = "timed out"
            return True
        process, status = os.waitpid(self._process, os.WNOHANG)
        if process:
            self._end_group()
            self.outcome = self._judge(os.waitstatus_to_exitcode(status))
        return bool(process)

    def kill(self) -> None:
        """End the tests and the processes that they started."""
        self._end_group()
        os.waitpid(self._process, 0)

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)

    def _judge(self, code: int) -> str:
        if code == PASSED:
            return "survived"
        if code == FAILED and self.failed_test:
            return "killed"
        # The system sends SIGKILL if memory is short. This is not a result of the mutant.
        return "crashed" if code < 0 and code != -signal.SIGKILL else "not tested"

    @property
    def failed_test(self) -> str:
        """The first failed test, or an empty string. A file that cannot be imported is not a test."""
        found = re.search(r"^(?:FAILED|ERROR) (\S+\.py::.*?)(?: - .*)?$", self._output.read_text(), re.MULTILINE)
        return found[1] if found else ""

    def read_output(self) -> str:
        """Return the end of the tests' output."""
        return self._output.read_text()[-2000:]


def run_tests(copy: Path, tests: Sequence[str], output: Path, cache: str) -> None:
    """Run tests of a copy in this process, and end it."""
    code = 3
    try:
        os.setsid()
        with output.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(copy)
        paths = [str(copy / "plugin"), str(copy)]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": cache}
        sys.dont_write_bytecode = True
        here = {ROOT, ROOT / "plugin", ROOT / "tests"}
        sys.path[:] = [*paths, *(path for path in sys.path if path and Path(path) not in here)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        importlib.import_module("numba").config.CACHE_DIR = cache
        code = int(importlib.import_module("pytest").main([*OPTIONS, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def draw_places(count: int, seed: int) -> list[str]:
    """Draw lines of functions of the package at random, each with the text of one expression or statement on it."""
    places = set()
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        source = file.read_text()
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                for node in (node for statement in function.body for node in ast.walk(statement)):
                    if is_mutable(node):
                        text = " ".join(str(ast.get_source_segment(source, node)).split())
                        places.add(f"{file.relative_to(ROOT)}:{node.lineno}: {text[:100]}")
    return random.Random(seed).sample(sorted(places), count)


def is_mutable(node: ast.AST) -> bool:
    """Return True if a small change of a node makes its result wrong."""
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in CALLS
    return isinstance(node, MUTABLE)


if __name__ == "__main__":
    main()
