"""Timing of contenders on a shared machine.

All contenders of a comparison run interleaved in one process. Each round starts with another contender, so other load
on the machine affects all contenders equally. A repetition is long enough for the resolution of the clock. The report
contains the median, the quartiles and the fastest repetition. Garbage collection is off during the timing, and all code
runs on one thread.

Call :func:`one_thread` before the import of torch, numpy or jax.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

Contender = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    name: str
    median: float
    low: float  # first quartile
    high: float  # third quartile
    fastest: float


def one_thread(pin: bool = True) -> None:
    """Limit each thread pool of this process to one thread; pin the process to one core if ``pin`` is true.

    Each library then selects its code for the processor, even if variables of the machine select other code.
    """
    for name in [*os.environ]:
        if name.startswith(("OPENBLAS_", "MKL_", "ATEN_CPU", "ONEDNN_", "NUMBA_CPU", "NPY_DISABLE", "NPY_ENABLE")):
            del os.environ[name]
    for name in ("OMP", "MKL", "OPENBLAS", "NUMBA", "VECLIB_MAXIMUM"):
        os.environ[f"{name}_NUM_THREADS"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if pin and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def compare(
    contenders: Mapping[str, Contender],
    *,
    repetitions: int = 11,
    seconds: float = 0.03,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Time all contenders, interleaved with a rotating start. Each repetition takes about ``seconds``.

    The clock ``time.process_time`` excludes the time of other processes on the same core.
    """
    names = list(contenders)
    calls = {name: _calls_in(contenders[name], seconds, clock) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for repetition in range(repetitions):
            start = repetition % len(names)
            for name in names[start:] + names[:start]:
                samples[name].append(_time(contenders[name], calls[name], clock))
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    return [_summary(name, samples[name]) for name in names]


def _calls_in(contender: Contender, seconds: float, clock: Clock) -> int:
    contender()  # the first call compiles and allocates
    calls = 1
    while True:
        spent = _time(contender, calls, clock) * calls * 1e-6
        if spent > seconds / 4 or calls >= 1_000_000:
            return max(1, round(calls * seconds / max(spent, 1e-9)))
        calls *= 4


def _time(contender: Contender, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        contender()
    return (clock() - start) / calls * 1e6


def _summary(name: str, samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(name, median, low, high, min(samples))


def table(title: str, timings: list[Timing], reference: str) -> str:
    """Format the timings as a table, fastest first, with their ratio to the reference."""
    base = next(timing.median for timing in timings if timing.name == reference)
    lines = [title, f"  {'':<34}{'median us':>11}{'quartiles':>22}{'fastest':>11}{'ratio':>9}"]
    for timing in sorted(timings, key=lambda timing: timing.median):
        quartiles = f"{timing.low:.1f} - {timing.high:.1f}"
        row = f"  {timing.name:<34}{timing.median:>11.1f}{quartiles:>22}{timing.fastest:>11.1f}"
        lines.append(f"{row}{timing.median / base:>9.2f}")
    return "\n".join(lines)


def say(text: str) -> None:
    """Print a line and flush it, so that a long benchmark displays its progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_json(path: Path, results: Mapping[str, list[Timing]]) -> None:
    """Write the timings of several comparisons and the description of the machine."""
    content = {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "microseconds": {title: [asdict(timing) for timing in timings] for title, timings in results.items()},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
