"""TAB completion runs the command's module, and --help is asked for often: neither may load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from configs.processes import environment

HEAVY = ("torch", "lightning", "gymnasium", "matplotlib", "numba")


@pytest.mark.parametrize("name", ["train", "evaluate"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--cfg", "job"]])
def test_nothing_heavy_is_imported_before_a_run_begins(name, arguments):
    call = f"sys.argv = ['x', *{arguments!r}]\ntry: module.main()\nexcept SystemExit: pass\n" if arguments else ""
    script = (
        f"import sys; import torchrl_lightning.cli.{name} as module\n{call}"
        f"sys.exit(str([heavy for heavy in {HEAVY!r} if heavy in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "[]"


def test_help_lists_groups_and_commands(run):
    said = run("train", "--help").stdout
    assert "experiment: a2c_cartpole" in said
    assert said.count("  torchrl-lightning-train ") == 3
    assert len(said.splitlines()) < 40
    assert "ckpt_path: ???" in run("evaluate", "--help").stdout
