"""Comparisons with other libraries: which stored runs count, and the tables of their medians."""

from __future__ import annotations

import json

import pytest

from benchmarks import harness, peers
from benchmarks.whole_runs import names


def stored(began: str, processor: str = "A", **ratios: float) -> dict[str, object]:
    return {"machine": {"began": f"2026-01-01T{began}:00+00:00", "processor": processor}, "ratios": ratios}


def test_runs_that_begin_within_30_minutes_of_a_counted_run_do_not_count():
    runs = [stored("10:00", a=1.0), stored("10:29", a=9.0, b=2.0), stored("10:30", a=2.0), stored("11:30", a=3.0)]
    assert peers.counted(runs) == {"a": [1.0, 2.0, 3.0], "b": [2.0]}
    assert peers.counted(runs[::-1]) == peers.counted(runs)


def test_newest_three_runs_count():
    runs = [stored(f"1{number}:00", a=float(number)) for number in range(5)]
    assert peers.counted(runs) == {"a": [2.0, 3.0, 4.0]}


def test_runs_of_the_newest_processor_count():
    runs = [stored("10:00", a=1.0, b=5.0), stored("11:00", "B", a=2.0), stored("12:00", "B", a=3.0)]
    assert peers.counted(runs) == {"a": [2.0, 3.0], "b": [5.0]}


def test_check_needs_a_stored_run_of_this_processor(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "1.json").write_text(json.dumps(stored("10:00", a=1.0)))
    (tmp_path / "2.json").write_text(json.dumps(stored("11:00", "B", a=2.0)))
    assert peers.stored(tmp_path, "A") == {"a": [1.0]}
    monkeypatch.setattr(peers, "stored", lambda **_: {})
    monkeypatch.setattr(peers.sys, "argv", ["peers.py", "run", "--check"])
    with pytest.raises(SystemExit, match="--check needs stored runs of this processor"):
        peers.main()


def test_pages_have_the_ratios_of_the_stored_runs():
    """Write them with ``python tests/benchmarks/peers.py table``."""
    for path, text in peers.written().items():
        assert path.read_text() == text, path


def test_every_stored_comparison_has_a_place_on_the_page():
    rows = {key.partition(", ")[0] for key in peers.stored()}
    assert rows <= {*peers.RUNS, *peers.PARTS}
    assert {key.partition(", ")[0] for key in peers.AIMS} <= {*peers.PARTS}
    assert {*peers.ROWS} - {"memory"} <= {*peers.RUNS, *peers.PARTS}


def test_tables_show_median_range_runs_and_whether_an_aim_is_missed():
    found = {
        "sac, Stable-Baselines3": [2.0, 1.0, 3.0],
        "sac, SBX": [1.04],
        "uniform_32, cpprb": [0.9],
        "uniform_32, cpprb, as tensors": [1.2],
        "memory of dqn_cartpole, Stable-Baselines3, with a curve": [1.21],
    }
    assert peers.runs_table(found).splitlines()[2:] == [
        "| SAC Pendulum, 256 x 256 | 2.00 (1.00 to 3.00) | 1.04 (1.04 to 1.04) | 3 |"
    ]
    sampling = peers.PARTS["uniform_32"]
    assert peers.parts_table(found).splitlines()[2:] == [
        f"| {sampling} | cpprb | 0.90 (0.90 to 0.90) | 1 | 1.0, missed |",
        f"| {sampling} | cpprb, as tensors | 1.20 (1.20 to 1.20) | 1 |  |",
        f"| {peers.PARTS['memory of dqn_cartpole']} | Stable-Baselines3, with a curve | 1.21 (1.21 to 1.21) | 1 "
        "| 1.2, missed |",
    ]
    assert peers.aim("uniform_32, cpprb", [1.0]) == "1.0"
    assert peers.aim("memory of dqn_cartpole, Stable-Baselines3, with a curve", [1.2]) == "1.2"


def test_sentence_has_the_range_of_all_runs_on_vectors():
    found = {f"{name}, Stable-Baselines3": [number + 2.0] for number, name in enumerate(peers.RUNS)}
    found["ppo_pong, Stable-Baselines3"] = [1.257]
    assert "is 2.0 to 10.0 times" in peers.summary(found)
    assert peers.summary(found).endswith("images 1.26 times")


def test_check_reports_ratios_that_are_a_tenth_worse_than_all_stored_ones():
    known = {"a, x": [1.0, 2.0], "memory of a, x": [1.2, 1.3]}
    assert peers.worse({"a, x": 0.91, "memory of a, x": 1.42, "new": 0.1}, known) == []
    assert peers.worse({"a, x": 0.89, "memory of a, x": 1.44}, known) == [
        "a, x: 0.89, stored are 1.50 (1.00 to 2.00)",
        "memory of a, x: 1.44, stored are 1.25 (1.20 to 1.30)",
    ]


def test_ratio_of_a_part_is_that_of_the_fastest_way_of_each_peer():
    def spend(count: int) -> object:
        return lambda: sum(range(count))

    contenders = {"ours": spend(20_000), "TorchRL, slow": spend(200_000), "TorchRL": spend(40_000), "rlax": spend(9)}
    measured, ratios = peers.part("row", contenders, ("TorchRL", "rlax", "absent"))
    assert measured.keys() == contenders.keys()
    assert ratios == {
        "row, TorchRL": measured["TorchRL"][1] / measured["ours"][1],
        "row, rlax": measured["rlax"][1] / measured["ours"][1],
    }


def test_ratios_of_a_training_run_compare_with_the_fastest_sbx_and_with_the_command():
    speeds = {
        names.OURS: [10.0, 1.0, 11.0],
        names.SB3: [5.0],
        names.SBX: [8.0],
        names.SBX_FOUR: [12.5],
        names.COMMAND: [9.0],
    }
    assert peers.run_ratios("dqn_8", speeds) == {
        "dqn_8, Stable-Baselines3": 2.0,
        "dqn_8, SBX": 0.8,
        f"dqn_8, {peers.AS_COMMAND}": 0.9,
    }


def test_run_stores_each_finished_row_with_the_machine(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def started(command: list[str], **_: object) -> object:
        failed = command[-1] == "td3"
        said = json.dumps([{"ours": [2.0]}, {f"{command[-1]}, peer": 0.5}])
        return type("Done", (), {"returncode": int(failed), "stdout": f"noise\n{said}\n"})

    monkeypatch.setattr(peers.subprocess, "run", started)
    with pytest.raises(SystemExit, match=r"^td3: failed with status 1$"):
        peers.run(["sac", "td3", "memory"], tmp_path)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert content["measured"] == {"sac": {"ours": [2.0]}, "memory": {"ours": [2.0]}}
    assert content["ratios"] == {"sac, peer": 0.5, "memory, peer": 0.5}
    assert set(content["machine"]) == {"began", "load", "processor", "python", "versions"}
    assert content["load"].keys() == {"sac", "td3", "memory"}
    assert peers.run(["memory"], tmp_path / "other") == {"memory, peer": 0.5}


def test_conversion_to_tensors_keeps_the_values():
    import numpy as np

    sampled = peers.as_tensors(lambda: {"a": np.arange(3)})()
    assert sampled["a"].tolist() == [0, 1, 2]


def test_libraries_select_their_own_code_in_measurements(monkeypatch: pytest.MonkeyPatch):
    """Machines may set variables that select the code of another processor."""
    variables = {"OPENBLAS_CORETYPE": "Haswell", "MKL_CBWR": "AVX2", "NUMBA_CPU_NAME": "haswell", "NUMBA_DEBUG": "0"}
    monkeypatch.setattr(harness.os, "environ", dict(variables))
    harness.one_thread(pin=False)
    assert [name for name in variables if name in harness.os.environ] == ["NUMBA_DEBUG"]
    assert harness.os.environ["OMP_NUM_THREADS"] == harness.os.environ["OPENBLAS_NUM_THREADS"] == "1"
