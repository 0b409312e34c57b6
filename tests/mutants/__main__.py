"""Run the tests against small faults in the package: each mutant in ``mutants.toml`` must make a test fail.

    python -m tests.mutants                  # all mutants, two at a time
    python -m tests.mutants 3 17 --jobs 1    # mutants number 3 and 17
    python -m tests.mutants draw 150 --seed 1  # print 150 random places of the package for new mutants

A mutant replaces one text, which occurs once in a file, by another and names the test files that must notice it.
The exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.listed import PACKAGE, ROOT, Mutant, read_mutants

SECONDS = 240  # after which a mutant counts as killed: it does not end
KILLED, PASSED = 1, 0  # exit statuses of pytest
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
    arguments.add_argument("numbers", nargs="*", help="numbers of mutants, all by default; or: draw COUNT")
    arguments.add_argument("--jobs", type=int, default=2, help="mutants that are tried at the same time")
    arguments.add_argument("--seed", type=int, default=0, help="of the places that are drawn")
    options = arguments.parse_args()
    if options.numbers[:1] == ["draw"]:
        print("\n".join(draw_places(int(options.numbers[1]), options.seed)))
        return
    mutants = dict(enumerate(read_mutants()))
    numbers = [int(number) for number in options.numbers] or list(mutants)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        survivors = run_mutants({number: mutants[number] for number in numbers}, Path(folder), options.jobs)
    seconds = time.monotonic() - began
    print(f"{len(numbers) - len(survivors)} of {len(numbers)} mutants killed in {seconds:.0f} s")
    if survivors:
        print("survivors:", ", ".join(map(str, survivors)))
    sys.exit(bool(survivors))


def run_mutants(mutants: dict[int, Mutant], folder: Path, jobs: int) -> list[int]:
    """Try each mutant in one of ``jobs`` copies of the repository; return the numbers of the survivors."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for job in range(jobs):
        copies.put(copy_repository(folder / str(job)))

    def is_killed(number: int) -> bool:
        copy, began = copies.get(), time.monotonic()
        try:
            result = run_mutant(copy, mutants[number])
        finally:
            copies.put(copy)
        seconds, mutant = time.monotonic() - began, mutants[number]
        print(f"{number:4d} {seconds:6.1f} s  {result:10s} {mutant.file}: {mutant.replacement.strip()}", flush=True)
        return result != "survived"

    with ThreadPoolExecutor(jobs) as pool:
        killed = dict(zip(mutants, pool.map(is_killed, mutants), strict=True))
    return [number for number, is_dead in killed.items() if not is_dead]


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
    return folder


def run_mutant(copy: Path, mutant: Mutant) -> str:
    """Run the tests of a mutant in a copy of the repository, which is the same afterwards."""
    file = copy / mutant.file
    source, times = file.read_text(), file.stat()
    # Numba does not see that a function which it compiled into another one has changed.
    cache = tempfile.TemporaryDirectory(dir=copy) if "kernels" in file.parts else None
    file.write_text(mutant.apply_to(source))
    path = os.pathsep.join([str(copy / "plugin"), str(copy)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["NUMBA_CACHE_DIR"] = cache.name if cache else str(copy / ".numba")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    try:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timed out"
    finally:
        file.write_text(source)
        os.utime(file, (times.st_atime, times.st_mtime))
        if cache is not None:
            cache.cleanup()
    if process.returncode == PASSED:
        return "survived"
    if process.returncode == KILLED or "error" in output.rpartition("\n=")[2] or process.returncode < 0:
        return "killed"
    raise RuntimeError(f"The tests of {mutant} did not run:\n{output[-2000:]}")


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
    """Return whether a node computes something that a small change makes wrong."""
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in CALLS
    return isinstance(node, MUTABLE)


if __name__ == "__main__":
    main()
