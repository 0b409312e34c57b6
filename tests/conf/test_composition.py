"""Every YAML file under conf/ composes, and its parts can be built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_class, get_object, instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from kit.demonstrations import episode
from kit.extras import need_extra
from kit.goals import Reach
from kit.images import CountedImages
from kit.store import composed
from torchrl_lightning import ExperienceDataModule, FrameStack, ReplayDataModule, write_demonstration
from torchrl_lightning._core.trust import check_config
from torchrl_lightning._hydra.paths import BASE_DIR, CONF_DIR, EXPORT_DIR
from torchrl_lightning.environments.backends.vector_env import check_env_source

PRIMARY = ("train", "evaluate", "record")


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def groups() -> list[str]:
    inside = {str(path.parent.relative_to(CONF_DIR)) for path in CONF_DIR.glob("*/**/*.yaml")}
    return sorted(inside - {"export/data", "torchrl_lightning/base"})


# A nested group like model/network is selected by its path. `hydra` is excluded: it has an option per command.
OPTIONS = [(group, option) for group in groups() for option in options(group) if group != "hydra"]


def test_tree_has_no_file_outside_of_what_is_tested():
    tested = {CONF_DIR / f"{name}.yaml" for name in PRIMARY}
    tested |= {CONF_DIR / group / f"{option}.yaml" for group, option in OPTIONS}
    tested |= set(BASE_DIR.glob("base/*.yaml"))  # options that include these files test them
    tested |= {EXPORT_DIR / "data" / f"{option}.yaml" for option in options("data")}
    tested |= {CONF_DIR / "hydra" / f"{option}.yaml" for option in ("default", "evaluate", "record")}
    assert set(CONF_DIR.glob("**/*.yaml")) == tested


def test_evaluate_config_asks_for_a_checkpoint_alone():
    # The path of the histogram resolves only in a run.
    assert OmegaConf.missing_keys(composed("evaluate", "histogram=null")) == {"ckpt_path"}


@pytest.mark.parametrize("name", PRIMARY)
def test_run_gets_a_folder_of_its_own(name):
    cfg = composed(name, hydra=True)
    assert cfg.hydra.job.chdir is False
    raw = OmegaConf.to_container(cfg.hydra.run, resolve=False)["dir"]
    assert "${now:" in raw
    root = f"{cfg.paths.log_dir.rstrip('/')}/{cfg.task_name}/" if name == "train" else raw
    assert root.startswith(f"logs/{name}/")


# The environments of options that CartPole does not fit.
FITTING = {
    "frames": {"env": lambda: FrameStack(CountedImages(alone=True), 4)},
    "hindsight": {"env": Reach},
}


@pytest.fixture
def compose_option(compose_train):
    """Compose an option without the default experiment, because its settings do not fit all options."""
    beside = {"experiment": [], "source": ["~experiment", "data=uniform"]}
    return lambda group, option: compose_train(f"{group}={option}", *beside.get(group, ["~experiment"]))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(compose_train, compose_option, group, option):
    beside = group in ("debug", "hparams_search", "paths")
    cfg = compose_train(f"{group}={option}") if beside else compose_option(group, option)
    if group == "hparams_search":  # a sweep sets these values for its runs
        cfg.callbacks.report.update(study_name="search", storage="sqlite://", trial=0)
    assert OmegaConf.missing_keys(cfg) == ({"model.loss"} if option == "loss_module" else set())
    plain = OmegaConf.to_container(cfg, resolve=True)
    if group == "experiment":
        need_extra(option)
    # A checkpoint stores these nodes, and they must pass the check of untrusted files.
    node = {name: plain[name] for name in ("data", "model")}
    if option == "pets_cartpole_continuous":  # its environment is a module in examples/
        with pytest.raises(ValueError, match="ContinuousCartPole-v0'"):
            check_config(node, where=option)
        node["data"]["env"] = "CartPole-v1"
    check_config(node, where=option, folders=option != "offline")  # offline reads a user's folder


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_what_a_file_says_is_what_the_config_has(compose_option, group, option):
    path = CONF_DIR / group / f"{option}.yaml"
    text = path.read_text()
    header = re.match(r"# @package (\S+)\n", text)
    # Hydra reads a package header only in the first line, and silently ignores a later one.
    assert ("@package" in text) == (header is not None), f"{path.name}: put the @package line first"
    package = group.replace("/", ".") if header is None else header[1].replace("_global_", "")
    cfg = compose_option(group, option)
    said = {} if package == "paths" else leaves(yaml.safe_load(text), package)
    assert {key: select(cfg, key) for key in said} == said


def leaves(node: object, prefix: str) -> dict[str, object]:
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, object] = {}
    for key, value in node.items():
        if key != "defaults" and not (prefix == "" and key == "hydra"):
            found |= leaves(value, f"{prefix}.{key}".strip("."))
    return found


def select(cfg: DictConfig, key: str) -> object:
    node: object = OmegaConf.to_container(cfg, resolve=False)
    for part in key.split("."):
        node = node.get(part, "absent") if isinstance(node, dict) else "absent"
    return node


@pytest.mark.parametrize(
    ("env", "module", "id"),
    [
        ("minigrid", "minigrid", "MiniGrid-FourRooms-v0"),
        ("atari", "ale_py", "ALE/Breakout-v5"),
        ("robotics", "gymnasium_robotics", "FetchPush-v4"),
    ],
)
def test_preset_knows_the_module_of_its_ids(compose_train, env, module, id):
    need_extra(env)
    ids = [instantiate(compose_train(f"env={env}", f"data.env.id={it}").data.env).id for it in (id, f"{module}:{id}")]
    assert ids == [f"{module}:{id}"] * 2
    check_env_source(ids[0])


@pytest.mark.parametrize("experiment", options("experiment"))
def test_experiment_is_built(compose_train, experiment):
    need_extra(experiment)
    cfg = compose_train(f"experiment={experiment}")
    data = instantiate(cfg.data)
    try:
        assert isinstance(data, ExperienceDataModule)
        assert isinstance(instantiate(cfg.model), L.LightningModule)
        assert data.total_frames > 0
        assert len(data.train_dataloader()) == data.batches_per_epoch
    finally:
        data.close()


@pytest.mark.parametrize("option", options("data"))
def test_data_module_is_built_with_its_buffer(compose_option, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demonstrations").mkdir()
    write_demonstration(tmp_path / "demonstrations" / "one.safetensors", episode())  # for data=offline
    cfg = compose_option("data", option).data
    data = instantiate(cfg, **FITTING.get(option, {}))
    data.setup("fit")
    try:
        assert type(data.buffer).__name__ == cfg.buffer._target_.split(".")[-1]
        replay = isinstance(data, ReplayDataModule)
        assert data.buffer.gamma == 0.99
        for part in ("storage", "sampler") if replay else ():
            if part in cfg.buffer:
                assert type(getattr(data.buffer, part)).__name__ == cfg.buffer[part]._target_.split(".")[-1]
    finally:
        data.close()


@pytest.mark.parametrize("option", options("env"))
def test_environment_is_built(compose_option, option, tmp_path, monkeypatch):
    need_extra(option)
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    data = instantiate(compose_option("env", option).data)
    data.setup("fit")
    try:
        assert data.specs.num_envs == data.num_envs
        assert data.specs.keys
    finally:
        data.close()


FEW_BRANCHES = ["model.dynamics.max_epochs=1", "data.source.branches_per_fit=100"]


@pytest.mark.filterwarnings("ignore:.*MultiRoom-N4-S5-v0 is out of date")  # it has published returns
@pytest.mark.parametrize(
    ("experiment", "env", "fewer"),
    [
        ("dqn_frames_pong", "atari", ["data.num_envs=2", "data.warmup_frames=4", "data.buffer.storage.max_size=64"]),
        ("ddpg_her_fetchreach", "robotics", ["data.warmup_frames=100"]),
        ("dqn_pong", "atari", ["data.num_envs=2", "data.warmup_frames=4", "data.buffer.storage.max_size=64"]),
        ("dqn_pong_envpool", "envpool", ["data.num_envs=2", "data.warmup_frames=4", "data.buffer.storage.max_size=64"]),
        ("ppo_cartpole_envpool", "envpool", []),
        ("mbpo_hopper", "mujoco", [*FEW_BRANCHES, "data.warmup_frames=100"]),
        ("mbpo_invertedpendulum", "mujoco", FEW_BRANCHES),
        ("ppo_halfcheetah", "mujoco", ["data.frames_per_batch=64"]),
        ("ppo_hopper", "mujoco", ["data.frames_per_batch=64"]),
        ("ppo_minigrid_doorkey", "minigrid", ["data.frames_per_batch=64"]),
        ("ppo_minigrid_fourrooms", "minigrid", ["data.frames_per_batch=64"]),
        ("ppo_pong", "envpool", ["data.frames_per_batch=64", "data.mini_batch_size=64"]),
        ("ppod_minigrid_keycorridor", "minigrid", ["data.frames_per_batch=128"]),
        ("ppod_minigrid_keycorridor_s3r3", "minigrid", ["data.frames_per_batch=128"]),
        ("ppod_minigrid_lockedroom", "minigrid", ["data.frames_per_batch=128"]),
        ("ppod_minigrid_multiroom", "minigrid", ["data.frames_per_batch=128"]),
        ("ppod_minigrid_obstructedmaze", "minigrid", ["data.frames_per_batch=128"]),
        ("ppod_minigrid_unlockpickup", "minigrid", ["data.frames_per_batch=128"]),
        ("sac_halfcheetah", "mujoco", ["data.warmup_frames=300"]),
        ("sac_her_fetchpickandplace", "robotics", ["data.warmup_frames=300"]),
        ("sac_her_fetchpush", "robotics", ["data.warmup_frames=300"]),
        ("sac_hopper", "mujoco", ["data.warmup_frames=300"]),
        ("sac_invertedpendulum", "mujoco", ["data.warmup_frames=100"]),
    ],
)
def test_experiment_that_needs_an_extra_learns(compose_train, experiment, env, fewer, tmp_path, monkeypatch):
    need_extra(env)
    monkeypatch.chdir(tmp_path)
    cfg = compose_train(f"experiment={experiment}", "callbacks=none", "trainer.max_steps=1", *fewer)
    model, trainer = instantiate(cfg.model), instantiate(cfg.trainer, logger=False)
    trainer.fit(model, instantiate(cfg.data))
    assert trainer.global_step == 1
    assert all(value.isfinite() for value in trainer.callback_metrics.values())


@pytest.mark.parametrize(
    ("group", "option"),
    [each for each in OPTIONS if each[0] in ("model", "model/network") and each != ("model", "default")],  # no class
)
def test_model_is_built_with_its_network(compose_option, group, option):
    cfg = compose_option(group, option).model
    if option == "loss_module":  # this option does not have a default loss
        cfg.loss = {"_target_": "torchrl.objectives.DQNLoss", "_partial_": True}
    assert isinstance(instantiate(cfg), L.LightningModule)
    if group == "model/network":
        assert type(instantiate(cfg.network)).__name__ == cfg.network._target_.split(".")[-1]


# Settings that differ in conf/ from the constructors' defaults on purpose.
ROLLOUTS = {"mini_batch_size"}
ONE_PASS = {"frames_per_batch", "num_epochs", "num_mini_batch"}
REPLAY = {"num_envs", "frames_per_update", "warmup_frames"}
RECENT = REPLAY | {"buffer.sampler.recent_data_ratio", "buffer.sampler.recent_data_steps"}
GAMMA = {"gamma"}
SMALL = {"channels", "hidden_sizes", "kernels", "strides"}
ON_PURPOSE = {
    "data": {
        **dict.fromkeys(("gae", "ppo", "ppod"), ROLLOUTS),
        "rollout": ROLLOUTS | {"buffer.estimator.standardize"},
        **dict.fromkeys(("vanilla", "vtrace"), ONE_PASS),
        **dict.fromkeys(("branched", "prioritized", "recurrent", "uniform"), REPLAY),
        **dict.fromkeys(("episodic", "episodic_prioritized"), RECENT),
        "frames": REPLAY | {"batch_size"},
        "hindsight": REPLAY | {"buffer.storage.max_size"},
        "offline": {"dataset", "frames_per_update"},
        "sequence": REPLAY | {"batch_size", "buffer.sampler.episode_ends"},
        "simple": REPLAY | {"buffer.sampler.with_replacement"},
        "model_based": {"num_envs", "num_members"},
    },
    "model": {
        "a2c": {"entropy_coeff"},
        "vtrace": {"entropy_coeff"},
        "ppo_rnd": {"extrinsic_coeff", "intrinsic.update_fraction"},
        "ddpg": {"num_critics", "policy_noise", "target_interval"},
        **dict.fromkeys(("discrete_cql", "discrete_sac", "iql", "redq", "td3_bc"), GAMMA),
        "c51": {"gamma", "networks.value_network.high", "networks.value_network.low", "policy.epsilon"},
        "discrete_iql": {"gamma", "networks.qvalue_network.out_key"},
        "cql": {"gamma", "learning_rate", "minimised"},
        "crossq": {"gamma", "learning_rate"},
        "tqc": {"gamma", "networks.qvalue_network.quantiles"},
    },
    "model/network": {"cnn_small": SMALL, "lstm": {"cell"}, "mlp_256": {"hidden_sizes"}},
}


@pytest.mark.parametrize(("group", "option"), [each for each in OPTIONS if each[0] in ON_PURPOSE])
def test_values_are_the_defaults_of_constructors_but_for_those_that_differ_on_purpose(compose_train, group, option):
    cfg = compose_train(f"{group}={option}", "~experiment", *(["~env"] if group == "data" else []))
    node = OmegaConf.to_container(OmegaConf.select(cfg, group.replace("/", ".")), resolve=False)
    if group == "model":  # model/network has its own options
        node.pop("network", None)
    path = CONF_DIR / group / f"{option}.yaml"
    files = {key: file for file in (*included(path), path) for key in leaves(yaml.safe_load(file.read_text()), "")}
    different = differing(node) & files.keys()
    wrong = {key: str(files.get(key)) for key in different ^ ON_PURPOSE[group].get(option, set())}
    assert wrong == {}, "these files must have the constructor's default, or ON_PURPOSE must name the setting"


def differing(node: dict[str, object], before: str = "") -> set[str]:
    """Return the settings of one of our parts and its nested parts that differ from the constructors' defaults."""
    target = str(node.get("_target_"))
    part = get_object(target) if target.startswith("torchrl_lightning.") else object
    parameters = inspect.signature(part).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    if is_dataclass(part):
        made = (each for each in fields(part) if each.default_factory is not MISSING)
        defaults |= {each.name: each.default_factory() for each in made}
    found: set[str] = set()
    for key, value in node.items():
        if isinstance(value, dict):
            found |= differing(value, f"{before}{key}.")
        elif key in defaults and "${" not in str(value) and value != listed(defaults[key]):
            found.add(f"{before}{key}")
    return found


@pytest.mark.parametrize(("group", "option"), [each for each in OPTIONS if each[0] in ON_PURPOSE])
def test_option_does_not_repeat_a_value_of_a_file_that_it_includes(group, option):
    path = CONF_DIR / group / f"{option}.yaml"
    *others, own = [leaves(yaml.safe_load(file.read_text()), "") for file in (*included(path), path)]
    known = {key: value for file in others for key, value in file.items()}
    assert {key for key, value in own.items() if key in known and known[key] == value} == set()


def included(path: Path) -> Iterator[Path]:
    """Yield the files that a file includes, directly or indirectly, in merge order."""
    for entry in yaml.safe_load(path.read_text()).get("defaults", []):
        name = str(entry).removesuffix("@_here_")
        file = (CONF_DIR if name.startswith("/") else path.parent) / f"{name.removeprefix('/')}.yaml"
        if file.is_file():
            yield from (*included(file), file)


@pytest.mark.parametrize("option", ["dqn", "mbpo", "pets", "pets_shooting", "ppo", "reinforce", "sac", "td3"])
def test_model_has_the_same_parts_from_yaml_as_from_its_class(compose_option, option):
    cfg = compose_option("model", option).model
    for part in {"dynamics", "network"} & set(cfg):
        built, default = (getattr(each, part) for each in (instantiate(cfg), get_class(cfg._target_)()))
        assert listed(vars(built)) == listed(vars(default))
    if "planner" in cfg:
        assert instantiate(cfg).planner.func is get_class(cfg.planner._target_)


def listed(value: object) -> object:
    """Return the value with lists for tuples, because a config contains only lists."""
    if isinstance(value, dict):
        return {name: listed(each) for name, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


KINDS = {"callbacks": Callback, "logger": Logger}


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in KINDS for option in options(group)])
def test_callbacks_and_loggers_are_built(compose_option, group, option):
    parts = compose_option(group, option)[group]
    if "wandb" in parts:
        pytest.importorskip("wandb")
        parts.wandb.offline = True
    assert all(isinstance(instantiate(part), KINDS[group]) for part in parts.values())
    assert bool(parts) == (option != "none")


@pytest.mark.parametrize("option", options("trainer"))
def test_trainer_is_built(compose_option, option):
    trainer = compose_option("trainer", option).trainer
    if trainer.accelerator == "gpu" and not torch.cuda.is_available():
        with pytest.raises(Exception, match="No supported gpu backend found") as error:
            instantiate(trainer, logger=False)
        assert isinstance(error.value.__cause__, MisconfigurationException)
        return
    built = instantiate(trainer, logger=False)
    assert isinstance(built, L.Trainer)
    assert (built.max_epochs, built.max_steps) == (-1, -1)


@pytest.mark.parametrize("option", options("data"))
def test_what_is_exported_names_classes_and_leaves_values_to_constructors(tmp_path, option):
    (tmp_path / "config.yaml").write_text(f"defaults:\n  - /data@elsewhere.stream: {option}\n")
    exported = OmegaConf.to_container(composed("config", folder=tmp_path).elsewhere.stream, resolve=False)
    found = leaves(exported, "")
    values = {key: value for key, value in found.items() if not key.rpartition(".")[2].startswith("_")}
    assert values == {"env": "???"} | ({"dataset": "???"} if option == "offline" else {})
    names = {key: value for key, value in found.items() if key.endswith("_target_")}
    ours = composed("train", "~experiment", f"data={option}").data
    assert names == {key: OmegaConf.select(ours, key) for key in names}


@pytest.mark.parametrize(
    ("option", "override", "follows"),
    [
        ("prioritized", "data.buffer.storage.max_size=64", "sampler.max_capacity"),
        ("prioritized", "data.buffer.priority_key=error", "sampler.priority_key"),
        ("episodic_prioritized", "data.buffer.storage.max_size=64", "sampler.prioritized.max_capacity"),
        ("episodic_prioritized", "data.buffer.priority_key=error", "sampler.prioritized.priority_key"),
        ("episodic_prioritized", "data.buffer.sampler.batch_length=3", "sampler.prioritized.batch_length"),
        ("simple", "data.batch_size=64", "batch_size"),
    ],
)
def test_what_belongs_together_is_said_once(compose_train, option, override, follows):
    cfg = compose_train(f"data={option}", "~experiment", override)
    assert str(OmegaConf.select(cfg.data.buffer, follows)) == override.split("=")[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batchsize=3", "Key 'batchsize' not in 'OnPolicyDataSchema'"),
        ("data.buffer.gae_lamda=0.9", "Key 'gae_lamda' not in 'GAEBufferSchema'"),
        ("model.clip_epsilom=0.1", "Key 'clip_epsilom' not in 'PPOSchema'"),
        ("model.network.sizes=[8]", "Key 'sizes' not in 'MLPNetworkSchema'"),
        ("trainer.max_epoch=3", "Key 'max_epoch' not in 'TrainerSchema'"),
        ("callbacks.checkpoint.top_k=3", "Key 'top_k' not in 'BestCheckpointSchema'"),
        ("sede=3", "Key 'sede' is not in struct"),
        ("data.num_envs=many", "full_key: data.num_envs"),
        ("data.buffer.gamma=high", "full_key: data.buffer.gamma"),
        ("model.clip_epsilon=high", "full_key: model.clip_epsilon"),
        ("model.network.hidden_sizes=wide", "full_key: model.network.hidden_sizes"),
        ("model.network.shared=perhaps", "full_key: model.network.shared"),
        ("trainer.max_epochs=1.5", "full_key: trainer.max_epochs"),
        ("trainer.limit_train_batches=all", "full_key: trainer.limit_train_batches"),
        ("callbacks.progress_bar.refresh_every=often", "full_key: callbacks.progress_bar.refresh_every"),
        ("callbacks.checkpoint.save_top_k=all", "full_key: callbacks.checkpoint.save_top_k"),
    ],
)
def test_typo_or_a_value_of_the_wrong_type_names_the_field(compose_train, override, message):
    with pytest.raises(ConfigCompositionException) as error:
        compose_train(override)
    assert message in str(error.value.__cause__)
    if "not in" in message:
        assert f"Could not override '{override.split('=')[0]}'" in str(error.value)


def test_experiment_that_does_not_exist_gets_the_list_of_those_that_do(compose_train):
    with pytest.raises(MissingConfigException) as error:
        compose_train("experiment=ppo_cartpol")
    assert "Could not find 'experiment/ppo_cartpol'" in str(error.value)
    listed = {line.strip() for line in str(error.value).splitlines()}
    assert set(options("experiment")) <= listed


def test_every_experiment_says_how_to_run_it_and_what_it_reached():
    for path in Path(CONF_DIR / "experiment").glob("*.yaml"):
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any(f"experiment={path.stem}" in line for line in head), path.name
        assert any("seed" in line for line in head), path.name
        assert sum(line.startswith(("# Score (", "# Score: no log.")) for line in head) == 1, path.name
