"""Build the ``--help`` text from the comments in ``conf/``, without Hydra, because composing a config takes seconds."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from torchrl_lightning._hydra.paths import CONF_DIR

_SETTING = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: (?P<value>[^#]*))?(?:# (?P<meaning>.*))?$")
_CHOICE = re.compile(r"  - (?:override /)?(?P<group>[\w/]+): (?P<option>\w+)(?: # (?P<meaning>.*))?$")
_SECTIONS = ("data", "model", "trainer")  # sections in addition to the top level of the config


def help_text(name: str) -> str:
    """Return the help of a command: examples, groups with their options, and main settings with their comments."""
    path = CONF_DIR / f"{name}.yaml"
    chosen = _choices(path)
    parts = [_head(path)]
    if groups := list(_groups(path)):
        parts.append("GROUP=NAME selects a config:\n\n" + "\n".join(groups))
    settings = _settings(path, chosen)
    width = min(36, max(len(f"{key}={value}") for key, (value, _) in settings.items()))
    lines = [f"  {f'{key}={value}':{width}}  {meaning}" for key, (value, meaning) in settings.items()]
    parts.append("FIELD=VALUE sets a value. The main settings and their defaults:\n\n" + "\n".join(lines))
    parts.append("--cfg job prints the config of a run, --hydra-help prints the options of Hydra.")
    return "\n\n".join(parts)


def _head(path: Path) -> str:
    """Return the comment at the top of a file."""
    return "\n".join(line[2:] for line in takewhile(lambda line: line.startswith("#"), _lines(path)))


def _choices(path: Path) -> dict[str, str]:
    """Map the groups of a defaults list to their selected options, including the groups that its experiment selects."""
    matches = [match for match in map(_CHOICE.match, _lines(path)) if match is not None and match["option"] != "null"]
    options = {match["group"]: match["option"] for match in matches}
    experiment = CONF_DIR / "experiment" / f"{options.get('experiment')}.yaml"
    return {**options, **_choices(experiment)} if experiment.is_file() else options


def _groups(path: Path) -> Iterator[str]:
    """Yield each documented group of a defaults list, and its options with a star after the selected one."""
    for match in map(_CHOICE.match, _lines(path)):
        if match is None or not match["meaning"]:
            continue
        # Below the top level, group names in a defaults list are relative to the group of the list.
        group = match["group"] if path.parent == CONF_DIR else f"{path.parent.name}/{match['group']}"
        files = sorted((CONF_DIR / group).glob("*.yaml"))
        # A `default` file that other options include is their base. It is an option only if it is selected.
        included = any("  - default" in _lines(file) for file in files)
        hidden = {"default"} - {match["option"]} if included else set()
        names = [file.stem for file in files if file.stem not in hidden]
        starred = " ".join(f"{name}*" if name == match["option"] else name for name in names)
        yield f"  {group:15} {match['meaning']}"
        yield textwrap.fill(starred, 110, initial_indent=" " * 20, subsequent_indent=" " * 20)
        if (base := CONF_DIR / group / "default.yaml") in files:
            yield from _groups(base)


def _settings(path: Path, chosen: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Map the documented settings to their values and comments. Later files in Hydra's order override earlier ones."""
    settings: dict[str, tuple[str, str]] = {}
    files = [(CONF_DIR / group / f"{chosen[group]}.yaml", group) for group in (*_SECTIONS, "env") if group in chosen]
    files += [(path, "")]
    if "experiment" in chosen:
        files.append((CONF_DIR / "experiment" / f"{chosen['experiment']}.yaml", ""))
    for file, package in files:
        for key, value, meaning in _fields(file, package):
            if key.partition(".")[0] in _SECTIONS or "." not in key:
                previous = settings.get(key, ("", ""))
                settings[key] = (value, meaning or previous[1])
    documented = {key: (value, meaning) for key, (value, meaning) in settings.items() if meaning and value}
    section_order = ("", *_SECTIONS)
    return dict(
        sorted(documented.items(), key=lambda item: section_order.index(item[0].rpartition(".")[0].partition(".")[0]))
    )


def _fields(path: Path, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and comment of each scalar setting; included files come first."""
    header = re.match(r"# @package (\S+)\n", path.read_text())
    if header is not None:
        package = header[1].replace("_global_", "")
    stack: list[tuple[int, str]] = [(-1, package)]
    for line in _lines(path):
        base = re.match(r"  - (/?)([\w/]+?)(?:@_here_)?$", line)
        if base is not None and (file := (CONF_DIR if base[1] else path.parent) / f"{base[2]}.yaml").is_file():
            yield from _fields(file, package)
        match = _SETTING.match(line)
        if match is None or match["key"] == "defaults":
            continue
        while stack[-1][0] >= len(match["indent"]):
            stack.pop()
        key = f"{stack[-1][1]}.{match['key']}".lstrip(".")
        value = (match["value"] or "").strip()
        if value:
            yield key, value, match["meaning"] or ""
        else:
            stack.append((len(match["indent"]), key))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
