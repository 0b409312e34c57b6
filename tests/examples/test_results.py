"""The logs of the experiments' scores, and the guide's table that is built from them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from benchmarks import results
from benchmarks.results import (
    BEGIN,
    GUIDE,
    RESULTS,
    ResultsError,
    Row,
    ended,
    logged,
    of_peer,
    picture,
    read,
    shown,
    table,
    with_table,
)

NAME = "ppod_minigrid_keycorridor"
ROWS = [Row(0, 100, -1.5, 0.25, 0), Row(0, 200, 3.0, 0.5, 100, 1.25)]


def test_guide_has_the_table_that_the_logs_make():
    page = GUIDE.read_text()
    assert with_table(page, table()) == page, "run python tests/benchmarks/results.py table"
    assert page.count(BEGIN) == 1


def test_what_is_written_is_read_again_as_long_as_the_settings_are_the_same(tmp_path, monkeypatch):
    results.write(NAME, ROWS, tmp_path)
    path = tmp_path / f"{NAME}.csv"
    assert read(path) == ROWS
    changed = tmp_path / "conf"
    shutil.copytree(results.CONF, changed)
    monkeypatch.setattr(results, "CONF", changed)
    yaml = changed / f"{NAME}.yaml"
    yaml.write_text(f"# another comment\n{yaml.read_text()}")
    assert read(path) == ROWS
    before = results.settings_of("ppod_minigrid_multiroom")
    yaml.write_text(yaml.read_text().replace("total_frames: 5", "total_frames: 6"))
    with pytest.raises(ResultsError, match=r"is of the settings \w+, the experiment has \w+\. Run it again: python"):
        read(path)
    assert results.settings_of("ppod_minigrid_multiroom") != before  # it includes this one


def test_share_that_succeeds_is_read_again_and_stands_behind_the_score(tmp_path):
    rows = [replace(ROWS[0], success=0.5), replace(ROWS[1], success=0.91)]
    results.write(NAME, rows, tmp_path)
    assert read(tmp_path / f"{NAME}.csv") == rows
    assert list(map(shown, [rows[1], ROWS[1]])) == ["3 (0.91)", "3"]


def test_other_seeds_stay_in_the_same_settings(tmp_path):
    path, seeds = tmp_path / f"{NAME}.csv", [[replace(row, seed=seed) for row in ROWS] for seed in (0, 1, 2)]
    for rows in (seeds[0] + seeds[2], seeds[1]):
        results.write(NAME, rows, tmp_path)
    assert read(path) == [*seeds[0], *seeds[1], *seeds[2]]
    again = [replace(row, score=9.0) for row in seeds[2]]
    results.write(NAME, again, tmp_path)
    assert read(path) == seeds[0] + seeds[1] + again
    results.write(NAME, seeds[0], tmp_path, settings="0123456789ab")  # the stored rows have other settings
    assert read(path, "0123456789ab") == seeds[0]


def test_demonstrations_are_settings(tmp_path, monkeypatch):
    before = [results.settings_of(name) for name in (NAME, "ppo_acrobot")]
    changed = tmp_path / "demonstrations"
    shutil.copytree(results.DEMONSTRATIONS, changed)
    monkeypatch.setattr(results, "DEMONSTRATIONS", changed)
    assert [results.settings_of(name) for name in (NAME, "ppo_acrobot")] == before
    (changed / "keycorridor" / "another.safetensors").write_bytes(b"0")
    assert results.settings_of(NAME) != before[0]
    assert results.settings_of("ppo_acrobot") == before[1]


def test_another_version_or_experiment_is_refused(tmp_path):
    path = tmp_path / f"{NAME}.csv"
    path.write_text((RESULTS / f"{NAME}.csv").read_text().replace("version 1", "version 2"))
    with pytest.raises(ResultsError, match="begins with '# version 2"):
        read(path)
    with pytest.raises(ResultsError, match="there is no experiment none"):
        results.settings_of("none")


def test_log_and_the_last_line_of_an_evaluation_are_understood(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("eval/return,eval/return_std,step\n,,64\n2.5,0.5,128\n")
    assert list(logged(path, 3)) == [Row(3, 128, 2.5, 0.5, 0)]
    said = "warning\nmean evaluation return: -83.0 +- 19.5 over 100 episodes, 299008 frames, 3 s\n"
    assert ended(said, 1, 0.5) == Row(1, 299008, -83.0, 19.5, 100, 0.5)
    path.write_text("eval/return,eval/return_std,eval/success,step\n-9.0,0.5,0.75,128\n")
    assert list(logged(path, 3)) == [Row(3, 128, -9.0, 0.5, 0, success=0.75)]
    said = "mean evaluation return: -14.4 +- 12.4 over 100 episodes, success rate 0.91, 400000 frames, 12 s\n"
    assert ended(said, 1, 0.5) == Row(1, 400000, -14.4, 12.4, 100, 0.5, 0.91)
    with pytest.raises(ResultsError, match=r"1.*'error'"):
        ended("error", 1, 0.5)


def test_what_a_peer_came_to_stands_beside_it_as_long_as_the_settings_are_the_same(tmp_path):
    assert of_peer(NAME, tmp_path) == ""
    folder = tmp_path / results.PEER.name
    results.write(NAME, [Row(0, 200, 1.0, 0.5, 100, 2.0)], folder)
    assert of_peer(NAME, tmp_path) == "1 (1 seed, 2.0 minutes)"
    results.write(NAME, [Row(seed, 200, 2.0 * seed, 0.5, 100, 2.0) for seed in (0, 1)], folder)
    assert of_peer(NAME, tmp_path) == "1 +- 1.4 (2 seeds, 2.0 minutes)"
    results.write(NAME, [Row(0, 200, 1.0, 0.5, 100, 2.0)], folder, settings="0123456789ab")
    with pytest.raises(ResultsError, match=rf"tests/benchmarks/zoo\.py.*{NAME}"):
        of_peer(NAME, tmp_path)


def test_picture_shows_what_the_logs_say(tmp_path):
    (tmp_path / "published.yaml").write_text(f"{NAME}: about -2.5 +- 1 (v2)\n")
    results.write(NAME, [replace(row, seed=seed) for seed in (0, 1) for row in ROWS], tmp_path)
    results.write(NAME, [Row(0, 200, 1.0, 0.5, 100, 2.0)], tmp_path / results.PEER.name)
    (axes,) = picture(tmp_path / "picture.png", tmp_path).axes
    assert axes.get_title() == NAME
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    evaluated, ended_at, theirs = [[100, -1.5]], [[200, 3.0], [200, 3.0]], [[200, 1.0]]
    assert drawn[:4] == [evaluated, evaluated, ended_at, theirs]
    assert list(axes.lines[4].get_ydata()) == [-2.5, -2.5]
