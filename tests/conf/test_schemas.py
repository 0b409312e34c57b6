"""The config of each of our parts is checked against a schema of its constructor's arguments."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning._hydra.schemas import register_schemas, schema_data

MODELS = ("model", "network", "intrinsic", "dynamics", "planner")
SCHEMAS = {(part["group"], part["name"]): target for target, part in schema_data().items()}


@pytest.mark.parametrize("key", [key for key in SCHEMAS if key[0] in MODELS])
def test_every_option_of_a_model_is_checked_against_a_schema(key):
    files = [path for path in CONF_DIR.glob("model/**/*.yaml") if f"_target_: {SCHEMAS[key]}\n" in path.read_text()]
    assert files
    assert all(f"/torchrl_lightning/schema/{key[0]}/{key[1]}@" in path.read_text() for path in files)


@pytest.mark.parametrize("option", [path.stem for path in CONF_DIR.glob("data/*.yaml")])
def test_every_option_of_data_is_checked_against_a_schema(compose_train, option):
    data = compose_train("~experiment", f"data={option}").data
    assert all(is_dataclass(OmegaConf.get_type(node)) for node in (data, data.buffer))


def test_default_buffer_is_the_one_of_data_gae():
    default = inspect.signature(OnPolicyDataModule).parameters["buffer"].default
    assert f"torchrl_lightning.{default.__name__}" == SCHEMAS["buffer", "gae"]


def test_storing_twice_changes_nothing():
    def stored():
        return ConfigStore.instance().load("torchrl_lightning/schema/buffer/gae.yaml")

    register_schemas()
    before = stored()
    register_schemas()
    assert (before.node, before.provider) == (stored().node, stored().provider)
