"""Logs and records from untrusted runs are plotted or cause a one-line error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from cli.written_runs import keep, write_run
from torchrl_lightning._core.file_limits import LOG_LINE
from torchrl_lightning._core.run_metadata import evaluation_score
from torchrl_lightning.cli.plot import main, plot_runs
from torchrl_lightning.plotting.sweep_figures import draw_importances, draw_parallel, draw_trials
from torchrl_lightning.plotting.trials import Trial

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
DOUBLED = "seed: ${a40}\na0: xx\n" + "".join(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}\n" for n in range(1, 41))


def run_of(folder: Path) -> Path:
    return keep(write_run(folder / "run", points=3))


def replaced(name: str, content: str | bytes | None):
    """Return a function that replaces a file of a run by this content, or by a FIFO."""

    def change(run: Path) -> None:
        path = run / name
        path.unlink()
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content.encode(errors="surrogatepass") if isinstance(content, str) else content)

    return change


METRICS, CONFIG, HYDRA = "csv/metrics.csv", ".hydra/config.yaml", ".hydra/hydra.yaml"
WRONG = {
    "a FIFO as a log": replaced(METRICS, None),
    "zeros without an end": lambda run: ((run / METRICS).unlink(), (run / METRICS).symlink_to("/dev/zero")),
    "a long line": replaced(METRICS, "step,eval/return\n" + "1" * (LOG_LINE + 1)),
    "a long cell": replaced(METRICS, "step,eval/return\n1," + "1" * 200_000),
    "an open quote": replaced(METRICS, 'step,eval/return\n"' + "1,1\n" * 100_000),
    "a text as a number": replaced(METRICS, "step,eval/return\n1,\x1b[31mred\n"),
    "bytes that are no text": replaced(METRICS, b"step,eval/return\n1,\xff\n"),
    "no byte": replaced(METRICS, b""),
    "zero bytes": replaced(METRICS, bytes(1000)),
    "many columns": replaced(METRICS, ",".join(f"\x1b[3{n}m" for n in range(100_000)) + "\n"),
    "another config than a mapping": replaced(CONFIG, "[1]"),
    "aliases": replaced(CONFIG, BOMB),
    "a foreign tag": replaced(CONFIG, "a: !!python/object/apply:os.system [touch CANARY]"),
    "no record of Hydra's": replaced(HYDRA, "hydra: {runtime: 3}"),
    "choices that are a list": replaced(HYDRA, "hydra: {runtime: {choices: [1], cwd: x}, overrides: {task: []}}"),
    "a foreign tag of a record": replaced(HYDRA, "hydra: !!python/name:os.system"),
}
SHOWN = {
    "interpolations that double": replaced(CONFIG, DOUBLED),
    "an interpolation of the shell": replaced(CONFIG, "seed: ${oc.env:HOME}"),
    "a seed that is a list": replaced(CONFIG, "seed: [1, 2]"),
    "a checkpoint that is a mapping": replaced(CONFIG, "ckpt_path: {a: 1}"),
    "a FIFO as a config": replaced(CONFIG, None),  # plotted like a run without a config
    "a FIFO as a record": replaced(HYDRA, None),
    "formulas and escape codes as settings": replaced(
        HYDRA,
        'hydra: {runtime: {choices: {experiment: "$\\\\frac$"}, cwd: x}, overrides: {task: ["x=$\\\\a$\\e[31m"]}}',
    ),
    "numbers as settings": replaced(HYDRA, "hydra: {runtime: {choices: {1: 2}, cwd: x}, overrides: {task: [1, null]}}"),
    "infinite and huge numbers": replaced(METRICS, "step,eval/return\n1,inf\n2,1e30\n3,-1e30\n4,nan\n5,-0.0\n"),
    "short and long rows": replaced(METRICS, "step,eval/return\n1\n\n2,3,4,5\n,\n"),
}


def plotted(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    began = time.process_time()
    try:
        status = main([str(run), "--output", str(run / "curve.png")])
    except SystemExit as end:
        status = int(end.code or 0)
    assert time.process_time() - began < 10
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("name", WRONG)
def test_hostile_run_is_refused_in_one_line(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path)
    WRONG[name](run)
    status, _, told = plotted(run, capsys)
    assert status == 2
    assert told.endswith("\n")
    assert told[:-1].isprintable()
    assert len(told) < 4000
    assert not (run / "curve.png").exists()
    assert not (tmp_path / "CANARY").exists()


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_odd_run_is_drawn(tmp_path, capsys, name):
    run = run_of(tmp_path)
    SHOWN[name](run)
    status, out, told = plotted(run, capsys)
    assert status == 0, told
    assert (run / "curve.png").is_file()
    assert all(line.isprintable() for line in out.splitlines())


def test_table_of_a_sweep_prints_no_escape_codes(tmp_path, capsys):
    for number in range(2):
        run = keep(write_run(tmp_path / f"{number}", points=3), f"model.x=\x1b[3{number}m$a$\u202e")
        assert "\\e[3" in (run / HYDRA).read_text()
    assert main([str(tmp_path), "--table", "--metric", "eval/return", "-o", str(tmp_path / "sweep.png")]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31m$a$\u202e" in out
    assert all(line.isprintable() for line in out.splitlines())


NAMES = {"a formula": r"$\frac{a$", "another script": "\u6f22\u5b57", "LaTeX": r"\input{/etc/hostname}"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("usetex", [False, True])
def test_names_from_files_are_drawn_as_they_are_written(tmp_path, figures, name, usetex):
    text = NAMES[name]
    trials = [Trial({text: text * number}, [], np.array([float(number)])) for number in (1, 2)]
    with matplotlib.rc_context({"text.usetex": usetex}):
        draw_trials(trials, tmp_path / "trials.svg", text)
        draw_parallel(trials, tmp_path / "lines.png", text)
        draw_importances(trials, tmp_path / "importances.png", text)
    sources = [write_run(tmp_path / "run", points=3)]
    plot_runs(sources, tmp_path / "curve.png", labels=[text])
    drawn = [{each.get_text() for each in figure.findobj(Text)} for figure in figures]
    assert all(text in texts or f"rank correlation with {text}" in " ".join(texts) for texts in drawn)
    assert {text, text * 2} <= drawn[0]
    for each in (each for figure in figures for each in figure.findobj(Text) if text in each.get_text()):
        assert not each.get_parse_math()
        assert not each.get_usetex()


def test_equal_runs_make_equal_svg(tmp_path):
    run, pictures = run_of(tmp_path), [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        plot_runs([run], picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert b"<dc:date>" not in pictures[0].read_bytes()


def test_numbers_on_a_logarithmic_axis_need_no_formulas(tmp_path, figures):
    trials = [Trial({"rate": text}, [], np.array([1.0])) for text in ("0.0001", "0.001", "0.01")]
    draw_trials(trials, tmp_path / "sweep.png")
    labels = [each.get_text() for each in figures[0].axes[0].get_xticklabels()]
    assert "1e\N{MINUS SIGN}03" in labels
    assert not any("$" in label for label in labels)


def test_score_that_is_no_number_is_refused_in_one_line(tmp_path):
    run = run_of(tmp_path)
    (run / "checkpoints").mkdir()
    (run / METRICS).write_text("step,final/return\n1,\x1b[31m\n")
    with pytest.raises(ValueError, match=r"must be a number, got '\\\\x1b\[31m'"):
        evaluation_score(run / "checkpoints" / "last.ckpt", {"eval_checkpoint": "last"})
    (run / METRICS).write_text("step,final/return\n1,3.5\n2,\n")
    assert evaluation_score(run / "checkpoints" / "last.ckpt", {"eval_checkpoint": "last"}) == 3.5
