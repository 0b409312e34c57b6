"""Each mistake in ``tests/data/mistakes.yaml`` produces the one-line message of the table."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.commands import unchanged_process
from cli.written_runs import write_run
from kit.processes import environment
from torchrl_lightning._core.errors import UserError
from torchrl_lightning.cli.error_messages import exit_with_one_line

TABLE = yaml.safe_load((Path(__file__).parents[1] / "data" / "mistakes.yaml").read_text())


def cases(kind: str) -> list[Any]:
    return [pytest.param(row["mistake"], row["now"], id=row["mistake"]) for row in TABLE[kind]]


def matches(said: str, expected: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), said, re.DOTALL) is not None


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("# hello\n")
    monkeypatch.chdir(tmp_path)


def test_table_is_large_enough():
    assert len(TABLE["command_line"]) >= 50
    assert len(TABLE["python"]) >= 30


@pytest.mark.parametrize(("mistake", "now"), cases("command_line"))
def test_mistake_on_the_command_line_exits_with_one_line(mistake, now, run, here):
    name, *arguments = shlex.split(mistake)
    if any(said in mistake and find_spec(package) for said, package in {"wandb": "wandb", "ALE/": "ale_py"}.items()):
        pytest.skip("the extra is there")
    done = run(name, *arguments, expect=2 if name == "plot" else 1)
    said = [line for line in done.stderr.splitlines() if line and not line.startswith(("training:", "note:"))]
    assert len(said) == 1, done.stderr
    assert matches(said[0], now), said[0]


@pytest.mark.parametrize(("mistake", "now"), cases("python"))
def test_mistake_in_python_raises_one_line(mistake, now, here, monkeypatch):
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)
    with unchanged_process(), pytest.raises(Exception) as error:  # noqa: PT011
        exec(mistake, {})
    said = f"{type(error.value).__name__}: {error.value}"
    assert "\n" not in said
    assert matches(said, now), said


YAML = "# @package _global_\ndefaults: [{defaults}]\n{settings}\n"


@pytest.mark.parametrize(
    ("defaults", "settings", "now"),
    [
        ("override /data: gea", "", "data=gea: unknown option; did you mean gae?"),
        ("override /dat: gae", "", "in experiment/mine: ...'dat'...; did you mean data?"),
        (
            "",
            "data: {buffer: {gama: 1}}",
            "in experiment/mine: data.buffer.gama: unknown setting; did you mean data.buffer.gamma?",
        ),
        ("", "seed: [", "while parsing a flow..."),
        (
            "",
            "model: {learning_rate: fast}",
            "in experiment/mine: model.learning_rate: ...'fast'...; give a number.",
        ),
    ],
)
def test_mistake_in_a_file_is_named_with_the_file(defaults, settings, now, run, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(YAML.format(defaults=defaults, settings=settings))
    said = run("train", "--config-dir", str(tmp_path), "experiment=mine", expect=1).stderr
    assert matches(said.rstrip("\n"), f"error: {now}"), said


@pytest.mark.parametrize("text", ["defaults: [override /data: gae]", "data: {total_frames: 99}"])
@pytest.mark.parametrize("group", ["experiment", "debug", "hparams_search"])
def test_file_without_the_package_of_the_run_is_an_error(group, text, run, tmp_path):
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(text)
    said = run("train", "--config-dir", str(tmp_path), f"{group}=mine", expect=1).stderr
    assert said.startswith("error: ")
    assert f"{group}" in said
    assert "mine: " in said
    assert "write '# @package _global_' in the first line of the file" in said
    assert len(said.splitlines()) == 1


def test_users_own_setting_may_have_the_name_of_a_group(run):
    assert "note: mine" in run("train", "+experiment.note=mine", "--cfg", "job").stdout


def test_unknown_option_without_a_similar_one_names_the_folder_for_own_files(run):
    said = run("train", "experiment=mine", expect=1).stderr
    expected = "experiment=mine: unknown option; --config-dir=FOLDER adds your own FOLDER/experiment/mine.yaml."
    assert said == f"error: {expected}\n"


def test_setting_of_the_users_that_others_interpolate_may_be_added(run):
    width = ["+width=32", "model.network.hidden_sizes=[${width}]", "eval_checkpoint=bset"]
    assert "eval_checkpoint is 'bset'" in run("train", *width, expect=1).stderr


@pytest.mark.parametrize(("command", "argument"), [("train", "--help"), ("plot", ".")])
def test_closed_pipe_exits_silently(command, argument, tmp_path):
    write_run(tmp_path / "run", points=2)
    script = (
        f"import os, sys; sys.argv = ['x', '{argument}']; reader, writer = os.pipe(); os.close(reader); "
        f"os.dup2(writer, 1); from torchrl_lightning.cli.{command} import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("ranks", "prefix"),
    [
        ({}, ""),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, ""),
        ({"LOCAL_RANK": "1"}, "rank 1: "),
        ({"LOCAL_RANK": "1", "NODE_RANK": "2"}, "rank 1 of node 2: "),
    ],
)
def test_error_of_another_rank_names_the_rank(
    ranks: dict[str, str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end, exit_with_one_line():
        raise UserError("no licence.")
    assert end.value.code == f"error: {prefix}no licence."
