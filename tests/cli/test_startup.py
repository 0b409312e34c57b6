"""Commands import only the modules that they need, and --help is fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from kit.processes import environment
from torchrl_lightning._hydra.paths import CONF_DIR

HERE = Path(__file__).parent
HEAVY = ("torch", "lightning", "gymnasium", "matplotlib", "numba")

# One process runs all commands, because each check also detects the imports of earlier commands.
SCRIPT = """
import importlib, resource, sys
def check(what):
    loaded = [heavy for heavy in HEAVY if heavy in sys.modules]
    assert not loaded, (what, loaded)
for name in ("train", "evaluate", "record", "plot", "export"):
    module = importlib.import_module("torchrl_lightning.cli." + name)
    for arguments in (["--help"], ["--cfg", "job"]) if name not in ("plot", "export") else (["--help"],):
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


def started(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # A console script also runs without the working directory on its import path.
    return subprocess.run(
        [sys.executable, "-P", *command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=600
    )


def test_heavy_modules_are_imported_late_and_help_is_fast(tmp_path):
    done = started("-c", SCRIPT.replace("HEAVY", repr(HEAVY)), folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    app = HERE.parent / "conf" / "torchrl_app"
    return started(str(HERE / "fresh_process.py"), str(app), folder=tmp_path_factory.mktemp("fresh"))


def test_mistake_ends_a_process_with_status_one_and_one_line(fresh):
    # The other tests run commands in the process of the tests, so only this one checks the real exit.
    assert (fresh.returncode, len(fresh.stdout.splitlines())) == (1, 1), fresh.stdout
    assert [line[:5] for line in fresh.stderr.splitlines()] == ["error"]


def test_unneeded_modules_are_never_imported(fresh):
    assert json.loads(fresh.stdout)["imported"] == []


def test_later_imports_get_the_real_modules(fresh):
    assert json.loads(fresh.stdout)["stubs"] == []


def test_data_composes_beside_torchrls_groups(fresh):
    app = json.loads(fresh.stdout)["app"]
    assert {name: app[name]["_target_"] for name in ("data", "buffer_storage", "buffer_sampler", "logger")} == {
        "data": "torchrl_lightning.OnPolicyDataModule",
        "buffer_storage": "torchrl.data.replay_buffers.LazyTensorStorage",
        "buffer_sampler": "torchrl_lightning.MinibatchSampler",
        "logger": "torchrl.record.loggers.csv.CSVLogger",
    }
    assert app["data"]["buffer"]["_target_"] == "torchrl_lightning.GAEBuffer"
    assert app["logger"]["log_dir"] == "own_logs"


def test_help_lists_groups_with_their_options_and_no_internals(run):
    said = run("train", "--help").stdout
    for group in ("data", "env", "model", "model/network", "trainer", "callbacks", "logger", "experiment", "debug"):
        options = {path.stem for path in (CONF_DIR / group).glob("*.yaml")}
        listed = said.partition(f"\n  {group} ")[2].partition("\n  ")[2]
        words = {word.rstrip("*") for word in listed.replace("\n" + " " * 20, " ").partition("\n")[0].split()}
        assert words == options - ({"default"} if group == "model" else set()), group
    assert "gae*" in said
    assert "schema" not in said
    assert "export/" not in said
    assert said.count("  torchrl-lightning-train ") == 3
    assert max(map(len, said.splitlines())) <= 130


MAIN_SETTINGS = {
    "train": {"seed", "ckpt_path", "data.total_frames", "data.num_envs", "data.buffer.gamma", "model.learning_rate"},
    "evaluate": {"ckpt_path", "seed", "deterministic", "video"},
    "record": {"ckpt_path", "policy", "episodes", "min_return", "directory", "table"},
}


@pytest.mark.parametrize("name", MAIN_SETTINGS)
def test_help_shows_main_settings_with_the_values_that_a_run_would_have(run, name):
    said = run(name, "-h").stdout.partition("FIELD=VALUE")[2].splitlines()
    config = OmegaConf.to_container(OmegaConf.create(run(name, "--cfg", "job").stdout), resolve=False)
    shown = {}
    for line in (line for line in said if line.startswith("  ")):
        setting, _, meaning = line.strip().partition("  ")
        key, _, shown[key] = setting.partition("=")
        assert meaning.strip(), line
    assert MAIN_SETTINGS[name] <= set(shown)
    for key, value in shown.items():
        told = config
        for part in key.split("."):
            told = told[part]
        assert told == yaml.safe_load(value), key
    assert name != "evaluate" or shown["ckpt_path"] == "???"
