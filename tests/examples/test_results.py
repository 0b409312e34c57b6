"""The scores of the README, the guide and the YAML files, which are built from the logs of the runs."""

from __future__ import annotations

import re
import shutil
from dataclasses import astuple, fields, replace
from pathlib import Path

import pytest
import yaml

from benchmarks import earlier_logs, results
from benchmarks.earlier_logs import RESULTS, Row, read, settings_of
from benchmarks.results import GUIDE, difference, earlier_table, picture, rows_of, written
from benchmarks.run_logs import (
    PEER,
    PROJECT,
    VARIANTS,
    Evaluation,
    ResultsError,
    RunLog,
    Score,
    config_digest,
    log_path,
)
from benchmarks.tables import with_success

NAME = "ppod_minigrid_keycorridor"
ROWS = [Row(0, 100, -1.5, 0.25, 0), Row(0, 200, 3.0, 0.5, 100, 1.25)]


def write(name: str, rows: list[Row], folder: Path, settings: str | None = None) -> None:
    """Write a log of the earlier format."""
    cells = [["" if value is None else value for value in astuple(row)] for row in rows]
    lines = [f"# version 1, settings {settings or settings_of(name)}", ",".join(field.name for field in fields(Row))]
    (folder / f"{name}.csv").write_text("\n".join([*lines, *(",".join(map(str, row)) for row in cells)]) + "\n")


def write_log(name: str, seed: int, score: float, root: Path, peer: bool = False, success: float | None = None) -> None:
    """Write a log of the present format."""
    path = log_path(name, seed, root, peer)
    command = f"torchrl-lightning-train experiment={name} seed={seed}"
    if peer:
        command = f"python tests/benchmarks/zoo.py run {name} --seeds {seed}"
    origin = (command, config_digest(name, root), "0" * 40, "python 3.11.9", "A processor", 1)
    curve = () if peer else (Evaluation(100, -1.5, 0.25),)
    RunLog(*origin, seed, 98304, 3.5, Score(score, 2.0), None, success, curve).write(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project with our configs, pages and earlier scores, without logs of the present format."""
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    shutil.copytree(RESULTS, tmp_path / "examples" / "results", ignore=shutil.ignore_patterns("seed_*.csv"))
    (tmp_path / "examples" / "guide").mkdir()
    shutil.copytree(RESULTS / VARIANTS, tmp_path / "examples" / "results" / VARIANTS, dirs_exist_ok=True)
    for page in (GUIDE.name, "environments.md", *results.IN_GUIDE):
        shutil.copy(GUIDE.with_name(page), tmp_path / "examples" / "guide")
    shutil.copy(PROJECT / "README.md", tmp_path)
    for path, text in written(tmp_path).items():
        path.write_text(text)
    return tmp_path


def first_earlier(root: Path) -> tuple[str, str]:
    """Return an experiment with scores of earlier runs, and these scores."""
    entries = results.described(root).items()
    return next((name, entry["earlier"]) for name, entry in entries if "earlier" in entry)


def test_pages_and_yaml_files_have_the_scores_that_the_logs_make():
    for path, text in written().items():
        assert path.read_text() == text, "Run: python tests/benchmarks/results.py table"


def test_new_log_replaces_the_score_of_the_earlier_run(root):
    readme, guide, head = (
        root / "README.md",
        root / GUIDE.relative_to(PROJECT),
        root / "conf/experiment/ppo_cartpole.yaml",
    )
    before = readme.read_text()
    for seed, score in enumerate((490.0, 500.0, 480.0)):
        write_log("ppo_cartpole", seed, score, root)
    texts = written(root)
    row = "| `ppo_cartpole` | PPO with `GAEBuffer` | 490 +- 10 | 0 to 2 | 98,304 | 3.5 min |"
    assert row in texts[readme].splitlines()
    assert row in texts[guide].splitlines()
    run = "# Score (last.ckpt, 100 unseen episodes, seeds 0 to 2): 490 +- 10; 98,304 frames, 3.5 min each."
    assert run in texts[head].splitlines()
    assert "Earlier run" not in texts[head]
    assert "# Earlier runs with seeds from 0: " in texts[head.with_name(f"{first_earlier(root)[0]}.yaml")]
    for path, text in texts.items():
        path.write_text(text)
    assert written(root) == texts
    log_path("ppo_cartpole", 2, root).unlink()
    assert "Earlier run" not in written(root)[head]
    shutil.rmtree(log_path("ppo_cartpole", 0, root).parent)
    assert written(root)[readme] == before


def test_score_of_an_earlier_run_is_marked(root):
    write_log("ppo_cartpole", 0, 0.964, root, success=0.5)
    name, earlier = first_earlier(root)
    table = results.experiments_table(["ppo_cartpole", name], root)
    assert "| 0.964; success rate 0.50 | 0 | 98,304 | 3.5 min |" in table
    assert table.count("earlier") == 1
    assert f"| earlier: {earlier} |  |  |  |" in table


@pytest.mark.parametrize("path", sorted((PROJECT / "conf/experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_head_of_an_experiment_has_no_typed_score_and_names_the_seeds_of_the_choice(path):
    head = " ".join(line[2:] for line in path.read_text().splitlines() if re.match("# (?!Score|Earlier)", line))
    scores = r"\+-|publish|seeds? [\d, toand]+ (?:ha[ds]|have|reach)|(?:alone|without|behaviour): "
    assert re.findall(scores, head) == []
    assert re.search(r"chosen on (seeds? )?\d|not recorded|[Ss]ettings of|No setting was chosen", head)


def test_typed_score_is_found(root):
    guide = root / GUIDE.relative_to(PROJECT)
    guide.write_text(guide.read_text().replace("500, 500, 500", "500, 500, 499", 1))
    assert written(root)[guide] != guide.read_text()


def test_peer_is_compared_by_the_difference_of_the_means(root):
    name = "sac_hopper"
    for seed, (ours, theirs) in enumerate([(10.0, 21.0), (12.0, 20.0), (11.0, 22.0)]):
        write_log(name, seed, ours, root)
        write_log(name, seed, theirs, root, peer=True)
    (row,) = [line for line in results.comparison_table(root).splitlines() if name in line]
    assert "| 10, 12, 11 | 11 +- 1 | 21 +- 1 (seeds 0 to 2) | -10 (" in row
    assert "| behind | 2326 +- 1130 (v3" in row
    assert name not in earlier_table(root)
    assert "stable-baselines3) in none, behind in `sac_hopper`, and" in written(root)[root / "README.md"]
    assert difference([5.0] * 3, [5.0] * 3)[1] == "equal"
    assert difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])[1] == "ahead"
    assert difference([5.0, 1.0, 7.0], [1.0, 2.0, 3.0])[1] == "not clearly different"
    assert difference([5.0], [1.0, 2.0, 3.0]) == ("3", "not known: too few seeds")


def test_readme_names_the_rows_of_earlier_runs_in_which_we_are_behind(root):
    logs = root / "examples" / "results"
    for folder, score in ((logs, 5.0), (logs / PEER, 9.0)):
        write(NAME, [replace(ROWS[1], seed=seed, score=score + seed) for seed in range(3)], folder)
    assert f"`{NAME}`" in results.comparison_sentence(root).partition("behind in ")[2]
    write_log(NAME, 0, 5.0, root)  # the peer's earlier log is not compared with a present one
    assert f"`{NAME}`" not in results.comparison_sentence(root)


def test_earlier_log_is_read_as_long_as_the_settings_are_the_same(tmp_path, monkeypatch):
    rows = [replace(ROWS[0], success=0.5), replace(ROWS[1], success=0.91)]
    write(NAME, rows, tmp_path)
    path = tmp_path / f"{NAME}.csv"
    assert read(path) == rows
    assert list(map(with_success, [rows[1], ROWS[1]])) == ["3 (0.91)", "3"]
    changed = tmp_path / "conf"
    shutil.copytree(earlier_logs.CONF, changed)
    monkeypatch.setattr(earlier_logs, "CONF", changed)
    before, demonstrations = settings_of("ppod_minigrid_multiroom"), tmp_path / "demonstrations"
    yaml = changed / f"{NAME}.yaml"
    yaml.write_text(yaml.read_text().replace("total_frames: 5", "total_frames: 6"))
    with pytest.raises(ResultsError, match=r"settings of .* must be \w+, got \w+\. Run it again: python"):
        read(path)
    assert settings_of("ppod_minigrid_multiroom") != before  # it includes this one
    before = settings_of(NAME)
    shutil.copytree(earlier_logs.DEMONSTRATIONS, demonstrations)
    monkeypatch.setattr(earlier_logs, "DEMONSTRATIONS", demonstrations)
    (demonstrations / "keycorridor" / "another.safetensors").write_bytes(b"0")
    assert settings_of(NAME) != before
    path.write_text(path.read_text().replace("version 1", "version 2"))
    with pytest.raises(ResultsError, match="must begin with '# version 1', got '# version 2"):
        read(path)


def test_earlier_peer_has_a_cell_as_long_as_the_settings_are_the_same(tmp_path):
    folder = tmp_path / "examples" / "results"
    (folder / PEER).mkdir(parents=True)
    (folder / "published.yaml").write_text("{}")
    write(NAME, ROWS, folder)
    assert "Stable" not in earlier_table(tmp_path)
    write(NAME, [Row(0, 200, 1.0, 0.5, 100, 2.0)], folder / PEER)
    assert "| 1 (1 seed, 2.0 minutes) |" in earlier_table(tmp_path)
    write(NAME, [Row(seed, 200, 2.0 * seed, 0.5, 100, 2.0) for seed in (0, 1)], folder / PEER)
    assert "| 1 +- 1.4 (2 seeds, 2.0 minutes) |" in earlier_table(tmp_path)
    write(NAME, [Row(0, 200, 1.0, 0.5, 100, 2.0)], folder / PEER, settings="0123456789ab")
    with pytest.raises(ResultsError, match=rf"tests/benchmarks/zoo\.py.*{NAME}"):
        earlier_table(tmp_path)


def test_picture_has_the_rows_of_present_and_earlier_logs(tmp_path):
    folder = tmp_path / "examples" / "results"
    (folder / PEER).mkdir(parents=True)
    (folder / "published.yaml").write_text(f"{NAME}: about -2.5 +- 1 (v2)\n")
    write(NAME, [replace(row, seed=seed) for seed in (0, 1) for row in ROWS], folder)
    write(NAME, [Row(0, 200, 1.0, 0.5, 100, 2.0)], folder / PEER)
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    write_log("sac_hopper", 3, 7.0, tmp_path)
    assert rows_of("sac_hopper", tmp_path) == [Row(3, 100, -1.5, 0.25, 0), Row(3, 98304, 7.0, 2.0, 100, 3.5)]
    axes, other = picture(tmp_path / "picture.png", tmp_path).axes
    assert [axes.get_title(), other.get_title()] == [NAME, "sac_hopper"]
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    evaluated, ended_at, theirs = [[100, -1.5]], [[200, 3.0], [200, 3.0]], [[200, 1.0]]
    assert drawn[:4] == [evaluated, evaluated, ended_at, theirs]
    assert list(axes.lines[4].get_ydata()) == [-2.5, -2.5]
    assert [line.get_xydata().tolist() for line in other.lines] == [[[100, -1.5]], [[98304, 7.0]]]


def test_each_published_score_names_its_page() -> None:
    published = yaml.safe_load((results.PROJECT / "examples" / "results" / "published.yaml").read_text())
    without = [name for name, text in published.items() if not re.search(r"\]\(https://\S+\)", text)]
    assert published
    assert without == []
