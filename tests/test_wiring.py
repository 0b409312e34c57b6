"""Schemas and reference pages match the classes, so that signatures, exports and YAML cannot drift apart."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

import wiring
from kit.store import composed
from torchrl_lightning._hydra.schemas import schema


def test_schemas_and_reference_follow_from_the_classes():
    parts = dict(wiring.parts())
    texts = {wiring.DATA: wiring.data(parts), wiring.GUIDE: wiring.guide(parts), **wiring.reference()}
    texts |= wiring.pages_with_settings()
    assert [path for path, text in texts.items() if path.read_text() != text] == [], "run python tests/wiring.py"
    assert set(wiring.reference()) == set(wiring.REFERENCE.iterdir())


def test_table_of_settings_has_each_setting_with_its_default_and_meaning():
    rows = re.findall(r"^\| `model\.(\w+)` \| `(.*?)` \| (.*) \|$", wiring.settings_table("model/sac"), re.MULTILINE)
    table = {name: (default, meaning) for name, default, meaning in rows}
    model = composed("train", "~experiment", "data=uniform", "model=sac").model
    scalars = {name: value for name, value in model.items() if not isinstance(value, DictConfig)}
    assert scalars.keys() - table.keys() == {
        "_target_",
        "_convert_",
        "refresh_states",
    }  # set by sac_recurrent
    assert {name: yaml.safe_load(default) for name, (default, _) in table.items()} == {
        name: scalars[name] for name in table
    }
    assert [name for name, (_, meaning) in table.items() if len(meaning) < 10] == []


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
