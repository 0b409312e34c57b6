from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy.stats import kruskal, spearmanr

from cli.commands import TINY
from cli.written_runs import keep
from torchrl_lightning.cli.plot import main
from torchrl_lightning.plotting.sweep_figures import draw_importances, draw_parallel, draw_trials, importances
from torchrl_lightning.plotting.trials import Trial, read_trials, table


def write_run(folder: Path, score: float | None, *overrides: str, seed: int = 0, **choices: str) -> Path:
    """Write the files of a sweep's job: one evaluation, the final score if given, and Hydra's record."""
    (folder / "csv").mkdir(parents=True)
    last = "" if score is None else f"2048,,{score}\n"
    (folder / "csv" / "metrics.csv").write_text(f"step,eval/return,final/return\n1024,500.0,\n{last}")
    return keep(folder, *overrides, seed=seed, **choices)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_pictures_of_many_settings_and_budgets_have_room_for_their_panels(tmp_path, figures):
    names = ("data.total_frames", "trainer.max_epochs", "model.learning_rate", "model.entropy_coeff", "data.num_epochs")
    trials = [
        Trial({name: str(10**i) for name in (*names, "model.network.hidden_sizes")}, [], np.array([i]), [9.0] * (i % 2))
        for i in range(8)
    ]
    draw_trials(trials, tmp_path / "sweep.png", title="eight")
    draw_parallel(trials, tmp_path / "lines.png", title="eight")
    for figure in figures:
        for axes in figure.axes:
            assert not axes.get_visible() or min(axes.get_window_extent().size) > 100


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Return a sweep over two settings with two seeds each, and a third setting that is equal in all runs."""
    folder = tmp_path / "sweep_2026-01-01_00-00-00"
    settings = (("0.0001", "4", 100, 120), ("0.03", "4", 20, 30), ("0.0001", "10", 200, 180), ("0.03", "10", 5, 6))
    for number, (rate, epochs, *scores) in enumerate(settings):
        overrides = [f"model.learning_rate={rate}", f"data.num_epochs={epochs}", "data.num_envs=4"]
        for seed, score in enumerate(scores):
            write_run(
                folder / f"ppo-{rate}-{epochs}" / f"seed_{seed}" / str(2 * number + seed), score, *overrides, seed=seed
            )
    return folder


def test_sweep_becomes_a_table_best_first_and_a_picture(sweep, tmp_path, capsys, figures):
    output = tmp_path / "pictures" / "sweep.png"
    assert main([str(sweep), "--table", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "data.num_epochs  model.learning_rate   final/return  runs",
        "10               0.0001               190.0 +- 10.0     2",
        "4                0.0001               110.0 +- 10.0     2",
        "4                0.03                   25.0 +- 5.0     2",
        "10               0.03                    5.5 +- 0.5     2",
        f"best run: {sweep}/ppo-0.0001-10/seed_0/4",
        f"scores over settings: {output}",
        f"trials over all settings: {output.with_stem('sweep_parallel')}",
        f"importances of settings: {output.with_stem('sweep_importances')}",
    ]
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "sweep.png",
        "sweep_importances.png",
        "sweep_parallel.png",
    ]
    assert all(imread(path)[..., :3].std() > 0.01 for path in output.parent.iterdir())
    epochs, rates = figures[0].axes
    assert (epochs.get_xlabel(), rates.get_xlabel()) == ("data.num_epochs", "model.learning_rate")
    assert epochs.get_ylabel() == rates.get_ylabel() == "Final mean return"
    assert (epochs.get_xscale(), rates.get_xscale()) == ("linear", "log")
    points = [container[0].get_xydata()[0].tolist() for container in rates.containers]
    assert sorted(points) == [[0.0001, 110], [0.0001, 190], [0.03, 5.5], [0.03, 25]]


def test_runs_of_one_seed_have_neither_deviation_nor_count(tmp_path):
    for i, rate in enumerate((0.0006466422717414558, 0.00044296496)):
        write_run(
            tmp_path / "sweep" / str(i), i + 0.5, f"model.learning_rate={rate}", "hparams_search=x", "eval_episodes=3"
        )
    assert table(read_trials([tmp_path])).splitlines() == [
        "model.learning_rate  final/return",
        "0.000443                      1.5",
        "0.0006466                     0.5",
    ]


def test_values_other_than_numbers_are_categories(tmp_path, figures):
    write_run(tmp_path / "0", 1.0, "model.network.hidden_sizes=[32,32]", "env=acrobot")
    write_run(tmp_path / "1", 2.0, "model.network.hidden_sizes=[64]", "~callbacks.bar", "model.gamma=0.9")
    write_run(
        tmp_path / "2", -0.123456, "model.network.hidden_sizes=[64]", "model.gamma=0.99", experiment="a2c_cartpole"
    )
    trials = read_trials([tmp_path])
    assert [line.split() for line in table(trials).splitlines()] == [
        ["experiment", "env", "callbacks.bar", "model.gamma", "model.network.hidden_sizes", "final/return"],
        ["ppo_cartpole", "-", "none", "0.9", "[64]", "2.0"],
        ["ppo_cartpole", "acrobot", "-", "-", "[32,32]", "1.0"],
        ["a2c_cartpole", "-", "-", "0.99", "[64]", "-0.123"],
    ]
    draw_trials(trials, tmp_path / "sweep.svg", title="three")
    panels = {axes.get_xlabel(): axes for axes in figures[0].axes if axes.get_visible()}
    assert list(panels) == table(trials).splitlines()[0].split()[:-1]
    categories = [text.get_text() for text in panels["model.network.hidden_sizes"].get_xticklabels()]
    assert categories == ["[32,32]", "[64]"]
    assert len(panels["env"].containers) == 3
    assert len(panels["model.gamma"].containers) == 3  # one run does not set it


def test_runs_with_defaults_are_included_and_run_limits_distinguished(tmp_path, figures):
    rates = ("model.learning_rate=0.0001",), ("model.learning_rate=0.001",), ()
    for number, (frames, rate) in enumerate([(frames, rate) for frames in (1000, 9000) for rate in rates]):
        folder = write_run(
            tmp_path / str(number), float(number), *rate
        )  # no override sets total_frames, as in a resumed run
        config = folder / ".hydra" / "config.yaml"
        settings = {"model": {"learning_rate": 0.0003}, "data": {"total_frames": frames}}
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **settings}))
    trials = read_trials([tmp_path])
    settings_of_trials = [tuple(trial.settings.values()) for trial in trials]
    assert settings_of_trials[0] == ("9000", "0.0003")
    assert len(set(settings_of_trials)) == 6
    draw_trials(trials, tmp_path / "sweep.png")
    frames, rates = figures[0].axes
    assert (frames.get_xscale(), rates.get_xscale()) == ("linear", "log")
    assert len(rates.containers) == 6
    assert legend(figures[0])[1:] == ["data.total_frames=1000", "data.total_frames=9000"]
    _, *handles = figures[0].legends[0].get_lines()
    markers = {container[0].get_marker() for container in rates.containers}
    assert markers == {line.get_marker() for line in handles}
    assert len(markers) == 2


@pytest.mark.parametrize(
    ("numbers", "is_logarithmic"),
    [
        ([1e-4, 3e-4, 1e-3], True),
        ([0.0001, 0.03], True),
        ([0.9, 0.99, 0.999], False),
        ([1.0, 5.0, 10.0], False),
        ([0.0, 0.1, 1.0], False),
        ([1e-7, 5e-4, 1e-3, 2e-3], True),
        ([8.0, 16.0, 32.0, 64.0, 128.0], True),
    ],
)
def test_axis_is_logarithmic_if_the_values_are(tmp_path, figures, numbers, is_logarithmic):
    trials = [Trial({"model.x": str(number)}, [], np.array([number])) for number in numbers]
    draw_trials(trials, tmp_path / "sweep.png")
    assert (figures[0].axes[0].get_xscale() == "log") == is_logarithmic


@pytest.mark.parametrize(
    ("record", "scale"), [("[data.num_epochs]", "log"), ("[]", "linear"), ("null", "linear"), ("5", "linear")]
)
def test_axis_is_logarithmic_if_the_search_records_it(record, scale, sweep, tmp_path, figures):
    for path in sweep.rglob("hydra.yaml"):
        kept = yaml.safe_load(path.read_text())
        kept["hydra"]["callbacks"] = {"search": {"logarithmic": yaml.safe_load(record)}}
        path.write_text(yaml.safe_dump(kept))
    draw_trials(read_trials([sweep]), tmp_path / "sweep.png")
    axes = next(axes for axes in figures[0].axes if axes.get_xlabel() == "data.num_epochs")
    assert axes.get_xscale() == scale


def test_runs_ended_early_are_listed_and_drawn_separately(tmp_path, figures):
    for number, end in enumerate(("", "1024,,,1024\n", "")):
        folder = write_run(tmp_path / str(number), float(number), f"model.gamma=0.{number}")
        (folder / "csv" / "metrics.csv").write_text(
            f"step,eval/return,final/return,final/ended_early\n1024,5.0,,\n{end}2048,,{number},\n"
        )
    trials = read_trials([tmp_path])
    assert [line.split() for line in table(trials).splitlines()] == [
        ["model.gamma", "final/return", "ended", "early"],
        ["0.2", "2.0", "-"],
        ["0.1", "1.0", "1024"],
        ["0.0", "0.0", "-"],
    ]
    draw_trials(trials, tmp_path / "sweep.png")
    draw_parallel(trials, tmp_path / "lines.png")
    marks = {float(c[0].get_ydata()[0]): c[0].get_markerfacecolor() for c in figures[0].axes[0].containers}
    assert {score: mark == "none" for score, mark in marks.items()} == {0: False, 1: True, 2: False}
    assert legend(figures[0]) == ["best trial", "ended early"]
    assert legend(figures[1]) == ["best trial", "worst trial", "ended early"]
    assert figures[1].legends[0].get_lines()[2].get_linestyle() == "--"
    lines = {line.get_ydata()[-1]: line.get_linestyle() for line in figures[1].axes[0].lines[:3]}
    assert lines == {0.0: "-", 0.5: "--", 1.0: "-"}


def test_latest_repeated_run_that_was_not_ended_early_counts(tmp_path):
    runs = (("0.9", 500.0, ""), ("0.9", 400.0, ""), ("0.9", 7.0, "1024"), ("0.8", 3.0, "1024"), ("0.8", 2.0, "1024"))
    for number, (gamma, score, ended) in enumerate(runs):
        path = write_run(tmp_path / str(number), score, f"model.gamma={gamma}") / "csv" / "metrics.csv"
        path.write_text(f"step,final/return,final/ended_early\n1024,,{ended}\n2048,{score},\n")
        os.utime(path, (number, number))
    scores = {trial.settings["model.gamma"]: (trial.score, len(trial.ended)) for trial in read_trials([tmp_path])}
    assert scores == {"0.9": (400.0, 0), "0.8": (2.0, 1)}


def test_parallel_lines_pass_the_position_of_each_setting(tmp_path, figures):
    rates, nets, scores = ("0.0001", "0.001", "0.01"), ("b", "a", "b"), (7.0, 5.0, 3.0)
    trials = [
        Trial({"net": net, "rate": rate}, [], np.array([score]))
        for net, rate, score in zip(nets, rates, scores, strict=True)
    ]
    draw_parallel(trials, tmp_path / "lines.svg", title="three")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["net", "rate", "Final mean return"]
    heights = sorted(line.get_ydata().tolist() for line in axes.lines[:3])
    np.testing.assert_allclose(heights, [[0, 0.5, 0.5], [1, 0, 1], [1, 1, 0]], atol=1e-12)
    assert sorted(text.get_text() for text in axes.texts) == ["0.0001", "0.01", "3", "7", "a", "b"]


def test_importances_equal_scipy_and_include_the_chance_level(tmp_path, figures):
    generator = np.random.default_rng(0)
    scores, rates = generator.normal(size=30), generator.integers(0, 9, 30)
    nets = generator.integers(0, 3, 30)
    trials = [
        Trial({"rate": str(rate), "net": "abc"[net], "same": str(score)}, [], np.array([score]))
        for score, rate, net in zip(scores, rates, nets, strict=True)
    ]
    values = importances(trials)
    assert values["rate"][0] == pytest.approx(abs(spearmanr(rates, scores).statistic))
    h = kruskal(*(scores[nets == net] for net in range(3))).statistic  # (n - 1) times the squared ratio
    assert values["net"][0] == pytest.approx(np.sqrt(h / 29))
    assert values["same"][0] == pytest.approx(1.0)
    assert 0.3 < values["rate"][1] < 0.42  # 1.96 / sqrt(29) = 0.364
    draw_importances(trials, tmp_path / "importances.png")
    assert [label.get_text() for label in figures[0].axes[0].get_yticklabels()][-1] == "same"
    equal = [Trial({"rate": str(rate)}, [], np.array([1.0])) for rate in range(4)]
    assert importances(equal) == {"rate": (0.0, 0.0)}


def test_run_without_a_score_is_left_out(sweep, caplog):
    write_run(sweep / "broken" / "8", None, "model.learning_rate=1", "data.num_epochs=4", "data.num_envs=4")
    assert len(read_trials([sweep])) == 4
    assert "1 of 9 runs" in caplog.text


@pytest.mark.parametrize("text", ["hydra: [", "- a list"])
def test_damaged_record_of_a_run_without_a_log_stops_no_picture(text, sweep, caplog):
    (sweep / "failed").mkdir()
    (keep(sweep / "failed") / ".hydra" / "hydra.yaml").write_text(text)
    assert len(read_trials([sweep])) == 4
    assert "1 of 9 runs" in caplog.text


def test_run_without_a_log_is_counted_as_left_out(sweep, caplog):
    for name, job in (("failed", "train"), ("evaluated", "evaluate")):
        (sweep / name).mkdir()
        record = keep(sweep / name) / ".hydra" / "hydra.yaml"
        kept = yaml.safe_load(record.read_text())
        kept["hydra"]["job"] = {"name": job}
        record.write_text(yaml.safe_dump(kept))
    assert len(read_trials([sweep])) == 4
    assert "1 of 9 runs" in caplog.text


@pytest.mark.parametrize(("title", "expected"), [(None, "ppo_cartpole"), ("mine", "mine")])
def test_title_of_a_sweep_is_its_experiment(title, expected, sweep, tmp_path, figures):
    trials = read_trials([sweep])
    for draw in (draw_trials, draw_parallel, draw_importances):
        draw(trials, tmp_path / "sweep.png", title=title)
    assert [figure.get_suptitle() for figure in figures] == [expected] * 3


def test_score_of_another_metric_is_its_last_value(tmp_path):
    for i in range(2):
        folder = write_run(tmp_path / str(i), 1.0, f"model.gamma=0.{i + 1}")
        (folder / "csv" / "metrics.csv").write_text(f"step,eval/return\n1,90\n2,{i}\n")
    (best, worst) = read_trials([tmp_path], "eval/return")
    assert (best.score, worst.score) == (1.0, 0.0)
    with pytest.raises(KeyError, match=r"no column final/return in .*there are: eval/return, step"):
        read_trials([tmp_path])


def test_large_numbers_keep_their_digits():
    few = [Trial({"data.total_frames": text}, [], np.array([1.0])) for text in ("100000", "12345678", "1e-05")]
    assert [line.split()[0] for line in table(few).splitlines()[1:]] == ["100000", "12345678", "1e-05"]


def test_bad_input_is_reported_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for seed in range(2):
        write_run(tmp_path / "same" / str(seed), 1.0, "model.gamma=0.9", seed=seed)
    output, takes = tmp_path / "sweep.png", "--table takes --metric, --output and --title"
    empty, same = str(tmp_path / "empty"), str(tmp_path / "same")
    for arguments, message in (
        (["nowhere"], "no such file or folder: nowhere"),
        ([empty], f"no metrics.csv below {empty}; was the run started with logger=csv?"),
        ([same], f"2 run(s) below {same} differ only in their seeds; name runs with different settings."),
        ([same, "--metric", "loss"], f"no column loss in {same}; there are: eval/return, final/return, step"),
        ([same, "--label", "m", "--smooth", "3"], f"{takes}, not --label, --smooth."),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--table", "--output", str(output)])
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"torchrl-lightning-plot: error: {message}\n"
    assert not output.exists()


@pytest.mark.skipif(find_spec("hydra_plugins.hydra_submitit_launcher") is None, reason="needs the extra slurm")
def test_each_run_of_a_sweep_is_a_job(run, tmp_path):
    run("train", "--multirun", "hydra/launcher=submitit_local", "seed=0,1", "experiment=ppo_cartpole", *TINY)
    folders = sorted(path.parent for path in tmp_path.glob("logs/train/sweep_*/*/*/*/csv"))
    assert [path.parts[-2:] for path in folders] == [("seed_0", "0"), ("seed_1", "1")]
    for folder in folders:
        assert (folder / "checkpoints" / "last.ckpt").exists()
    logs = [path.read_text() for path in tmp_path.glob("logs/train/sweep_*/.submitit/*/*_log.out")]
    assert len(logs) == 2
    assert all("mean evaluation return" in log for log in logs)
