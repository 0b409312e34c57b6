"""TAB completion runs the command's module, and --help is asked for often: neither may load torch or take long."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from kit.processes import environment
from torchrl_lightning._conf import CONF_DIR

HEAVY = ("torch", "lightning", "gymnasium", "matplotlib", "numba")

# All in one process: what one command imports, the next one would show.
SCRIPT = """
import importlib, resource, sys
def check(what):
    loaded = [heavy for heavy in HEAVY if heavy in sys.modules]
    assert not loaded, (what, loaded)
for name in ("train", "evaluate", "record", "plot"):
    module = importlib.import_module("torchrl_lightning.cli." + name)
    for arguments in (["--help"], ["--cfg", "job"]) if name != "plot" else (["--help"],):
        sys.argv = ["x", *arguments]
        try:
            module.main()
        except SystemExit as end:
            assert not end.code, end.code
        check((name, arguments))
        if arguments == ["--help"] and name == "train":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            assert usage.ru_utime + usage.ru_stime < 1.0, usage
"""


def test_nothing_heavy_is_imported_before_a_run_begins_and_help_takes_no_second():
    script = SCRIPT.replace("HEAVY", repr(HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_groups_with_their_options_and_no_internals(run):
    said = run("train", "--help").stdout
    for group in ("data", "env", "model", "model/network", "trainer", "callbacks", "logger", "experiment", "debug"):
        options = {path.stem for path in (CONF_DIR / ("export" if group == "data" else "") / group).glob("*.yaml")}
        listed = said.partition(f"\n  {group} ")[2].partition("\n  ")[2]
        words = {word.rstrip("*") for word in listed.replace("\n" + " " * 20, " ").partition("\n")[0].split()}
        assert words == options - ({"default"} if group == "model" else set()), group
    assert "gae*" in said
    assert "schema" not in said
    assert "export/" not in said
    assert said.count("  torchrl-lightning-train ") == 3
    assert max(map(len, said.splitlines())) <= 130


@pytest.mark.parametrize("name", ["train", "evaluate", "record"])
def test_help_shows_main_settings_with_the_values_that_a_run_would_have(run, name):
    said = run(name, "-h").stdout.partition("FIELD=VALUE")[2].splitlines()
    config = OmegaConf.create(run(name, "--cfg", "job").stdout)
    shown = {}
    for line in said:
        if line.startswith("  "):
            setting, _, meaning = line.strip().partition("  ")
            key, _, value = setting.partition("=")
            shown[key] = value
            assert meaning.strip(), line
            told = OmegaConf.to_container(config, resolve=False)
            for part in key.split("."):
                told = told[part]
            assert told == yaml.safe_load(value), key
    main = {
        "train": {
            "seed",
            "ckpt_path",
            "data.total_frames",
            "data.num_envs",
            "data.buffer.gamma",
            "model.learning_rate",
        },
        "evaluate": {"ckpt_path", "seed", "deterministic", "video"},
        "record": {"ckpt_path", "policy", "episodes", "min_return", "directory", "table"},
    }
    assert main[name] <= set(shown)


def test_help_of_evaluate_asks_for_a_checkpoint(run):
    assert "ckpt_path=???" in run("evaluate", "--help").stdout
