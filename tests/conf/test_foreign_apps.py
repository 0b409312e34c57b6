"""Users' Hydra applications select our `data` options, e.g. `data: gae`, and override their values."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kit.store import composed
from torchrl_lightning import OnPolicyDataModule, PrioritizedSampler, ReplayDataModule
from torchrl_lightning._hydra.paths import CONF_DIR, EXPORT_DIR

FOREIGN_APP = Path(__file__).resolve().parent / "foreign_app"

in_app = partial(composed, "config", folder=FOREIGN_APP)
OUR_GROUPS = ["data", *(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != "hydra")]
EXPORTED = sorted(path.stem for path in EXPORT_DIR.glob("data/*.yaml"))
ORDERS = {"self first": "  - _self_\n  - data: {}\n", "self last": "  - data: {}\n  - _self_\n"}


@pytest.fixture(params=ORDERS)
def users_app(tmp_path, request):
    """Return a function that composes an app with its own values for one of our options, in either defaults order."""

    def compose(option: str, settings: str, *overrides: str):
        text = f"defaults:\n{ORDERS[request.param].format(option)}data:\n{settings}"
        (tmp_path / "config.yaml").write_text(text)
        return composed("config", *overrides, folder=tmp_path)

    return compose


@pytest.mark.parametrize("option", EXPORTED)
def test_users_values_hold(users_app, option):
    end = "" if option == "offline" else "  total_frames: 2000\n  num_envs: 4\n"
    beside = "  dataset: episodes\n" if option == "offline" else ""
    cfg = users_app(option, f"  env: Pendulum-v1\n  seed: 7\n  eval_episodes: 3\n{end}{beside}")
    data = instantiate(cfg.data)
    try:
        assert (data.env, data.seed, data.eval_episodes) == ("Pendulum-v1", 7, 3)
        assert (data.total_frames, data.num_envs) == ((-1, 1) if option == "offline" else (2000, 4))
        assert type(data.make_buffer(**data._buffer_sizes)).__name__ == cfg.data.buffer._target_.rpartition(".")[2]
    finally:
        data.close()


# option: a setting of one of its parts
PARTS = {
    "branched": "source.real_ratio=0.5",
    "episodic": "buffer.sampler.recent_data_ratio=0.25",
    "episodic_prioritized": "buffer.sampler.prioritized.alpha=0.3",
    "frames": "buffer.storage.frame_stack=2",
    "gae": "buffer.gae_lambda=0.5",
    "hindsight": "buffer.transform.her_proportion=0.5",
    "model_based": "buffer.size=64",
    "offline": "buffer.storage.max_size=64",
    "ppo": "buffer.lam=0.5",
    "ppod": "buffer.rho=0.2",
    "prioritized": "buffer.sampler.alpha=0.3",
    "recurrent": "buffer.capacity=64",
    "rollout": "buffer.estimator.lmbda=0.5",
    "sequence": "buffer.sampler.batch_length=3",
    "simple": "buffer.size=64",
    "uniform": "buffer.storage.max_size=64",
    "vanilla": "buffer.gamma=0.5",
    "vtrace": "buffer.lmbda=0.5",
}


@pytest.mark.parametrize("option", EXPORTED)
def test_users_settings_of_a_part_hold(users_app, option):
    given = OmegaConf.from_dotlist([PARTS[option], "env=CartPole-v1"])
    text = "".join(f"  {line}\n" for line in OmegaConf.to_yaml(given).splitlines())
    cfg = users_app(option, text).data
    key, _, value = PARTS[option].partition("=")
    assert str(OmegaConf.select(cfg, key)) == value
    assert OmegaConf.select(cfg, key.rpartition(".")[0])._target_.startswith("torchrl_lightning.")


def test_environment_that_nobody_gives_is_missing(users_app):
    cfg = users_app("gae", "  num_envs: 2\n")
    assert OmegaConf.missing_keys(cfg) == {"data.env"}


def test_data_gae_is_found_and_built():
    cfg = in_app("data.env=Acrobot-v1", "+data.num_envs=2", "+data.frames_per_batch=64", "+data.mini_batch_size=32")
    assert set(cfg) == {"epochs", "data"}
    data = instantiate(cfg.data)
    assert isinstance(data, OnPolicyDataModule)
    assert data.env == "Acrobot-v1"
    assert len(data.train_dataloader()) == 8


def test_data_prioritized_is_found_and_built():
    sizes = (
        "data.env=CartPole-v1",
        "+data.num_envs=2",
        "+data.updates_per_epoch=5",
        "+data.buffer.storage.max_size=64",
    )
    data = instantiate(in_app("data=prioritized", "data.env=CartPole-v1", *sizes).data)
    assert isinstance(data, ReplayDataModule)
    assert len(data.train_dataloader()) == 5
    data.setup("fit")
    try:
        assert isinstance(data.buffer.sampler, PrioritizedSampler)
        assert (data.buffer.storage.max_size, data.buffer.sampler.max_size, data.buffer.writer.num_envs) == (64, 64, 2)
    finally:
        data.close()


def test_app_sees_nothing_of_ours_but_data():
    with initialize_config_dir(str(FOREIGN_APP), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        seen = {group: loader.get_group_options(group) for group in OUR_GROUPS}
        assert set(ConfigStore.instance().repo) <= {"hydra", "_dummy_empty_config_.yaml", "torchrl_lightning"}
    assert {group for group, found in seen.items() if found} == {"data"}
    assert seen["data"] == EXPORTED == sorted(path.stem for path in CONF_DIR.glob("data/*.yaml"))


@pytest.mark.parametrize(
    ("option", "override"),
    [
        ("gae", "batchsize=3"),
        ("uniform", "buffer.storage.size=3"),
        ("prioritized", "buffer.sampler.alfa=1"),
        ("recurrent", "buffer.size=3"),
    ],
)
def test_typo_names_the_field(option, override):
    key = override.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigCompositionException) as error:
        in_app(f"data={option}", f"data.{override}")
    assert f"Key '{key}' is not in struct" in str(error.value.__cause__)
    data = in_app(f"data={option}", "data.env=CartPole-v1", f"+data.{override}").data
    with pytest.raises((InstantiationException, TypeError), match=key):
        instantiate(data).check_fit().__next__() if option == "gae" else instantiate(data)._get_or_build_buffer()


def test_apps_own_option_of_the_same_name_wins(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gae.yaml").write_text("mine: true\n")
    (tmp_path / "config.yaml").write_text("defaults:\n  - data: gae\n")
    assert composed("config", folder=tmp_path).data == {"mine": True}
    assert composed("config", "data=vtrace", folder=tmp_path).data._target_ == "torchrl_lightning.OnPolicyDataModule"


@pytest.mark.parametrize("order", ORDERS)
def test_app_of_the_guide_trains_in_either_order(order, tmp_path):
    page = (CONF_DIR.parent / "examples" / "guide" / "hydra_app.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    head, defaults = "defaults:\n", ORDERS["self first"].format("gae")
    assert head + defaults in text
    (tmp_path / "train.yaml").write_text(text.replace(defaults, ORDERS[order].format("gae")))
    cfg = composed("train", "data.total_frames=1024", folder=tmp_path)
    data, model, trainer = (instantiate(cfg[name]) for name in ("data", "model", "trainer"))
    trainer.fit(model, datamodule=data)
    assert (data.env, data.num_envs, data.frames, data.seed) == ("CartPole-v1", 4, 1024, 12)
    assert (data.num_mini_batch, data.make_buffer.keywords["gae_lambda"]) == (4, 0.9)
