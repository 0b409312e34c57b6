"""The pages for users of other libraries map each documented name to an existing name of this package."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torchrl.data
import yaml

import torchrl_lightning
from kit.processes import PROJECT
from kit.store import composed
from torchrl_lightning._hydra.paths import CONF_DIR

GUIDE = PROJECT / "examples" / "guide"
DOCUMENTED = yaml.safe_load((PROJECT / "tests" / "data" / "documented_names.yaml").read_text())
CONFIGS = {f"{path.parent.name}={path.stem}" for path in CONF_DIR.rglob("*.yaml")}
TABLE = r"^\| ([^|]*) \| (here[^|]*) \|[^\n]*\n\|[ -|]*\n((?:\|.*\n)+)"
NAME = r"(\w+)(?:\.(\w+))?(?:\(([\w, ]*)\))?"


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tables(page: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Map the subject of each table to our class and to the first two cells of its rows."""
    found = {}
    for theirs, ours, body in re.findall(TABLE, (GUIDE / f"{page}.md").read_text(), flags=re.MULTILINE):
        rows = [tuple(each.strip() for each in re.split(r"(?<!\\)\|", row)[1:3]) for row in body.splitlines()]
        found[names_in(theirs)[0] if names_in(theirs) else theirs] = "".join(names_in(ours)), rows
    return found


def takes(function: Any, names: str | None) -> bool:
    """Return whether a function accepts parameters with these names."""
    wanted = {name for name in (names or "").split(", ") if name}
    parameters = inspect.signature(function).parameters if wanted else {}
    return wanted <= parameters.keys() or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def name_exists(name: str, owner: str) -> bool:
    """Return whether a name exists as a config option, an export, or an argument or member of the table's class."""
    if "=" in name:
        return name in CONFIGS
    match = re.fullmatch(NAME, name)
    assert match, name
    first, member, parameters = match.groups()
    if first in torchrl_lightning.__all__:
        part = getattr(torchrl_lightning, first)
        return takes(getattr(part, member) if member else part, parameters)
    kind = getattr(torchrl_lightning, owner)
    made_with = inspect.signature(kind).parameters
    return first in made_with or (hasattr(kind, first) and takes(getattr(kind, first), parameters))


@pytest.mark.parametrize("page", DOCUMENTED)
def test_page_leads_from_every_documented_name_to_one_that_is_there(page):
    found = tables(page)
    listed = {
        kind: {name for line in lines for name in re.split(r", (?![^(]*\))", line)}
        for kind, lines in DOCUMENTED[page].items()
    }
    assert listed == {kind: {name for row in found[kind][1] for name in names_in(row[0])} for kind in listed}
    for owner, rows in found.values():
        for theirs, ours in rows:
            wanted = names_in(theirs if ours == "the same" else ours)
            assert wanted or ours == "none", theirs
            assert [name for name in wanted if not name_exists(name, owner)] == [], (page, theirs)


def test_defaults_beside_stable_baselines3s_are_those_of_the_command():
    cfg = composed("train", "~experiment", "data=uniform", "model=dqn")
    parts = (cfg.data, cfg.data.buffer, cfg.data.buffer.storage, cfg.model)
    values = {(node._target_.rpartition(".")[2], str(name)): value for node in parts for name, value in node.items()}
    page = (GUIDE / "from_stable_baselines3.md").read_text()
    compared = 0
    for ours, defaults in re.findall(r"^\| [^|]* \| ([^|]*) \|[^|]*\| [^|;]*; ([^|]*) \|$", page, flags=re.MULTILINE):
        told = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", defaults)]
        has = [values[name] for name in re.findall(r"`(\w+)\((\w+)\)`", ours)]
        compared += len(pairs := [*zip(told, has, strict=False)])
        assert all(number == value for number, value in pairs), ours
    assert compared >= 12


@pytest.mark.parametrize(("model", "data", "number"), [("ppo", "gae", 8), ("td3", "hindsight", 4)])
def test_defaults_of_the_other_algorithms_are_those_of_the_command(model, data, number):
    cfg = composed("train", "~experiment", f"model={model}", f"data={data}")
    transform = cfg.data.buffer.get("transform") or {}
    parts = [cfg.model, cfg.data, cfg.data.buffer, transform, *getattr(transform, "transforms", [])]
    values = {
        (node._target_.rpartition(".")[2], str(name)): value
        for node in parts
        if "_target_" in node
        for name, value in node.items()
    }
    page = (GUIDE / "from_stable_baselines3.md").read_text()
    compared = 0
    for ours, defaults in re.findall(r"^\| [^|]* \| ([^|]*) \|[^|]*\|[^|]*\| ([^|]*) \|$", page, flags=re.MULTILINE):
        names = re.findall(r"`(\w+)\((\w+)\)`", ours)
        for name, told in zip(names, re.sub(r" \([^)]*\)", "", defaults).split(", "), strict=False):
            if name in values and re.fullmatch(r"[\d.]+", told):
                compared += 1
                assert values[name] == float(told), name
    assert compared == number


def test_every_page_has_its_list():
    assert {path.stem for path in GUIDE.glob("from_*.md")} == set(DOCUMENTED)


def bare(page: str, kind: str) -> set[str]:
    """Return the documented names without their parameters."""
    return {name.partition("(")[0] for line in DOCUMENTED[page][kind] for name in re.split(r", (?![^(]*\))", line)}


def test_torchrls_parts_are_all_listed():
    kinds = (
        torchrl.data.Storage,
        torchrl.data.Writer,
        torchrl.data.ReplayBuffer,
        torchrl.data.RandomSampler.__mro__[1],
    )
    parts = {name: each for name, each in vars(torchrl.data).items() if inspect.isclass(each)}
    assert bare("from_torchrl", "torchrl.data") == {name for name, each in parts.items() if issubclass(each, kinds)}


def test_stable_baselines3s_names_are_all_listed():
    library = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import VecNormalize

    def public(kind: type, names: Any) -> set[str]:
        return {*inspect.signature(kind).parameters, *(name for name in names if not name.startswith("_"))}

    assert bare("from_stable_baselines3", "DQN") == public(library.DQN, dir(library.DQN))
    assert bare("from_stable_baselines3", "VecNormalize") == public(VecNormalize, vars(VecNormalize))
