"""The page of logged metrics lists each column with its rule."""

from __future__ import annotations

import re
from pathlib import Path

import torchrl_lightning
from torchrl_lightning import agents

PAGE = Path(__file__).parents[2] / "examples" / "guide" / "metrics.md"
PACKAGE = Path(torchrl_lightning.__file__).parent
COLUMN = re.compile(r'"((?:train|eval|time|replay|collector|demos|holdout|final|val|frames)/\w+)"')
OTHERS = {"frames", "updates", "fits", "policy_lag", "mean_abs_rho_minus_1", "frames_per_second", "updates_per_second"}
COMPOSED = {"demos/D_R", "demos/D_V", "collector/deaths", "collector/restarts", "collector/lost_frames"}


def rows() -> list[tuple[str, str]]:
    """Return the column names and the rule in each row of the page's tables."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(row[0], row[2]) for row in cells]


def is_listed(name: str) -> bool:
    listed = [column for names, _ in rows() for column in re.findall(r"`([^`]+)`", names)]
    return any(name == column or (column[-1] == "*" and name.startswith(column[:-1])) for column in listed)


def literals() -> set[str]:
    """Return the column names in the source code."""
    return {name for path in PACKAGE.rglob("*.py") for name in COLUMN.findall(path.read_text())}


def test_page_lists_each_column() -> None:
    listed_by_agents = {
        name
        for agent in (getattr(agents, name) for name in agents.__all__)
        for attribute in ("training_metrics", "evaluation_metrics")
        for name in getattr(agent, attribute, ())
    }
    assert {"train/entropy", "eval/return"} <= listed_by_agents
    assert {"eval/success", "replay/batch_age", "demos/rho", "final/return"} <= literals()
    names = listed_by_agents | literals() | OTHERS | COMPOSED
    assert sorted(name for name in names if not is_listed(name)) == []


def test_each_column_has_a_rule_of_the_page() -> None:
    text = PAGE.read_text()
    rules = {
        row.split(" | ")[0].strip("| ") for row in text.partition("| rule |")[2].partition("\n\n")[0].splitlines()[2:]
    }
    assert len(rules) == 5
    assert {rule for _, rule in rows()} <= rules
