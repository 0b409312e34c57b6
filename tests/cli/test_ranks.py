"""Commands that cannot run on several ranks exit with a one-line error before a rank starts; each remedy works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cli.commands import TINY, Done, last_line
from kit.runs import trainer
from kit.store import composed_run
from torchrl_lightning._core.checksums import add_checksums
from torchrl_lightning.cli.config.instantiate import build_part, check_parts
from torchrl_lightning.cli.error_messages import UsageError

RANKS = ["trainer.devices=2", "trainer.strategy=ddp"]
SMALL = ["data.num_envs=1", "data.eval_episodes=1", "eval_episodes=1", "trainer.check_val_every_n_epoch=1"]
REPLAY = [*SMALL, "data.batch_size=8", "data.warmup_frames=32", "data.updates_per_epoch=16", "data.total_frames=64"]
STREAMS = {
    "ppo": ["experiment=ppo_cartpole", *TINY],
    "dqn": ["experiment=dqn_cartpole", *REPLAY],
    "sac": ["experiment=sac_pendulum", *REPLAY],
    "pets": [
        *("experiment=pets_pendulum", *SMALL, "data.batch_size=16", "data.warmup_frames=32", "data.frames_per_fit=16"),
        *("data.max_epochs_per_fit=1", "data.total_frames=64", "model.planner.horizon=2", "model.planner.candidates=4"),
        *("model.planner.elites=2", "model.planner.iterations=1"),
    ],
    "mbpo": ["experiment=mbpo_pendulum", *REPLAY, "data.source.frames_per_fit=32", "model.dynamics.max_epochs=1"],
}
Run = Callable[..., Done]


def error_line(run: Run, folder: Path, *arguments: str) -> str:
    """Return the error line of a command that exits before training; two runs of a sweep share the line."""
    done = run("train", *arguments, "hydra.run.dir=run", "hydra.sweep.dir=run", expect=1)
    lines = done.stderr.splitlines()
    if "--multirun" in arguments:
        *lines, last = lines
        assert last == "error: 2 of 2 runs failed."
        lines = list({re.sub(r"^error: in the run seed=[01]: ", "error: ", line) for line in lines})
    assert len(lines) == 1, lines
    (line,) = lines
    assert line.startswith("error: "), done.stderr
    assert not list((folder / "run").glob("**/*.ckpt"))
    return line


@pytest.mark.parametrize("stream", ["pets", "mbpo"])
def test_world_models_on_two_ranks_are_refused_in_one_line(stream: str, run: Run, tmp_path: Path) -> None:
    line = error_line(run, tmp_path, *STREAMS[stream], *RANKS)
    assert re.search(r"trainer.devices=2: .* must be 1 for \w+, .* got 2 ranks. Set devices=1 ", line), line


FORK = "trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy, start_method: fork}"


@pytest.mark.parametrize(
    "arguments",
    [
        [FORK],
        ["trainer.strategy=ddp_notebook_find_unused_parameters_true"],
        ["trainer.strategy=ddp_spawn", "--multirun", "seed=0,1"],
    ],
)
def test_strategies_that_copy_the_process_are_refused_in_one_line(
    arguments: list[str], run: Run, tmp_path: Path
) -> None:
    line = error_line(run, tmp_path, *STREAMS["ppo"], "trainer.devices=2", *arguments)
    assert line.startswith("error: trainer.strategy="), line
    assert "Use strategy='ddp' in a script, or strategy='auto' and devices=1 in a notebook or a sweep." in line


REMEDY = ["trainer.devices=1", "trainer.strategy=auto"]


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_sweeps_of_several_ranks_are_refused_in_one_line(strategy: str, run: Run, tmp_path: Path) -> None:
    arguments = [*STREAMS["ppo"], "--multirun", "seed=0,1", "trainer.devices=2", f"trainer.strategy={strategy}"]
    line = error_line(run, tmp_path, *arguments)
    assert "trainer.devices=2: devices must be 1 in a sweep (--multirun), got 2: " in line
    assert re.findall(r"trainer\.\w+=\w+", line.partition(" Set ")[2]) == REMEDY


@pytest.mark.parametrize("stream", STREAMS)
def test_remedy_for_a_sweep_runs_each_stream(stream: str, run: Run, tmp_path: Path) -> None:
    sweep = ["--multirun", "seed=0", *STREAMS[stream], *REMEDY, "hydra.sweep.dir=sweep"]
    assert int(last_line(run("train", *sweep).stdout)[4]) >= 64
    assert len(list((tmp_path / "sweep").glob("**/last.ckpt"))) == 1


MISFITS = {
    "the seed of collector= must be unbound on 2 ranks": ["collector=process", "+data.collector.seed=3"],
    "num_collectors must be a multiple of the number of ranks, 2, got 3. Set num_collectors=4": [
        *("collector=ray", "data.collector.num_collectors=3", "data.num_envs=12"),
    ],
}


def checked_on_two_ranks(folder: Path, *settings: str) -> None:
    cfg = composed_run(*settings, *RANKS, "logger=none", into=folder)
    run = trainer(folder, devices=2, strategy="ddp")
    check_parts(cfg, build_part(cfg, "data"), build_part(cfg, "model"), trainer=run)


@pytest.mark.parametrize("message", MISFITS)
def test_settings_that_do_not_fit_two_ranks_are_refused_before_they_start(message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        checked_on_two_ranks(tmp_path, *STREAMS["ppo"], *MISFITS[message])
    assert message in str(error.value)


def test_settings_that_fit_only_several_ranks_are_accepted(tmp_path: Path) -> None:
    settings = ["data.checkpoint_buffer=inside", f"data.buffer_dir={tmp_path}"]  # ranks store buffers in this folder
    checked_on_two_ranks(tmp_path, *STREAMS["dqn"], *settings)


def test_checkpoint_of_two_ranks_is_continued_on_one_by_the_remedy(
    trained: tuple[Path, str], run: Run, tmp_path: Path
) -> None:
    stored = torch.load(trained[0] / "checkpoints" / "last.ckpt", weights_only=True)
    stored["OnPolicyDataModule"]["ranks"] *= 2
    add_checksums(stored, "OnPolicyDataModule")
    torch.save(stored, tmp_path / "two.ckpt")
    line = run("train", *TINY, "ckpt_path=two.ckpt", expect=1).stderr
    assert "of 2 rank(s), but this run has 1. Resume with 2 device(s), or start a new run from its weights" in line
    assert "init_from=CHECKPOINT in a command" in line
    done = run("train", *TINY, "init_from=two.ckpt", "hydra.run.dir=new")
    assert last_line(done.stdout)[4] == "512"
