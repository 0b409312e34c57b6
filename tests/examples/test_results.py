"""The scores of the README, the guide and the YAML files, which are built from the logs of the runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from benchmarks import results
from benchmarks.results import GUIDE, difference, picture, written
from benchmarks.run_logs import PROJECT, VARIANTS, Evaluation, RunLog, Score, config_digest, log_path

NAME = "ppod_minigrid_keycorridor"
RESULTS = PROJECT / "examples" / "results"


def write_log(name: str, seed: int, score: float, root: Path, peer: bool = False, success: float | None = None) -> None:
    """Write a log."""
    path = log_path(name, seed, root, peer)
    command = f"torchrl-lightning-train experiment={name} seed={seed}"
    if peer:
        command = f"python tests/benchmarks/zoo.py run {name} --seeds {seed}"
    origin = (command, config_digest(name, root), "0" * 40, "python 3.11.9", "A processor", 1)
    curve = () if peer else (Evaluation(100, -1.5, 0.25),)
    RunLog(*origin, seed, 98304, 3.5, Score(score, 2.0), None, success, curve).write(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project with our configs and pages, and with logs of the variants only."""
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    shutil.copytree(RESULTS, tmp_path / "examples" / "results", ignore=shutil.ignore_patterns("seed_*.csv"))
    (tmp_path / "examples" / "guide").mkdir()
    shutil.copytree(RESULTS / VARIANTS, tmp_path / "examples" / "results" / VARIANTS, dirs_exist_ok=True)
    for page in (GUIDE.name, "environments.md", *results.IN_GUIDE):
        shutil.copy(GUIDE.with_name(page), tmp_path / "examples" / "guide")
    shutil.copy(PROJECT / "README.md", tmp_path)
    return tmp_path


def test_pages_and_yaml_files_have_the_scores_that_the_logs_make():
    for path, text in written().items():
        assert path.read_text() == text, "Run: python tests/benchmarks/results.py table"


def test_each_experiment_has_a_log():
    assert {*results.described()} == {*results.recorded()}


def test_new_log_is_written_into_pages_and_head(root):
    readme, guide, head = (
        root / "README.md",
        root / GUIDE.relative_to(PROJECT),
        root / "conf/experiment/ppo_cartpole.yaml",
    )
    before = written(root)[readme]
    for seed, score in enumerate((490.0, 500.0, 480.0)):
        write_log("ppo_cartpole", seed, score, root)
    texts = written(root)
    row = "| `ppo_cartpole` | PPO with `GAEBuffer` | 490 +- 10 | 0 to 2 | 98,304 | 3.5 min |"
    assert row in texts[readme].splitlines()
    assert row in texts[guide].splitlines()
    run = "# Score (last.ckpt, 100 unseen episodes, seeds 0 to 2): 490 +- 10; 98,304 frames, 3.5 min each."
    assert run in texts[head].splitlines()
    assert "# Score: no log." in texts[head.with_name("ppo_pendulum.yaml")].splitlines()
    for path, text in texts.items():
        path.write_text(text)
    assert written(root) == texts
    shutil.rmtree(log_path("ppo_cartpole", 0, root).parent)
    assert written(root)[readme] == before


def test_row_has_the_success_rate_and_says_if_there_is_no_log(root):
    write_log("ppo_cartpole", 0, 0.964, root, success=0.5)
    first, second = results.experiments_table(["ppo_cartpole", "ppo_pendulum"], root).splitlines()[2:]
    assert first.endswith("| 0.964; success rate 0.50 | 0 | 98,304 | 3.5 min |")
    assert second.endswith("| no log |  | 307,200 |  |")


@pytest.mark.parametrize("path", sorted((PROJECT / "conf/experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_head_of_an_experiment_has_no_typed_score_and_names_the_seeds_of_the_choice(path):
    head = " ".join(line[2:] for line in path.read_text().splitlines() if re.match("# (?!Score)", line))
    scores = r"\+-|publish|seeds? [\d, toand]+ (?:ha[ds]|have|reach)|(?:alone|without|behaviour): "
    assert re.findall(scores, head) == []
    assert re.search(r"chosen on (seeds? )?\d|not recorded|[Ss]ettings of|No setting was chosen", head)


def test_typed_score_is_found(root):
    for seed in range(3):
        write_log("ppo_cartpole", seed, 490.0, root)
    texts = written(root)
    files = ("README.md", "examples/guide/experiments.md", "conf/experiment/ppo_cartpole.yaml")
    for path in (root / file for file in files):
        path.write_text(texts[path].replace("490 +- 0", "491 +- 0"))
        assert path.read_text() != texts[path], "The score must be in the file."
    again = written(root)
    assert [again[root / file] for file in files] == [texts[root / file] for file in files]


def test_peer_is_compared_by_the_difference_of_the_means(root):
    name = "sac_hopper"
    for seed, (ours, theirs) in enumerate([(10.0, 21.0), (12.0, 20.0), (11.0, 22.0)]):
        write_log(name, seed, ours, root)
        write_log(name, seed, theirs, root, peer=True)
    (row,) = [line for line in results.comparison_table(root).splitlines() if name in line]
    assert "| 10, 12, 11 | 11 +- 1 | 21 +- 1 (seeds 0 to 2) | -10 (" in row
    assert "| behind | 2326 +- 1130 (v3" in row
    assert "stable-baselines3) in none, behind in `sac_hopper`, and" in written(root)[root / "README.md"]
    assert difference([5.0] * 3, [5.0] * 3)[1] == "equal"
    assert difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])[1] == "ahead"
    assert difference([5.0, 1.0, 7.0], [1.0, 2.0, 3.0])[1] == "not clearly different"
    assert difference([5.0], [1.0, 2.0, 3.0]) == ("3", "not known: too few seeds")


def test_peer_without_one_of_our_settings_is_marked_and_not_counted(root):
    sentence = results.comparison_sentence(root)
    for seed in range(3):
        write_log("sac_her_fetchpush", seed, -10.0, root)
        write_log("sac_her_fetchpush", seed, -40.0, root, peer=True)
    (row,) = [line for line in results.comparison_table(root).splitlines() if "fetchpush" in line]
    assert "| -40 +- 0 (seeds 0 to 2, without `data.buffer.transform.skip_reached`) | 30 (30 to 30) | ahead |" in row
    assert results.comparison_sentence(root) == sentence


def test_picture_has_a_line_for_each_curve_and_a_star_for_each_end(root):
    (root / "examples/results/published.yaml").write_text(f"{NAME}: about -2.5 +- 1 (v2)\n")
    for seed in (0, 1):
        write_log(NAME, seed, 3.0, root)
    write_log(NAME, 0, 1.0, root, peer=True)
    write_log("sac_hopper", 3, 7.0, root)
    axes, other = picture(root / "picture.png", root).axes
    assert [axes.get_title(), other.get_title()] == [NAME, "sac_hopper"]
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    evaluated, ended_at, theirs = [[100, -1.5]], [[98304, 3.0], [98304, 3.0]], [[98304, 1.0]]
    assert drawn[:4] == [evaluated, evaluated, ended_at, theirs]
    assert list(axes.lines[4].get_ydata()) == [-2.5, -2.5]
    assert [line.get_xydata().tolist() for line in other.lines] == [[[100, -1.5]], [[98304, 7.0]]]


def test_each_published_score_names_its_page() -> None:
    published = yaml.safe_load((results.PROJECT / "examples" / "results" / "published.yaml").read_text())
    without = [name for name, text in published.items() if not re.search(r"\]\(https://\S+\)", text)]
    assert published
    assert without == []
