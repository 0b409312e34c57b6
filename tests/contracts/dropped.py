"""Restoring a state without one of its entries, as if the entry had not been declared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchrl_lightning
from torchrl_lightning.datamodules.rebuilding import RunState
from torchrl_lightning.episodic.frame_storage import FrameStorage
from torchrl_lightning.replay import RingStorage
from torchrl_lightning.rollout import RolloutStorage
from torchrl_lightning.state import Attribute, Stated

Name = str  # "Class.entry"

# Storages take all their entries at once.
AT_ONCE = (RingStorage, FrameStorage, RolloutStorage)


def import_all() -> None:
    """Import each module that declares a state."""
    package = Path(torchrl_lightning.__file__).parent
    for file in sorted(package.rglob("*.py")):
        if "STATE = {" in file.read_text():
            importlib.import_module(".".join(file.relative_to(package.parent).with_suffix("").parts))


def entries_of(kind: type) -> Mapping[str, Attribute]:
    """Return the entries that the body of a class lists."""
    return next((vars(kind)[name] for name in ("STATE", "RUN_STATE", "SHARED_STATE") if name in vars(kind)), {})


def owner_of(kind: type, name: str, entry: Attribute) -> type:
    """Return the class that declares an entry of a class."""
    owner = kind
    for base in kind.__mro__:
        if entries_of(base).get(name) is entry:
            owner = base
    return owner


def declared(root: type = Stated) -> dict[Name, Attribute]:
    """Return the entries that classes below one declare, each once."""
    import_all()
    found: dict[Name, Attribute] = {}
    kinds = [root]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
        if kind.__module__.startswith("torchrl_lightning"):
            own = {name: entry for name, entry in entries_of(kind).items() if owner_of(kind, name, entry) is kind}
            found |= {f"{kind.__name__}.{name}": entry for name, entry in own.items()}
    return found


def name_of(part: Stated, name: str, entry: Attribute) -> Name:
    """Return the name of an entry by the class that declares it."""
    kind = type(part.data) if isinstance(part, RunState) else type(part)
    return f"{owner_of(kind, name, entry).__name__}.{name}"


def own_value(part: Stated, name: str, entry: Attribute, at: str) -> Any:
    """Return what a part would take over from its own state."""
    return entry.check_of(part, at)(entry.save(part, at, True), repr(name))


@contextmanager
def without(dropped: Name | None, restored: set[Name] | None = None) -> Iterator[None]:
    """Leave an entry of each part as it is when a state is loaded; collect the names of the others."""
    whole: dict[type, Callable[[Any, Any], None]] = {kind: kind.put_state for kind in (Stated, *AT_ONCE)}

    def put_state(part: Stated, values: Any) -> None:
        for name, entry, at in part._entries():
            if restored is not None and not entry.is_built:
                restored.add(name_of(part, name, entry))
            if name_of(part, name, entry) != dropped:
                entry.put(part, at, values[name])
        part._loaded()

    def put_at_once(kind: type) -> Callable[[Any, Any], None]:
        def put(part: Any, values: Any) -> None:
            for name, entry, at in part._entries():
                if restored is not None and not entry.is_built:
                    restored.add(name_of(part, name, entry))
                if name_of(part, name, entry) == dropped:
                    values = {**values, name: own_value(part, name, entry, at)}
            whole[kind](part, values)

        return put

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stated, "put_state", put_state)
        for kind in AT_ONCE:
            patch.setattr(kind, "put_state", put_at_once(kind))
        yield
