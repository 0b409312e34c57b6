"""Other people's Hydra applications, which say `data: gae`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate

from kit.store import composed
from torchrl_lightning import OnPolicyDataModule, PrioritizedSampler, ReplayDataModule
from torchrl_lightning._conf import CONF_DIR, EXPORT_DIR

FOREIGN_APP = Path(__file__).resolve().parent / "foreign_app"

in_app = partial(composed, "config", folder=FOREIGN_APP)
OUR_GROUPS = ["data", *(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != "hydra")]


def test_data_gae_is_found_and_built():
    cfg = in_app("data.num_envs=2", "data.frames_per_batch=64", "data.mini_batch_size=32")
    assert set(cfg) == {"epochs", "data"}
    data = instantiate(cfg.data)
    assert isinstance(data, OnPolicyDataModule)
    assert len(data.train_dataloader()) == 8


def test_data_prioritized_is_found_and_built():
    sizes = ("data.num_envs=2", "data.updates_per_epoch=5", "data.buffer.storage.max_size=64")
    data = instantiate(in_app("data=prioritized", *sizes).data)
    assert isinstance(data, ReplayDataModule)
    assert len(data.train_dataloader()) == 5
    data.setup("fit")
    try:
        assert isinstance(data.buffer.sampler, PrioritizedSampler)
        assert (data.buffer.storage.max_size, data.buffer.sampler.max_size, data.buffer.writer.num_envs) == (64, 64, 2)
    finally:
        data.close()


def test_an_app_sees_nothing_of_ours_but_data():
    with initialize_config_dir(str(FOREIGN_APP), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        seen = {group: loader.get_group_options(group) for group in OUR_GROUPS}
        assert set(ConfigStore.instance().repo) <= {"hydra", "_dummy_empty_config_.yaml", "torchrl_lightning"}
    assert {group for group, found in seen.items() if found} == {"data"}
    assert seen["data"] == sorted(path.stem for path in EXPORT_DIR.glob("data/*.yaml"))


@pytest.mark.parametrize(
    ("option", "override", "key", "schema"),
    [
        ("gae", "data.batchsize=3", "batchsize", "OnPolicyDataSchema"),
        ("uniform", "data.buffer.storage.size=3", "size", "RingStorageSchema"),
        ("prioritized", "data.buffer.sampler.alfa=1", "alfa", "PrioritizedSamplerSchema"),
        ("recurrent", "data.buffer.size=3", "size", "RecurrentReplayBufferSchema"),
    ],
)
def test_a_typo_names_the_field(option, override, key, schema):
    with pytest.raises(ConfigCompositionException) as error:
        in_app(f"data={option}", override)
    assert f"Key '{key}' not in '{schema}'" in str(error.value.__cause__)


def test_the_apps_own_option_of_the_same_name_wins(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gae.yaml").write_text("mine: true\n")
    (tmp_path / "config.yaml").write_text("defaults:\n  - data: gae\n")
    assert composed("config", folder=tmp_path).data == {"mine": True}
    assert composed("config", "data=vtrace", folder=tmp_path).data._target_ == "torchrl_lightning.OnPolicyDataModule"
