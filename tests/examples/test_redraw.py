"""The pictures of the guide are drawn from the committed data."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import curve_pictures, redraw
from benchmarks.curve_pictures import CURVES, Curves, Line, Panel
from benchmarks.inspection_pictures import Page, unfolded
from benchmarks.redraw import FOLDER, PICTURES, Scores, Speed, digest, outdated, stamp, stamped
from benchmarks.run_logs import PROJECT, Evaluation, ResultsError, RunLog, Score
from cli.conftest import figures as figures

BY_HAND = {"cluster.svg"}


def test_no_picture_of_the_guide_is_older_than_its_data():
    """Draw a listed picture again with ``python tests/benchmarks/redraw.py NAME``."""
    assert outdated() == []
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".png", ".svg")} == {*PICTURES} | BY_HAND


def test_picture_is_outdated_after_a_change_of_its_data_or_settings(tmp_path):
    logs = tmp_path / "examples" / "results"
    shutil.copytree(PROJECT / "examples" / "results", logs)
    for name in ("scores.png", "speed.png"):
        shutil.copy(FOLDER / name, tmp_path)
    page = tmp_path / "speed.md"
    shutil.copy(redraw.SPEED, page)
    pictures = {"scores.png": Scores(tmp_path), "speed.png": Speed(page=page), "none.png": Scores(tmp_path)}
    assert outdated(tmp_path, pictures) == ["none.png"]
    page.write_text(page.read_text().replace("Compare the cost", "Read the cost"))  # no number of the table
    assert outdated(tmp_path, pictures) == ["none.png"]
    log = logs / "ppo_cartpole" / "seed_0.csv"
    log.write_text(log.read_text() + "98304,80,1,\n")
    assert outdated(tmp_path, pictures) == ["scores.png", "none.png"]
    page.write_text(
        re.sub(r"\| (\d+\.\d+) \(", lambda found: f"| {float(found[1]) + 0.01:.2f} (", page.read_text(), count=1)
    )
    assert outdated(tmp_path, pictures) == [*pictures]
    changed = {"speed.png": Speed((("SBX", "another label"),))}
    assert outdated(tmp_path, changed) == ["speed.png"]


def test_digest_of_curves_includes_logs_and_panels(tmp_path, monkeypatch):
    curve = Curves((Panel("a", (Line("one"),)),))
    path = tmp_path / "seed_0.csv"
    monkeypatch.setattr(curve_pictures, "log_path", lambda name, seed: path)
    path.write_text("rows")
    digests = [digest(curve), digest(replace(curve, panels=(Panel("b", (Line("one"),)),)))]
    path.write_text("other rows")
    assert len({*digests, digest(curve)}) == 3
    assert digest(Page(("seed=0",), 100, "running")) != digest(Page(("seed=1",), 100, "running"))


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_digest_is_stored_in_a_picture(tmp_path, name):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.savefig(tmp_path / name)
    assert stamped(tmp_path / name) is None
    for text in ("0123456789abcdef", "fedcba9876543210"):
        figure.savefig(tmp_path / name)
        stamp(tmp_path / name, text)
        assert stamped(tmp_path / name) == text


def test_each_line_has_all_evaluations_of_each_seed():
    for line in {line for panels in CURVES.values() for panel in panels for line in panel.lines}:
        logs = line.logs()  # raises if the settings have changed
        assert logs, line
        assert all(log.curve for log in logs), line


def test_curves_show_mean_range_and_end(tmp_path, monkeypatch, figures):
    logs = [
        RunLog(
            *("", "", "", "", "", 1, seed, 20, 1.0, Score(100.0 * seed, 0.0), None, None),
            tuple(Evaluation(frames, frames * seed, 0.0) for frames in (10, 20)),
        )
        for seed in (1, 3)
    ]
    monkeypatch.setattr(curve_pictures, "read_logs", {"one": logs, "two": logs[:1]}.get)
    lines = (Line("one", "first"), Line("two", "second"))
    panel = Panel("task", lines, label="Score", is_logarithmic=True)
    Curves((panel, Panel("other", lines[:1]))).draw(tmp_path / "c.png")
    (figure,) = figures
    axes, other = figure.axes
    assert (axes.get_title(), other.get_title()) == ("task (1 to 2 seeds)", "other (2 seeds)")
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("Environment frames", "Score", "log")
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert drawn == [[[10, 20], [20, 40]], [[20, 200]], [[10, 10], [20, 20]], [[20, 100]]]
    (band,) = axes.collections  # a single seed has no band
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {(10, 10), (20, 20), (20, 60), (10, 30)}
    assert axes.lines[0].get_color() != axes.lines[2].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("first", "second", "line: mean of the seeds", "band: lowest to highest seed"),
        "star: mean of the seeds after training",
    ]


def test_bars_of_speed_are_the_table_of_the_page(tmp_path, figures):
    speed = Speed()
    ratios = speed.ratios()
    assert len(ratios) >= 9
    assert [*ratios][:2] == ["DQN CartPole, 8 environments", "DQN CartPole, hard target"]
    assert all(low <= middle <= high for values in ratios.values() for middle, low, high in values)
    speed.draw(tmp_path / "speed.png")
    (axes,) = figures[0].axes
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, [value[column][0] for column in range(3) for value in ratios.values()])
    assert [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1][-1] == 1


def test_first_fitting_episode_is_unfolded():
    folded = "<details><summary>running after 5</summary></details><details><summary>running after 6</summary>"
    assert unfolded(folded, "running") == folded.replace("<details>", "<details open>", 1)
    with pytest.raises(ResultsError, match="unfold"):
        unfolded(folded, "truncated")


def test_labels_of_lines_have_one_meaning_in_a_picture():
    for name, panels in CURVES.items():
        labels = [line.label for panel in panels for line in panel.lines]
        assert all(labels) or not any(labels), name
        assert not any(re.search(r"[=_]", label) for label in labels), name
