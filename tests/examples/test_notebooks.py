"""The notebooks are stored without outputs, and their cells run in order with few frames."""

from __future__ import annotations

import json
import re
from functools import partial

import lightning  # noqa: F401  # here and below, so that what is forked need not
import matplotlib.pyplot as plt  # noqa: F401
import pytest
import torchrl.objectives  # noqa: F401

from kit.blocks import END, few_frames, run_blocks
from kit.forks import Forked
from kit.processes import PROJECT
from torchrl_lightning import OnPolicyDataModule, PPODBuffer, PPOModule, load_policy  # noqa: F401

FOLDER = PROJECT / "examples" / "notebooks"
LAST_LINE = {
    "own_trainer": r"mean return of 20 episodes: \d+\.\d",
    "a_buffer_taken_apart": "the same next batch: True",
    "from_a_demonstration_to_a_policy": r"share of 20 unseen episodes that reach the goal: [01]\.\d\d",
}


@pytest.mark.parametrize("name", LAST_LINE)
def test_notebook_runs_as_it_is_written(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [few_frames("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    process = Forked(partial(run_blocks, code), tmp_path, said=tmp_path / "said")
    assert process.ends() == 0, process.said
    assert re.fullmatch(LAST_LINE[name], process.said.replace(END, "").splitlines()[-1])


def test_notebook_is_valid_without_outputs_and_a_page_leads_there():
    paths = {path.stem: path for path in FOLDER.iterdir()}
    assert set(paths) == set(LAST_LINE)
    pages = "".join(page.read_text() for page in (PROJECT / "README.md", *FOLDER.parent.glob("guide/*.md")))
    for name, path in paths.items():
        assert f"notebooks/{name}.ipynb)" in pages
        book = json.loads(path.read_text())
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        ids = [cell["id"] for cell in book["cells"]]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch(r"[a-z]+-\d+", each) for each in ids)
        code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
        assert book["cells"][0]["source"][0].startswith("# ")
