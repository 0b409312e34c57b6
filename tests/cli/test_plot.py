from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from cli.written_runs import keep, write_run
from torchrl_lightning.cli.plot import main, plot_runs
from torchrl_lightning.plotting.curves import default_label, one_of_each_seed, read_source


def lines(figure):
    return {line.get_label(): np.asarray(line.get_xydata()) for line in figure.axes[0].get_lines()}


def test_single_run_is_drawn(tmp_path, figures):
    run = write_run(tmp_path / "ppo_cartpole" / "seed_0" / "2026-11-20_10-30-00")
    output = plot_runs([run], tmp_path / "pictures" / "curve.png")
    picture = imread(output)
    assert picture.shape[0] > 300
    assert picture.shape[1] > 500
    assert picture[..., :3].std() > 0.01
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "Environment frames"
    assert axes.get_ylabel() == "Mean return"
    curve = lines(figures[0])["ppo_cartpole"]
    assert curve[:, 0].tolist() == [1024.0 * i for i in range(1, 21)]


def test_run_without_frames_is_drawn_over_updates(tmp_path, figures):
    (tmp_path / "metrics.csv").write_text("step,eval/return,updates_per_second\n10,1.0,\n20,2.0,5.0\n")
    plot_runs([tmp_path], tmp_path / "curve.png", smooth=2)
    assert figures[0].axes[0].get_xlabel() == "Updates"


def test_star_shows_the_score_of_the_evaluation_after_training(tmp_path, figures):
    for name, score in (("one", 8), ("two", 6)):
        (tmp_path / f"{name}.csv").write_text(f"step,eval/return,final/return\n10,9,\n20,1,\n20,,{score}\n")
    plot_runs([tmp_path / "one.csv", tmp_path / "two.csv"], tmp_path / "curve.png", labels=["same", "same"])
    curve, star = figures[0].axes[0].get_lines()
    assert curve.get_xydata().tolist() == [[10, 9], [20, 1]]
    assert star.get_xydata().tolist() == [[20, 7]]


def test_seeds_share_a_line_with_mean_and_range(tmp_path, figures):
    for seed in range(3):
        write_run(tmp_path / "ppo" / f"seed_{seed}" / "2026-01-01_00-00-00", seed=seed)
        write_run(tmp_path / "a2c" / f"seed_{seed}" / "2026-01-01_00-00-00", seed=seed, scale=300)
    plot_runs([tmp_path], tmp_path / "curve.png")
    drawn = lines(figures[0])
    assert set(drawn) == {"ppo (3 runs)", "a2c (3 runs)"}
    values = np.stack([curve.y for curve in read_source(tmp_path / "ppo", "eval/return", "step")])
    np.testing.assert_allclose(drawn["ppo (3 runs)"][:, 1], values.mean(0))
    band = figures[0].axes[0].collections[1].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(values.max())
    assert band[:, 1].min() == pytest.approx(values.min())


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_legend_explains_line_band_and_star_outside_the_axes(tmp_path, figures):
    for name in ("one", "two"):
        (tmp_path / f"{name}.csv").write_text("step,eval/return,final/return\n10,1,\n20,2,\n20,,3\n")
    sources = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for band in ("range", "std", "iqm", "none"):
        plot_runs(sources, tmp_path / "c.png", labels=["same", "same"], band=band)
    assert [legend(figure) for figure in figures] == [
        ["line: mean of the runs", "band: lowest to highest run", "star: evaluation after training"],
        ["line: mean of the runs", "band: one standard deviation of the runs", "star: evaluation after training"],
        ["line: mean of the middle half of the runs", "band: its 95 % interval", "star: evaluation after training"],
        ["line: mean of the runs", "star: evaluation after training"],
    ]
    for figure in figures:
        assert figure.get_suptitle() == "same (2 runs)"
        assert figure.axes[0].get_legend() is None
        box, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
        assert box.y1 < axes.y0


def test_settings_of_all_runs_are_in_the_title_and_the_legend_lists_the_others(tmp_path, figures):
    for number, more in enumerate(([], ["model.network.hidden_sizes=[64, 64]"], ["model.lmbda=0.9"])):
        keep(write_run(tmp_path / "runs" / str(number)), "model.gamma=0.9", *more)
    keep(write_run(tmp_path / "other"), "model.gamma=0.9", experiment="a2c_cartpole")
    plot_runs([tmp_path / "runs"], tmp_path / "c.png")
    plot_runs([tmp_path / "runs"], tmp_path / "c.png", title="mine")
    plot_runs([tmp_path / "runs" / "0", tmp_path / "other"], tmp_path / "c.png")
    assert [figure.get_suptitle() for figure in figures] == ["ppo_cartpole model.gamma=0.9", "mine", ""]
    assert legend(figures[2]) == ["a2c_cartpole model.gamma=0.9", "ppo_cartpole model.gamma=0.9"]
    assert legend(figures[0]) == ["default settings", "model.network.hidden_sizes=[64, 64]", "model.lmbda=0.9"]


def test_long_label_is_broken_into_lines(tmp_path, figures):
    for name in ("one", "two"):
        (tmp_path / f"{name}.csv").write_text("step,eval/return\n0,0\n10,1\n")
    labels = [" ".join(["setting=value"] * 10), "short"]
    plot_runs([tmp_path / "one.csv", tmp_path / "two.csv"], tmp_path / "c.png", labels=labels)
    assert [text.split() for text in legend(figures[0])] == [label.split() for label in labels]
    assert [text.count("\n") for text in legend(figures[0])] == [1, 0]


def test_curves_of_more_groups_than_colours_look_different(tmp_path, figures):
    for number in range(9):
        (tmp_path / f"{number}.csv").write_text("step,eval/return\n0,0\n10,1\n")
    plot_runs([tmp_path / f"{number}.csv" for number in range(9)], tmp_path / "c.png", labels=[*"abcdefghi"])
    looks = {(line.get_color(), line.get_linestyle()) for line in figures[0].axes[0].get_lines()}
    assert len(looks) == 9


def test_middle_half_of_seeds_is_drawn_with_its_interval(tmp_path, figures):
    for seed, value in enumerate([1, 2, 3, 4, 100]):
        (tmp_path / f"{seed}.csv").write_text(f"step,eval/return,final/return\n0,{value},\n10,{value},{value}\n")
    sources = [tmp_path / f"{seed}.csv" for seed in range(5)]
    plot_runs(sources, tmp_path / "c.png", labels=["same"] * 5, band="iqm")
    curve, star = figures[0].axes[0].get_lines()
    assert curve.get_ydata().tolist() == pytest.approx([3.0, 3.0])  # (0.75 * 2 + 3 + 0.75 * 4) / 2.5
    assert star.get_ydata().tolist() == pytest.approx([3.0])
    band = figures[0].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert 1 < band.min() < 3 < band.max() < 100


def test_runs_on_other_grids_are_interpolated_and_may_end_early(tmp_path, figures):
    for name, rows in (("one", "0,0\n10,10\n"), ("two", "0,2\n5,7\n10,12\n20,22\n")):
        (tmp_path / f"{name}.csv").write_text("step,eval/return\n" + rows)
    plot_runs([tmp_path / "one.csv", tmp_path / "two.csv"], tmp_path / "c.png", labels=["same", "same"], band="std")
    curve = lines(figures[0])["same (2 runs)"]
    assert curve.tolist() == [[0, 1], [5, 6], [10, 11], [20, 22]]


def test_panels_smoothing_and_columns(tmp_path, figures):
    table = "epoch,eval/return,loss\n0,0,1\n1,3,\n2,6,2\n2,9,nan\n"
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}.csv").write_text(table)
    sources = [tmp_path / f"{name}.csv" for name in ("a", "b", "c", "d")]
    plot_runs(sources, tmp_path / "c.svg", x="epoch", smooth=3, panels=True, title="four")
    visible = [axes for axes in figures[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in visible] == ["a", "b", "c", "d"]
    assert lines(figures[0])["a"].tolist() == [[0, 1.5], [1, 4], [2, 6]]
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    assert [curve.y.tolist() for curve in read_source(sources[0], "loss", "epoch")] == [[1, 2]]


def test_labels_name_what_seeds_have_in_common():
    for path, label in {
        "logs/train/ppo/seed_3/2026-11-20_10-30-00/csv/metrics.csv": "ppo",
        "logs/train/ppo/seed_3/2026-11-20_10-30-00_2/csv/metrics.csv": "ppo",
        "x/ppo-seed7/lightning_logs/version_12/metrics.csv": "ppo",
        "x/seed=1/metrics.csv": "x",
        "x/dqn_seed4.csv": "dqn",
        "x/vtrace.csv": "vtrace",
        "x/a2c_seed=1/version_0/metrics.csv": "a2c",
        "x/3d_walker/metrics.csv": "3d_walker",
    }.items():
        assert default_label(Path(path)) == label


def test_runs_without_the_metric_are_left_out_beside_others(tmp_path, caplog):
    write_run(tmp_path / "a" / "seed_0")
    (tmp_path / "a" / "seed_1").mkdir()
    (tmp_path / "a" / "seed_1" / "metrics.csv").write_text("step,train/loss\n1,2\n")
    assert len(read_source(tmp_path, "eval/return", "step")) == 1
    assert "1 of 2 runs" in caplog.text


def test_errors_list_the_existing_columns(tmp_path):
    run, output = write_run(tmp_path / "run"), tmp_path / "curve.png"
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.csv").write_text("step,eval/return\n1,much\n")
    (tmp_path / "young.csv").write_text("step,eval/return\n1,\n")
    for error, says, sources, options in (
        (FileNotFoundError, r"no such file or folder: .*nowhere", [tmp_path / "nowhere"], {}),
        (FileNotFoundError, r"no metrics\.csv below .*empty", [tmp_path / "empty"], {}),
        (KeyError, r"no column eval/score in .*: eval/return, step, train/loss", [run], {"metric": "eval/score"}),
        (ValueError, "line 2: step and eval/return must be numbers, got '1' and 'much'", [tmp_path / "words.csv"], {}),
        (ValueError, "has no value of eval/return yet", [tmp_path / "young.csv"], {}),
        (ValueError, "labels must have one entry for each of the 2 sources, got 1", [run, run], {"labels": ["one"]}),
        (ValueError, "smooth must be at least 1 point, got 0", [run], {"smooth": 0}),
        (ValueError, "band must be one of .*got 'wide'", [run], {"band": "wide"}),
        (ValueError, "no run given", [], {}),
    ):
        with pytest.raises(error, match=says):
            plot_runs(sources, output, **options)
    assert not output.exists()


def test_command_line(tmp_path, capsys):
    run, output = write_run(tmp_path / "run"), tmp_path / "curve.png"
    assert main([str(run), "--output", str(output), "--label", "mine", "--smooth", "3", "--band", "std"]) == 0
    assert output.exists()
    assert capsys.readouterr().out == f"learning curve: {output}\n"
    for arguments, message in (
        ([str(tmp_path / "no")], "no such file"),
        ([str(run), "--metric", "x"], "no column x in"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--output", str(output)])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_runs_are_told_apart_by_their_overrides_and_not_by_their_folder(tmp_path, figures):
    for i, (seed, *overrides) in enumerate(
        [(0,), (1,), (0, "env=acrobot"), (0, "data.num_epochs=4", "model.clip_epsilon=0.1", "logger=many")]
    ):
        keep(write_run(tmp_path / "ppo_cartpole" / f"{i}", seed=i), *overrides, seed=seed)
    alone = {"experiment": "", "model": "a2c", "env": "cartpole"}
    keep(write_run(tmp_path / "ppo_cartpole" / "9"), "~experiment", "model=a2c", **alone)
    keep(write_run(tmp_path / "ppo_cartpole" / "10"), "env=mujoco", "data.env.id=Hopper-v5", "model.gamma=0.9")
    plot_runs([tmp_path], tmp_path / "curve.png")
    assert set(lines(figures[0])) == {
        "mujoco Hopper-v5 by ppo_cartpole model.gamma=0.9",
        "ppo_cartpole (2 runs)",
        "acrobot by ppo_cartpole",
        "ppo_cartpole data.num_epochs=4 model.clip_epsilon=0.1",
        "a2c_cartpole",
    }


def test_repeated_seed_counts_once(tmp_path, caplog):
    runs = [keep(write_run(tmp_path / name, seed=i), seed=3) for i, name in enumerate(("b", "a"))]
    os.utime(runs[0] / "csv" / "metrics.csv", (1, 1))
    curves = [curve for source in (runs[0], tmp_path) for curve in read_source(source, "eval/return", "step")]
    curves = one_of_each_seed(curves)
    assert [curve.path.parts[-3] for curve in curves] == ["a"]
    assert "has the same settings and seed" in caplog.text
    with_value = one_of_each_seed(read_source(tmp_path, "eval/return", "step", "mine"))
    assert [curve.label for curve in with_value] == ["mine", "mine"]


def test_resumed_run_continues_its_curve(tmp_path, figures):
    first = keep(write_run(tmp_path / "first"), "data.total_frames=20480", "model.gamma=0.9", seed=3)
    for name, origin, frames in (("second", "first", range(11, 31)), ("third", "second", range(21, 41))):
        run = tmp_path / name
        (run / "csv").mkdir(parents=True)
        rows = ["step,eval/return", f"{frames[0] * 1024 - 512},", *(f"{i * 1024},{i}" for i in frames)]
        (run / "csv" / "metrics.csv").write_text("\n".join(rows))
        # The seed comes from the checkpoint. Its path is relative to the command's working directory.
        checkpoint, end = f"{origin}/checkpoints/last.ckpt", f"data.total_frames={frames[-1] * 1024}"
        keep(run, "model.gamma=0.9", f"ckpt_path={checkpoint}", end, ckpt_path=checkpoint, seed=3)
    plot_runs([tmp_path], tmp_path / "curve.png")
    ((label, curve),) = lines(figures[0]).items()
    assert label == "ppo_cartpole data.total_frames=20480 model.gamma=0.9"
    assert curve[:, 0].tolist() == [1024.0 * i for i in range(1, 41)]
    before = read_source(first, "eval/return", "step")[0]
    assert curve[:10, 1].tolist() == before.y[:10].tolist()
    assert curve[10:, 1].tolist() == list(range(11, 41))
    # A run that resumes in its own folder has overwritten its earlier curve.
    keep_again = tmp_path / "third" / ".hydra" / "config.yaml"
    keep_again.write_text(yaml.safe_dump({"seed": 0, "ckpt_path": "third/checkpoints/last.ckpt"}))
    assert len(read_source(tmp_path / "third", "eval/return", "step")[0].x) == 20
