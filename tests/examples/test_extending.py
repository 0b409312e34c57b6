"""A user's parts in separate files work from YAML in the commands, with the same checks and messages as our parts."""

from __future__ import annotations

import ast
import shlex
import shutil
from pathlib import Path

import pytest

from cli.commands import Done, call, last_line
from kit.processes import PROJECT

EXTENDING = PROJECT / "examples" / "extending"
ROLLOUTS = ("data.frames_per_batch=128", "data.mini_batch_size=64", "data.total_frames=256")
REPLAY = ("data.warmup_frames=100", "data.updates_per_epoch=100", "data.total_frames=300")
SMALL = {"sampler": REPLAY, "agent": ROLLOUTS, "network": ROLLOUTS, "buffer": ROLLOUTS}
TINY = ("data.num_envs=4", "data.eval_episodes=2", "eval_episodes=2", "logger=none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the user's folder, because runs write into it."""
    return Path(shutil.copytree(EXTENDING, tmp_path / "hers", ignore=shutil.ignore_patterns("logs", "__pycache__")))


def command(part: str) -> list[str]:
    """Return the arguments of the command in the part's docstring."""
    said = ast.get_docstring(ast.parse((EXTENDING / f"{part}.py").read_text())) or ""
    return shlex.split(said.partition("torchrl-lightning-train ")[2])


def train(folder: Path, part: str, *settings: str) -> Done:
    return call("train", *command(part), *TINY, *SMALL[part], *settings, cwd=folder)


@pytest.mark.parametrize("part", SMALL)
def test_part_is_trained_resumed_and_evaluated(part, folder):
    done = train(folder, part, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("to resume or evaluate it, set trusted=true") == 1
    resume = ("train", "--config-dir", ".", "ckpt_path=run/checkpoints/last.ckpt", "data.total_frames=512")
    evaluate = ("evaluate", "ckpt_path=run/checkpoints/last.ckpt", "episodes=2")
    for command in (resume, evaluate):
        refused = call(*command, cwd=folder)
        assert refused.returncode == 1
        assert "is none of the classes that a file may name; if you trust" in refused.stderr
    played = call(*evaluate, "trusted=true", cwd=folder)
    assert played.returncode == 0, played.stderr
    resumed = call(*resume, "trusted=true", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert last_line(resumed.stdout)[4] == "512"


@pytest.mark.parametrize(
    ("part", "setting", "message"),
    [
        (
            "sampler",
            "data.buffer.sampler.contenders=0",
            "data.buffer.sampler.contenders=0: contenders must be at le",
        ),
        (
            "sampler",
            "+data.buffer.sampler.contendrs=3",
            "data.buffer.sampler: TournamentSampler.__init__() got an un",
        ),
        ("agent", "model.temperature=-1", "model.temperature=-1: temperature must be above 0, got -1."),
        ("agent", "+model.temprature=1", "model: AWRModule has no setting 'temprature'; did you mean temperature?"),
        (
            "agent",
            "data=uniform",
            "AWRModule does not learn from the ReplayDataModule; choose a stream for it",
        ),
        (
            "network",
            "model.network.hidden_sizes=[0]",
            "model.network: Each width in hidden_sizes=[0] must be a positive integer, got 0",
        ),
        ("network", "env=minigrid", "model: FourierNetwork reads one vector, got shapes [[], [7, 7, 3]]."),
        (
            "buffer",
            "data.buffer.lambdas=[2]",
            "data.buffer.lambdas=[2]: lambdas must be numbers between 0 and 1, got",
        ),
        (
            "buffer",
            "+data.buffer.lambds=[1]",
            "data.buffer: MixedGAEBuffer has no setting 'lambds'; did you mean lambdas?",
        ),
        (
            "buffer",
            "model=dqn",
            "DQNModule does not learn from the OnPolicyDataModule; choose a stream for it",
        ),
    ],
)
def test_mistake_is_named_as_in_a_part_of_ours(part, setting, message, folder):
    if setting == "env=minigrid":
        pytest.importorskip("minigrid")
    fewer = [each for each in SMALL[part] if setting != "data=uniform" or "total_frames" in each]
    done = call("train", *command(part), *TINY, *fewer, setting, cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}"), done.stderr
    assert not (folder / "logs").is_dir() or not list(folder.glob("logs/**/*.ckpt"))


def test_each_can_be_read_in_one_go():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXTENDING.glob("*.py")}
    assert set(lengths) == set(SMALL)
    assert max(lengths.values()) < 60
