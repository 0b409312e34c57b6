"""Every command that the README shows runs as it is written there, if it trains with less to do at its end."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import yaml
from hydra.utils import instantiate
from joblib.externals.loky import get_reusable_executor
from torchrl.envs import EnvBase

from cli.commands import LAST_LINE, Done, call, last_line
from kit.extras import need_extra
from kit.processes import PROJECT
from kit.states import differences
from torchrl_lightning._conf import CONF_DIR
from torchrl_lightning.cli.sweeps import read_trials

README = (PROJECT / "README.md").read_text()
SCRIPTS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
LINES = [line for language, block in FENCES if language == "bash" for line in block.splitlines()]
# .ci/run installs, and this is the test command.
COMMANDS = [line for line in LINES if not re.match(r"python3 -m venv |pip install |pytest ", line)]
FIRST, *OTHERS = COMMANDS
# How the folder of a run begins; else by the experiment that is trained if no other is named.
NAMES = {
    "data=vanilla": "a2c_cartpole_vanilla",
    "data=ppod": "ppo_cartpole_ppod",
    "=ppo_pendulum": "ppo_pendulum",
    "=ppod_mountaincar": "ppod_mountaincar",
    "=ddpg_her_fetchreach": "ddpg_her_fetchreach",
}


def run_line(line: str, folder: Path, frames: int, run: Path | None = None) -> Done:
    """Run a line as a shell would; if it trains, with fewer frames and episodes behind it."""
    script, *arguments = shlex.split(line if run is None else line.replace("RUN", str(run)), comments=True)
    module, _, function = SCRIPTS[script].partition(":")
    assert function == "main"
    trains = module.endswith(".train") and "--help" not in arguments
    few = [f"data.total_frames={frames}", "eval_episodes=2"] if trains else []
    if trains and line != FIRST:  # whose folder has no other name than the README says
        few.append("data.eval_episodes=2")
    done = call(module.rpartition(".")[2], *arguments, *few, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def blocks(language: str, section: str) -> list[str]:
    """Return what a section of the README fences in this language."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def runs_below(folder: Path) -> set[Path]:
    return {path.parents[1] for path in folder.glob("logs/train/**/csv/metrics.csv")}


@pytest.fixture(scope="module", autouse=True)
def no_workers_left() -> Iterator[None]:
    yield
    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Done]:
    """The working directory, the folder of the first command's run, and what it said."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(PROJECT / "examples" / "own_environment.py", folder)
    (folder / "env").mkdir()
    (folder / "env" / "treasure.yaml").write_text(blocks("yaml", "Your own environment")[0])
    done = run_line(FIRST, folder, 1024)
    (run,) = runs_below(folder)
    return folder, run.relative_to(folder), done


def test_nothing_that_is_fenced_is_left_out():
    assert {language for language, _ in FENCES} <= {"bash", "python", "yaml", "text"}
    assert FIRST == "torchrl-lightning-train"
    assert {shlex.split(line, comments=True)[0] for line in COMMANDS} == set(SCRIPTS)
    assert sum("--multirun" in line or "hparams_search" in line for line in OTHERS) == 3


def test_the_first_command_leaves_what_the_readme_says(first):
    folder, run, done = first
    assert last_line(done.stdout)[4] == "1024"
    assert run.parts[:-1] == ("logs", "train", "ppo_cartpole", "seed_0")
    assert run.parts[-1][:3] == "202"
    for left in (
        ".hydra/config.yaml",
        "csv/metrics.csv",
        "curve.png",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
    ):
        assert (folder / run / left).is_file(), left


def env_of_experiment(line: str) -> str:
    named = re.search(r" experiment=(\w+)", line)
    text = "" if named is None else (CONF_DIR / "experiment" / f"{named[1]}.yaml").read_text()
    return (re.findall(r"override /env: (\w+)", text) or [""])[0]


# Optuna 2, which Hydra's sweeper asks for, speaks to SQLAlchemy 1.
@pytest.mark.filterwarnings("ignore:Deprecated API features detected")
@pytest.mark.parametrize("line", OTHERS, ids=range(len(OTHERS)))
def test_a_command_of_the_readme_runs_as_it_is_written(line, first):
    need_extra((re.findall(r" env=(\w+)", line) or [env_of_experiment(line)])[0])
    folder, run, _ = first
    before = runs_below(folder)
    resumed = "last.ckpt" in line
    done = run_line(line, folder, 2048 if resumed else 1024, run)
    new = runs_below(folder) - before
    if "torchrl-lightning-train" not in line or "--help" in line:
        assert not new
        left = {"evaluate": "logs/evaluate/*/returns.png", "plot": "curves.png"}
        for name, pattern in left.items():
            if f"torchrl-lightning-{name}" in line:
                assert len(list(folder.glob(pattern))) == 1
        return
    assert "~experiment" not in line or "note:" not in done.stderr
    jobs = 3 if "seed=0,1,2" in line else int(re.search(r"n_trials=(\d+)|$", line)[1] or 1)
    assert len(new) == jobs
    for made in new:
        settings = yaml.safe_load((made / ".hydra" / "config.yaml").read_text())
        name, seed = made.parts[-3:-1]
        assert seed == f"seed_{settings['seed']}"
        assert name.startswith(
            next((start for part, start in NAMES.items() if part in line), "ppo_cartpole"),
        )
    if jobs == 3:
        assert {made.parts[-2:] for made in new} == {("seed_0", "0"), ("seed_1", "1"), ("seed_2", "2")}
        learnt = [torch.load(made / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for made in new]
        assert differences(learnt[0], learnt[1])
    if "joblib" not in line:  # its workers speak for themselves
        assert done.stdout.count("mean evaluation return") == jobs
    if "hparams_search" in line:
        (found,) = folder.glob("logs/train/sweep_*/optimization_results.yaml")
        printed = [float(match[0]) for match in re.findall(LAST_LINE, done.stdout)]
        scores = [trial.score for trial in read_trials([found.parent])]
        assert scores == pytest.approx(sorted(printed, reverse=True), abs=0.05)
        assert set(yaml.safe_load(found.read_text())["best_params"]) == {
            "model.learning_rate",
            "model.clip_epsilon",
            "data.num_epochs",
        }
    if resumed:
        assert last_line(done.stdout)[4] == "2048"


def shown(env: gymnasium.Env | EnvBase) -> object:
    return env.observation_spec if isinstance(env, EnvBase) else env.observation_space


def test_an_own_environment_is_the_same_on_the_command_line_and_in_python(first, monkeypatch):
    folder, *_ = first
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    made: dict[str, Any] = {}
    exec(blocks("python", "Your own environment")[0], made)
    written = [made[name] for name in ("hopper", "acrobot", "pendulum", "treasure")]
    assert made["data"].num_envs == 8
    (lines,) = blocks("bash", "Your own environment")
    for line, recipe in zip(lines.splitlines(), written, strict=True):
        said = call("train", *shlex.split(line)[1:], "--cfg", "job", "--package", "data.env", cwd=folder).stdout
        composed = instantiate(yaml.safe_load(said))
        with contextlib.suppress(gymnasium.error.DependencyNotInstalled):
            assert shown(composed()) == shown(recipe())


def test_a_trained_policy_is_loaded_as_the_readme_says(first, monkeypatch):
    folder, run, _ = first
    monkeypatch.chdir(folder)
    made: dict[str, Any] = {}
    (python,) = blocks("python", "Load a trained policy")
    exec(python.replace("RUN", str(run)), made)
    assert made["action"] in (0, 1)
    assert made["action"].shape == made["policy"].specs.action.shape == ()
