"""Other people's Hydra applications, which say `data: gae`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kit.processes import environment
from torchrl_lightning import OnPolicyDataModule, PrioritizedSampler, ReplayDataModule
from torchrl_lightning._conf import CONF_DIR, EXPORT_DIR

HERE = Path(__file__).resolve().parent
FOREIGN_APP, TORCHRL_APP = HERE / "foreign_app", HERE / "torchrl_app"

OUR_GROUPS = ["data", *(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != "hydra")]

COMPOSE = """
import sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
import torchrl_lightning.configs
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    print(OmegaConf.to_yaml(compose("config")))
"""


def test_data_gae_is_found_and_built(compose_in):
    cfg = compose_in(FOREIGN_APP, "config", "data.num_envs=2", "data.frames_per_batch=64", "data.mini_batch_size=32")
    assert set(cfg) == {"epochs", "data"}
    data = instantiate(cfg.data)
    assert isinstance(data, OnPolicyDataModule)
    assert len(data.train_dataloader()) == 8


def test_data_prioritized_is_found_and_built(compose_in):
    sizes = ("data.num_envs=2", "data.updates_per_epoch=5", "data.buffer.storage.max_size=64")
    data = instantiate(compose_in(FOREIGN_APP, "config", "data=prioritized", *sizes).data)
    assert isinstance(data, ReplayDataModule)
    assert len(data.train_dataloader()) == 5
    data.setup("fit")
    try:
        assert isinstance(data.buffer.sampler, PrioritizedSampler)
        assert (data.buffer.storage.max_size, data.buffer.sampler.max_size, data.buffer.writer.num_envs) == (64, 64, 2)
    finally:
        data.close()


@pytest.mark.parametrize("option", sorted(path.stem for path in EXPORT_DIR.glob("data/*.yaml")))
def test_every_exported_option_is_found(compose_in, option):
    cfg = compose_in(FOREIGN_APP, "config", f"data={option}")
    assert OmegaConf.missing_keys(cfg) == set()
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def test_an_app_sees_nothing_of_ours_but_data():
    with initialize_config_dir(str(FOREIGN_APP), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        seen = {group: loader.get_group_options(group) for group in OUR_GROUPS}
    assert {group for group, found in seen.items() if found} == {"data"}
    assert seen["data"] == sorted(path.stem for path in EXPORT_DIR.glob("data/*.yaml"))


@pytest.mark.parametrize(
    ("option", "override", "key", "schema"),
    [
        ("gae", "data.batchsize=3", "batchsize", "OnPolicyDataSchema"),
        ("gae", "data.buffer.gae_lamda=0.9", "gae_lamda", "GAEBufferSchema"),
        ("uniform", "data.batchsize=3", "batchsize", "ReplayDataSchema"),
        ("uniform", "data.buffer.storage.size=3", "size", "RingStorageSchema"),
        ("prioritized", "data.buffer.sampler.alfa=1", "alfa", "PrioritizedSamplerSchema"),
        ("recurrent", "data.buffer.size=3", "size", "RecurrentReplayBufferSchema"),
    ],
)
def test_a_typo_names_the_field(compose_in, option, override, key, schema):
    with pytest.raises(ConfigCompositionException) as error:
        compose_in(FOREIGN_APP, "config", f"data={option}", override)
    assert f"Key '{key}' not in '{schema}'" in str(error.value.__cause__)


def test_an_unknown_option_lists_the_known_ones(compose_in):
    with pytest.raises(MissingConfigException) as error:
        compose_in(FOREIGN_APP, "config", "data=gea")
    message = str(error.value)
    assert "Could not find 'data/gea'" in message
    assert {"gae", "prioritized", "vanilla", "vtrace"} <= {line.strip() for line in message.splitlines()}


def test_the_apps_own_option_of_the_same_name_wins(compose_in, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gae.yaml").write_text("mine: true\n")
    (tmp_path / "config.yaml").write_text("defaults:\n  - data: gae\n")
    assert compose_in(tmp_path, "config").data == {"mine": True}
    assert compose_in(tmp_path, "config", "data=vtrace").data._target_ == "torchrl_lightning.OnPolicyDataModule"


def test_only_schemas_are_stored_in_a_foreign_app(compose_in):
    compose_in(FOREIGN_APP, "config")
    assert set(ConfigStore.instance().repo) <= {"hydra", "_dummy_empty_config_.yaml", "torchrl_lightning"}


def test_data_composes_beside_torchrls_groups():
    command = [sys.executable, "-c", COMPOSE, str(TORCHRL_APP)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    cfg = OmegaConf.create(done.stdout)
    assert cfg.data._target_ == "torchrl_lightning.OnPolicyDataModule"
    assert cfg.data.buffer._target_ == "torchrl_lightning.GAEBuffer"
    assert cfg.buffer_storage._target_ == "torchrl.data.replay_buffers.LazyTensorStorage"
    assert cfg.buffer_sampler._target_ == "torchrl_lightning.MinibatchSampler"
    assert cfg.logger.log_dir == "own_logs"
    assert cfg.logger._target_ == "torchrl.record.loggers.csv.CSVLogger"
