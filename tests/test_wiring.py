"""What is derived from the modules is what they say, so that signature, export, schema and YAML cannot drift apart."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from omegaconf import OmegaConf

import wiring
from torchrl_lightning._hydra.schemas import schema


def test_schemas_and_reference_follow_from_the_classes():
    parts = dict(wiring.parts())
    texts = {wiring.DATA: wiring.data(parts), wiring.GUIDE: wiring.guide(parts), **wiring.reference()}
    assert [path for path, text in texts.items() if path.read_text() != text] == [], "run python tests/wiring.py"
    assert set(wiring.reference()) == set(wiring.REFERENCE.iterdir())


def test_schemas_are_json_in_lines_that_can_be_read():
    text = wiring.DATA.read_text()
    assert json.loads(text) == json.loads(json.dumps(dict(wiring.parts())))
    assert max(map(len, text.splitlines())) < 150
    assert len(text.splitlines()) < 600


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, int),
        (float | None, float | None),
        (Literal["sync", "async"], str),
        (str | Path | None, str | None),
        (torch.device | str, str),
        (Sequence[int] | None, list[int] | None),
        (tuple[int, ...], list[int]),
        (int | float, int | float),
        (Sequence[int] | str, Any),
        (Callable[[], int] | None, Any),
        (tuple[int, str], Any),
        (torch.dtype, Any),
    ],
)
def test_types_are_those_that_a_config_can_check(annotation, expected):
    assert wiring.checked_type(annotation) == expected


class Part:
    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("keys",)

    def __init__(
        self, size: int, keys: tuple[str, ...] = ("a",), kind: type = dict, dtype: torch.dtype = torch.float64
    ):
        pass


class Smaller(Part):
    def __init__(self, size: int):
        super().__init__(size)


def test_arguments_are_written_as_a_config_writes_them():
    assert wiring.described(Part, "sampler", "part", ["keys"], {})["arguments"] == {
        "size": ["int"],
        "keys": ["list[str]", ("a",)],
        "kind": ["Any"],
        "dtype": ["Any", "float64"],
    }


def test_argument_that_does_not_exist_is_not_handed_over():
    assert wiring.inherited(Part) == ["keys"]
    assert wiring.inherited(Smaller) == []
    with pytest.raises(ValueError, match="Part takes no length, width"):
        wiring.described(Part, "sampler", "part", ["length", "size", "width"], {})


def test_schema_travels_to_other_processes():
    config = OmegaConf.structured(schema("torchrl_lightning.UniformSampler"))
    again = pickle.loads(pickle.dumps(config))
    assert OmegaConf.get_type(again) is OmegaConf.get_type(config)
    assert again == config
