"""The compilation of kernels is logged, because it can take many seconds."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from torchrl_lightning.kernels import compiled


def divider(number: int) -> Callable[[float], float]:
    """Build a function without a source file, which numba compiles again in every process."""
    namespace: dict[str, Any] = {}
    exec(f"def divide(x): return x / {number}", namespace)
    return namespace["divide"]


PROGRAM = """
import logging
from torchrl_lightning.kernels.compiled import jitted
logging.basicConfig(level=logging.INFO, format="%(message)s")
def double(x):
    return 2 * x
assert jitted(double)(1.5) == 3.0
assert jitted(double)(2) == 4
"""


def test_compilation_is_logged_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    program = tmp_path / "program.py"  # numba does not cache functions from a command line
    program.write_text(PROGRAM)
    logs = [
        subprocess.run([sys.executable, program], check=True, capture_output=True, text=True).stderr for _ in range(2)
    ]
    assert logs == ["Compiling (first run only): kernels are compiled once and cached on disk.\n", ""]


def test_compilation_calls_the_callback_instead_of_logging(caplog):
    caplog.set_level(logging.INFO)
    calls: list[None] = []
    remove_callback = compiled.when_compiling(lambda: calls.append(None))

    assert compiled.jitted(divider(2))(3.0) == 1.5
    assert len(calls) == 1
    remove_callback()
    assert compiled.jitted(divider(3))(3.0) == 1.0
    assert len(calls) == 1
    assert not [record for record in caplog.records if record.name == compiled.__name__][1:]
