"""A schema has the fields that its class has arguments, so that YAML, schema and signature cannot drift apart."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from configs.processes import environment
from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning._conf import EXPORT_DIR
from torchrl_lightning._schemas import SCHEMAS, register_schemas

# What the DataModule hands over itself, or knows better than a config: the shape of its rollouts and mini-batches.
ON_POLICY = {
    *("size", "actor", "algorithm", "envs", "critic", "intrinsic_critic", "generator"),
    *("num_envs", "time_dim"),
}
# Besides: what TorchRL offers to programs that share a buffer between processes, or that bring functions of their own.
REPLAY = {"num_envs", "generator", "shared"}
RARE = {
    *("collate_fn", "transform_factory", "dim_extend", "checkpointer", "consume_after_n_samples"),
    *("compilable", "delayed_init", "transport", "transport_options"),
}
FILLED_IN: dict[tuple[str, str], set[str]] = {
    **{("buffer", name): {*ON_POLICY, "batch_size"} for name in ("vanilla", "gae", "vtrace")},
    ("buffer", "ppo"): ON_POLICY,
    ("buffer", "experience"): {*REPLAY, *RARE, "batch_size"},
    ("buffer", "recurrent"): {*REPLAY, "batch_size"},
    ("buffer", "simple"): REPLAY,
    ("storage", "ring"): {"compilable"},
    # The buffer has the generator; a dtype has no name in YAML.
    ("sampler", "uniform"): {"generator"},
    ("sampler", "prioritized"): {"generator", "dtype"},
    ("sampler", "sequence"): {"generator"},
}
# A config has no classes: what is left out there has another default here, or none.
OTHER_DEFAULT = {("data", "on_policy", "buffer")}


def own_fields(schema: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(schema) if not field.name.startswith("_")}


@pytest.mark.parametrize(("group", "name"), list(SCHEMAS))
def test_fields_are_the_arguments_with_equal_defaults(group, name):
    schema = SCHEMAS[group, name]
    arguments = inspect.signature(get_class(schema._target_)).parameters
    fields = own_fields(schema)
    filled_in = FILLED_IN.get((group, name), set())
    assert set(fields) == set(arguments) - filled_in
    assert filled_in <= set(arguments)
    stored = OmegaConf.structured(schema)
    for field in fields:
        default = arguments[field].default
        if (group, name, field) in OTHER_DEFAULT or default is inspect.Parameter.empty:
            assert OmegaConf.is_missing(stored, field), field
        else:
            value = OmegaConf.to_container(stored)[field]
            assert value == (list(default) if isinstance(default, tuple) else default), field


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


def test_schemas_and_plugin_import_no_torch():
    code = (
        "import sys\n"
        "from hydra import compose, initialize\n"
        "with initialize(version_base='1.3', config_path=None):\n"
        "    assert compose(None, ['+data=gae']).data.buffer.gae_lambda == 0.95\n"
        "print([name for name in ('torch', 'tensordict', 'torchrl', 'lightning') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
