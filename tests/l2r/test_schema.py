"""Typed configs: both YAML forms, coerced values, and errors that contain the name of the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchrl_lightning.l2r.simple import SimpleReplayBuffer

GOOD: dict[str, Any] = {"obs_dim": 32, "act_dim": 2, "size": 200, "batch_size": 16}
YAML = "obs_dim: 32\nact_dim: 2\nsize: 200_000\nbatch_size: 16\n"


def test_schema_lists_the_documented_parameters() -> None:
    config = OmegaConf.structured(SimpleReplayBuffer.schema)
    assert OmegaConf.missing_keys(config) == {"obs_dim", "act_dim", "size", "batch_size"}


@pytest.mark.parametrize(
    "text",
    [YAML, "name: SimpleReplayBuffer\nconfig:\n" + "".join(f"  {line}\n" for line in YAML.splitlines())],
    ids=["bare", "wrapped"],
)
def test_plain_and_wrapped_files_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.yaml").write_text(text)
    for path in (tmp_path / "b.yaml", str(tmp_path / "b.yaml")):
        buffer = SimpleReplayBuffer.instantiate_from_config(path)
        assert (buffer.obs_dim, buffer.act_dim, buffer.max_size, buffer.batch_size) == (32, 2, 200_000, 16)


def test_dicts_and_dict_configs_are_read() -> None:
    wrapped = {"name": "SimpleReplayBuffer", "config": GOOD}
    for config in (GOOD, OmegaConf.create(GOOD), {**GOOD, "size": "2_00"}, wrapped):
        assert SimpleReplayBuffer.instantiate_from_config_dict(config).max_size == 200


WRONG: list[tuple[Any, str]] = [
    *(({**GOOD, "size": wrong}, "size") for wrong in (None, 2.5, True, "many", [1], "${nowhere}", 0)),
    ({**GOOD, "obs_dim": -1}, "obs_dim"),
    ({**GOOD, "batchsize": 3}, "batchsize"),
    ({**GOOD, "name": "SimpleReplayBuffer"}, "name"),
    ({**GOOD, 7: 3}, "7"),
    *(({**GOOD, field: "???"}, f"'{field}' of SimpleReplayBuffer is missing") for field in GOOD),
    *((config, "must be a mapping") for config in (None, 5, "size: 3", [GOOD])),
    ({"name": "PPOBuffer", "config": GOOD}, "'PPOBuffer', expected 'SimpleReplayBuffer'"),
    ({}, "'act_dim', 'batch_size', 'obs_dim', 'size' of SimpleReplayBuffer is missing"),
]


@pytest.mark.parametrize(("config", "says"), WRONG)
def test_invalid_field_is_named(config: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SimpleReplayBuffer.instantiate_from_config_dict(config)


@pytest.mark.parametrize("text", ["", "5", "- 1", "size: [", YAML + "size: 3\n", "!!python/object/apply:os.abort []"])
def test_invalid_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"b\.yaml"):
        SimpleReplayBuffer.instantiate_from_config(tmp_path / "b.yaml")


def test_missing_file_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SimpleReplayBuffer.instantiate_from_config(tmp_path / "none.yaml")
