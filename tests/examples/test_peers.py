"""Comparisons with peers: which stored runs count, and the table of their medians."""

from __future__ import annotations

import json

import pytest

from benchmarks import peers


def stored(began: str, **ratios: float) -> dict[str, object]:
    return {"machine": {"began": f"2026-01-01T{began}:00+00:00"}, "ratios": ratios}


def test_runs_that_begin_within_30_minutes_of_a_counted_run_do_not_count():
    runs = [stored("10:00", a=1.0), stored("10:29", a=9.0, b=2.0), stored("10:30", a=2.0), stored("11:30", a=3.0)]
    assert peers.counted(runs) == {"a": [1.0, 2.0, 3.0], "b": [2.0]}
    assert peers.counted(runs[::-1]) == peers.counted(runs)


def test_table_shows_median_range_and_number_of_the_counted_runs(tmp_path):
    for number, ratio in enumerate((1.2, 0.8, 1.1)):
        (tmp_path / f"{number}.json").write_text(json.dumps(stored(f"1{number}:00", a=ratio)))
    assert peers.table(tmp_path).splitlines()[2] == "| a | 1.10 | 0.80 to 1.20 | 3 |"


def test_run_stores_each_finished_row_with_the_machine(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def started(command: list[str], **_: object) -> object:
        failed = command[-1] == "td3"
        said = json.dumps([{"ours": [2.0]}, {f"{command[-1]}, peer": 0.5}])
        return type("Done", (), {"returncode": int(failed), "stdout": f"noise\n{said}\n"})

    monkeypatch.setattr(peers.subprocess, "run", started)
    content = json.loads(peers.run(["sac", "td3", "memory"], tmp_path).read_text())
    assert content["measured"] == {"sac": {"ours": [2.0]}, "memory": {"ours": [2.0]}}
    assert content["ratios"] == {"sac, peer": 0.5, "memory, peer": 0.5}
    assert set(content["machine"]) == {"began", "load", "processor", "python", "versions"}
    assert content["load"].keys() == {"sac", "td3", "memory"}


def test_conversion_to_tensors_keeps_the_values():
    import numpy as np

    sampled = peers.as_tensors(lambda: {"a": np.arange(3)})()
    assert sampled["a"].tolist() == [0, 1, 2]
