"""Schemas are generated from the constructors, so that YAML, schema and signature cannot drift apart."""

from __future__ import annotations

import inspect

import pytest

from conf.schema_source import FOLDER, MODULES, module_source
from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning._conf import CONF_DIR, EXPORT_DIR
from torchrl_lightning._schemas import SCHEMAS, register_schemas


@pytest.mark.parametrize("name", MODULES)
def test_the_schemas_are_what_the_constructors_say(name):
    assert (FOLDER / f"{name}.py").read_text() == module_source(name), "run python tests/conf/schema_source.py"


def test_every_module_is_generated():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *MODULES}
    described = {(each.group, each.name) for _, schemas in MODULES.values() for each in schemas}
    assert described == set(SCHEMAS)


def groups_of(name: str) -> dict[tuple[str, str], type]:
    return {(each.group, each.name): each.type for each in MODULES[name][1]}


@pytest.mark.parametrize("key", groups_of("models"))
def test_every_option_of_a_model_is_checked_against_a_schema(key):
    target = f"_target_: torchrl_lightning.{groups_of('models')[key].__name__}\n"
    files = [path for path in CONF_DIR.glob("model/**/*.yaml") if target in path.read_text()]
    assert files
    assert all(f"/torchrl_lightning/schema/{key[0]}/{key[1]}@" in path.read_text() for path in files)


def test_every_exported_option_is_checked_against_a_schema():
    for path in EXPORT_DIR.glob("data/*.yaml"):
        text = path.read_text()
        assert "/torchrl_lightning/schema/data/" in text, path.name
        assert "/torchrl_lightning/schema/buffer/" in text, path.name


def test_the_default_buffer_is_the_one_of_data_gae():
    default = inspect.signature(OnPolicyDataModule).parameters["buffer"].default
    assert f"torchrl_lightning.{default.__name__}" == SCHEMAS["buffer", "gae"]._target_


def test_storing_twice_changes_nothing():
    from hydra.core.config_store import ConfigStore

    register_schemas()
    before = ConfigStore.instance().load("torchrl_lightning/schema/buffer/gae.yaml")
    register_schemas()
    after = ConfigStore.instance().load("torchrl_lightning/schema/buffer/gae.yaml")
    assert (before.node, before.provider) == (after.node, after.provider)
