"""The keys that a run writes in addition to observations are reserved."""

from __future__ import annotations

import inspect

import pytest

import torchrl_lightning
from torchrl_lightning._core.keys import RESERVED, check_not_reserved
from torchrl_lightning._core.tree import nested_keys, path_of
from torchrl_lightning.rollout.pytorchrl_names import DOCUMENTED, OPTIONAL_NAMES

SEEN = {"observation", "achieved_goal", "desired_goal"}


def root(key: object) -> str:
    path = [part for part in path_of(key) if part != "next"]
    return path[0]


def test_documented_names_map_to_reserved_keys() -> None:
    assert {root(key) for key in (*DOCUMENTED.values(), *OPTIONAL_NAMES.values())} <= RESERVED | SEEN


def test_default_keys_of_arguments_are_reserved() -> None:
    arguments = {}
    for name in torchrl_lightning.__all__:
        public = getattr(torchrl_lightning, name)
        if not callable(public):
            continue
        for argument, parameter in inspect.signature(public).parameters.items():
            default = parameter.default
            if argument.endswith(("_key", "_keys")) and default and default is not parameter.empty:
                keys = nested_keys(default) if argument.endswith("s") else [default]
                arguments |= {root(key): f"{name}({argument}=)" for key in keys}
    assert len(arguments) > 10
    assert {key: argument_name for key, argument_name in arguments.items() if key not in RESERVED | SEEN} == {}


def test_error_lists_several_reserved_names() -> None:
    check_not_reserved(["observation", "achieved_goal", "image"])
    with pytest.raises(ValueError, match=r"'done', 'mask'.*rename={done: last_done, mask: last_mask}"):
        check_not_reserved(["mask", "image", "done"])
