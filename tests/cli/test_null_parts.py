"""Null parts are omitted, errors about null choices name the working form, and modules run commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import OmegaConf

from cli.commands import TINY
from cli.conftest import Run
from kit.processes import environment
from kit.store import composed_run
from torchrl_lightning.cli.config.instantiate import build_parts, build_trainer
from torchrl_lightning.cli.error_messages import UsageError, format_hydra_error

LAST = {"_target_": "torchrl_lightning.RolloutMetricsLogger"}


def test_null_leaves_callbacks_and_loggers_out(run: Run, tmp_path: Path) -> None:
    nulls = ["callbacks.progress_bar=null", "callbacks.checkpoint=null", "logger.csv=null"]
    done = run("train", *TINY, *nulls, "hydra.run.dir=run")
    assert "mean evaluation return" in done.stdout
    assert "training:" not in done.stderr
    assert not list(tmp_path.glob("run/csv"))
    assert not list(tmp_path.glob("run/checkpoints/best*"))
    again = run("train", "ckpt_path=run/checkpoints/last.ckpt", "data.total_frames=768", "hydra.run.dir=again")
    assert "768 frames" in again.stdout


@pytest.mark.parametrize(
    ("overrides", "bar"),
    [
        ([], "FramesProgressBar"),
        (["callbacks.progress_bar=null"], None),
        (["callbacks=none"], None),
        (["trainer.enable_progress_bar=false"], None),
        (["callbacks.progress_bar=null", "trainer.enable_progress_bar=false"], None),
        (["trainer.enable_progress_bar=true"], "FramesProgressBar"),
        (["callbacks=none", "trainer.enable_progress_bar=true"], "RichProgressBar|TQDMProgressBar"),
    ],
)
def test_progress_bar_is_hidden_by_one_setting(overrides: list[str], bar: str | None, tmp_path: Path) -> None:
    cfg = composed_run(*overrides, "logger=none", into=tmp_path)
    callbacks = build_parts(cfg, "callbacks")
    trainer = build_trainer(cfg, callbacks)
    shown = trainer.progress_bar_callback
    assert shown is None if bar is None else type(shown).__name__ in bar.split("|")
    kept = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    assert all(callback in trainer.callbacks for callback in kept)


def test_trainer_of_the_user_gets_no_setting_that_it_lacks() -> None:
    trainer: Any = build_trainer(OmegaConf.create({"trainer": {"_target_": "types.SimpleNamespace"}}), [])
    assert vars(trainer) == {"callbacks": [], "logger": []}


@pytest.mark.parametrize("group", ["data", "model", "paths", "trainer"])
def test_null_for_a_group_that_a_run_needs_is_not_answered_by_an_empty_list(group: str, run: Run) -> None:
    done = run("train", *TINY, f"{group}=null", expect=1)
    assert done.stderr.startswith(f"error: {group}: ")
    assert f"{group}=[]" not in done.stderr


@pytest.mark.parametrize("group", ["callbacks", "logger"])
@pytest.mark.parametrize(("parts", "number"), [(None, 0), ({}, 0), ({"a": None}, 0), ({"a": None, "b": LAST}, 1)])
def test_parts_are_those_that_are_not_null(group: str, parts: Any, number: int) -> None:
    assert len(build_parts(OmegaConf.create({group: parts}), group)) == number


def test_group_that_is_absent_has_no_parts() -> None:
    assert build_parts(OmegaConf.create({}), "logger") == []


@pytest.mark.parametrize("part", [False, 3, "none", {}, {"patience": 3}, []])
def test_part_without_a_class_is_refused(part: Any) -> None:
    with pytest.raises(UsageError, match=r"^callbacks\.a must be a class .* or null to leave it out, got .*null\.$"):
        build_parts(OmegaConf.create({"callbacks": {"a": part}}), "callbacks")


@pytest.mark.parametrize(
    ("override", "form"),
    [
        ("x=choice(null,0.5)", "x=null,0.5"),
        ("x.y=choice(0.5, null)", "x.y=0.5,null"),
        ("+x=choice([1,2],null,{a:1})", "+x=[1,2],null,{a:1}"),
        ("x=choice('a, b',null)", "x='a, b',null"),
        ("x=tag(t,choice(NULL,1))", "x=NULL,1"),
        ("x=shuffle(choice(1,null))", "x=1,null"),
        ("x=shuffle(null,1)", "x=null,1"),
        ("x=sort(2,null)", "x=2,null"),
    ],
)
def test_choice_with_null_names_the_form_that_works(override: str, form: str) -> None:
    parser = OverridesParser.create()
    with pytest.raises(Exception, match="NoneType") as error:
        parser.parse_overrides([override])
    message = format_hydra_error(error.value, [override])
    assert message.endswith(f"() does not accept null; write the values without it: {form}.")
    assert "\n" not in message
    assert parser.parse_override(form).is_sweep_override()


@pytest.mark.parametrize("call", ["interval(null,0.5)", "range(null,3)", "glob(null)", "interval(0.1)", "int(abc)"])
def test_function_with_wrong_arguments_is_not_answered_by_quotes(call: str) -> None:
    with pytest.raises(Exception, match="while evaluating") as error:
        OverridesParser.create().parse_overrides([f"x={call}"])
    message = format_hydra_error(error.value, [f"x={call}"])
    assert message.endswith("; correct the arguments of the function.")
    assert call in message


def test_choice_with_null_on_the_command_line_is_one_line(run: Run) -> None:
    done = run("train", "--multirun", "model.clip_epsilon=choice(null,0.5)", expect=1)
    assert done.stderr.splitlines() == [
        "error: model.clip_epsilon: choice() does not accept null; write the values without it: "
        "model.clip_epsilon=null,0.5."
    ]


@pytest.mark.parametrize("name", ["train", "evaluate", "record", "plot", "export", "inspect"])
def test_module_of_a_command_runs_the_command(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"torchrl_lightning.cli.{name}"]
    done = subprocess.run([*command, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"torchrl-lightning-{name}" in done.stdout
