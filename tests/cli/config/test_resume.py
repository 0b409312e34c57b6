"""A resumed run combines its checkpoint's settings with its own command line, and records the result everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cli.commands import TINY, call, last_line
from torchrl_lightning.cli.config.resume import inherited_overrides, read_record, resume_overrides
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.deploy.loading import CONFIG
from torchrl_lightning.plotting.curves import read_source

GIVEN = [*TINY, "model.clip_epsilon=0.1", "model.learning_rate=0.0005", "model/network=mlp", "seed=3"]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that stopped after half of its frames."""
    folder = tmp_path_factory.mktemp("half")
    done = call("train", *GIVEN, "trainer.max_epochs=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = folder.glob("logs/train/*/seed_3/*/checkpoints/last.ckpt")
    return checkpoint.parents[1]


def checkpoint_of(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def load(folder: Path) -> dict:
    return torch.load(checkpoint_of(folder), weights_only=True)


def composed(run, *arguments: str, expect: int = 0):
    done = run("train", *arguments, "--cfg", "job", "--resolve", expect=expect)
    return OmegaConf.create(done.stdout) if expect == 0 else done.stderr


def test_checkpoint_keeps_the_whole_config_and_the_command(half):
    stored = load(half)
    config, command = stored[CONFIG], stored["command"]
    assert config["seed"] == config["data"]["seed"] == 3
    assert config["trainer"]["max_epochs"] == 2
    assert config["paths"]["output_dir"] == str(half)
    assert config["callbacks"]["last"]["dirpath"] == str(half / "checkpoints")
    assert command["choices"]["experiment"] == "ppo_cartpole"
    assert command["overrides"] == [*GIVEN, "trainer.max_epochs=2"]


def test_several_values_without_multirun_are_checked_against_the_checkpoint(run, tmp_path):
    few = ["data.total_frames=300", "data.warmup_frames=200", "eval_episodes=1", "logger=none"]
    run("train", "experiment=dqn_cartpole", *few, "hydra.run.dir=dqn")
    resumed = f"ckpt_path={checkpoint_of(tmp_path / 'dqn')}"
    assert "need --multirun" in composed(run, resumed, "model.tau=0.1,0.2", expect=1)  # the default PPO lacks tau
    assert "did you mean model.tau?" in composed(run, resumed, "model.taw=0.1,0.2", expect=1)


def test_resumed_run_trains_with_its_own_settings_and_says_so_everywhere(half, run, tmp_path):
    changed = ["trainer.max_epochs=-1", "data.total_frames=384", "model.entropy_coeff=0.01"]
    done = run("train", f"ckpt_path={checkpoint_of(half)}", *changed)
    assert last_line(done.stdout)[4] == "384"
    told = [line for line in done.stdout.splitlines() if " in the checkpoint, " in line]
    assert sorted(told) == [
        "data.total_frames: 512 in the checkpoint, 384 now",
        "model.entropy_coeff: 0.0 in the checkpoint, 0.01 now",
        "trainer.max_epochs: 2 in the checkpoint, -1 now",
    ]
    (folder,) = (path.parents[1] for path in tmp_path.glob("logs/train/*/*/*/checkpoints/last.ckpt"))
    assert folder.parts[-2] == "seed_3"
    assert folder.parts[-3].startswith("ppo_cartpole-model_network_mlp-data.eval_episodes_2")
    overrides = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
    assert [line for line in overrides if line not in changed] == [
        *(line for line in GIVEN if not line.startswith("data.total_frames")),
        f"ckpt_path={checkpoint_of(half)}",
    ]
    recorded = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "config.yaml"))
    logged = yaml.safe_load((folder / "csv" / "hparams.yaml").read_text())
    stored = load(folder)
    for config in (recorded, logged, stored[CONFIG]):
        assert config["model"]["clip_epsilon"] == 0.1
        assert config["model"]["entropy_coeff"] == 0.01
        assert config["data"]["num_epochs"] == 2
        assert config["seed"] == 3
    assert recorded["data"]["seed"] == "${seed}"
    assert logged["callbacks"]["last"]["dirpath"] == str(folder / "checkpoints")
    assert stored["command"]["overrides"] == list(overrides)
    # The second half continues the curve of the first half, labelled with the settings of both runs.
    (curve,) = read_source(folder, "train/grad_norm", "step")
    assert curve.x.tolist() == [128.0, 256.0, 384.0]
    assert "model.clip_epsilon=0.1" in curve.label
    assert "model.entropy_coeff=0.01" in curve.label
    assert curve.seed == 3


@pytest.mark.parametrize("changed", [["model.schedule=constant", "model.learning_rate=0.0001"], []])
def test_explicit_rate_and_schedule_win_over_the_restored_ones(changed, half, run, tmp_path):
    done = run("train", f"ckpt_path={checkpoint_of(half)}", *changed, "trainer.max_epochs=3", "hydra.run.dir=second")
    assert ("model.learning_rate: 0.0005 in the checkpoint, 0.0001 now" in done.stdout) is bool(changed)
    (optimizer,) = load(tmp_path / "second")["optimizer_states"]
    (group,) = optimizer["param_groups"]
    # The third of four rollouts starts at half of the linear schedule.
    assert (group["initial_lr"], group["lr"]) == ((0.0001, 0.0001) if changed else (0.0005, 0.00025))


def test_group_of_the_run_is_ignored_and_interpolations_follow(half, run):
    checkpoint = f"ckpt_path={checkpoint_of(half)}"
    plain = composed(run, checkpoint)
    assert (plain.data.num_envs, plain.model.clip_epsilon, plain.data.seed) == (4, 0.1, 3)
    changed = ("experiment=ppo_cartpole", "env=cartpole", "model/network=mlp", "logger=none", "seed=5")
    here = composed(run, checkpoint, *changed)
    plain.logger, plain.seed, plain.data.seed = {}, 5, 5
    assert here == plain
    said = composed(run, checkpoint, "env=pendulum", expect=1)
    assert said.startswith("error: env=pendulum differs from the run of ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("group", "theirs"),
    [
        ("env=pendulum", "env=cartpole"),
        ("model=a2c", "model=ppo"),
        ("experiment=ppo_pendulum", "experiment=ppo_cartpole"),
        ("~experiment", "experiment=ppo_cartpole"),
    ],
)
def test_other_group_than_the_runs_is_refused_by_name(group, theirs, half):
    record, (given,) = read_record(load(half), "a.ckpt"), OverridesParser.create().parse_overrides([group])
    with pytest.raises(UsageError, match=re.escape(f"{group} differs from the run of a.ckpt, which has {theirs}.")):
        resume_overrides(record, "a.ckpt", [given], lambda key: key in ("env", "model", "experiment"))


def test_value_of_yaml_that_has_changed_since_stays(run, tmp_path):
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    text = "# @package _global_\ndata: {{total_frames: 128, num_epochs: {}, frames_per_batch: 128, num_envs: 4}}\n"
    text += "model: {{clip_epsilon: {}, entropy_coeff: {}}}\nnow: {}\n"
    given = ["--config-dir", ".", "experiment=mine", "data.eval_episodes=1", "eval_episodes=1", "hydra.run.dir=first"]
    given += ["data.mini_batch_size=64"]
    file.write_text(text.format(2, 0.1, 0.01, "3"))
    run("train", *given, "+own.seed=${seed}", "callbacks.progress_bar.refresh_every=0.3")
    file.write_text(text.format(7, '"${model.critic_coeff}"', 0.02, "${seed}"))
    resumed = ["--config-dir", ".", "ckpt_path=first/checkpoints/last.ckpt", "model.entropy_coeff=0.03"]
    here = composed(run, *resumed, "trusted=true")
    assert here.data.num_epochs == 2
    assert here.model.clip_epsilon == 0.1
    assert here.model.entropy_coeff == 0.03
    assert here.now == 3
    assert here.own.seed == 0
    assert here.callbacks.progress_bar.refresh_every == 0.3
    here = composed(run, *resumed)
    assert (here.data.num_epochs, here.callbacks.progress_bar.refresh_every) == (2, 0.2)


def test_checkpoint_may_come_from_yaml_and_from_a_sweep(half, run, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [train, _self_]\nckpt_path: {checkpoint_of(half)}\n")
    few = ["trainer.max_epochs=3", "eval_episodes=1"]
    swept = ["--config-dir", ".", "--config-name", "mine", "--multirun", "model.clip_epsilon=0.2,0.3"]
    done = run("train", *swept, *few)
    assert done.stdout.count("mean evaluation return") == 2
    assert "model.clip_epsilon: 0.1 in the checkpoint, 0.3 now" in done.stdout
    folders = [path.parents[1] for path in tmp_path.glob("logs/train/sweep_*/*/seed_3/*/.hydra/config.yaml")]
    kept = [OmegaConf.load(folder / ".hydra" / "config.yaml") for folder in folders]
    assert sorted(config.model.clip_epsilon for config in kept) == [0.2, 0.3]
    assert {(config.data.num_epochs, config.ckpt_path) for config in kept} == {(2, str(checkpoint_of(half)))}


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("hydra.run.dir=/tmp/x", True),
        ("hydra/launcher=joblib", True),
        ("hydra.searchpath=[file:///tmp]", True),
        ("+hydra.callbacks.x={_target_:os.system}", True),
        ("data.env='${oc.create:{_target_:os.system}}'", False),
        ("data.env.a.${oc.env:HOME}=1", False),
        ("seed=choice(1,2)", False),
        ("seed=1,2", False),
        ("seed=glob(*)", False),
        ("seed=4", False),
        ("data.env={_target_:os.system,command:touch canary}", False),
        ("env=../../evil", False),
        ("env=pendulum", False),
        ("+x=" + "[" * 1500, False),
        ("ckpt_path=elsewhere.ckpt", False),
        ("paths.log_dir=/tmp", False),
        ("callbacks.last.dirpath=/tmp", False),
        ("trusted=true", False),
        ("hparams_search=ppo_cartpole", False),
    ],
)
def test_overrides_of_a_file_are_plain_settings_or_none(line, refused, half):
    record = read_record(load(half), checkpoint_of(half))
    before = inherited_overrides(record, "a.ckpt")
    assert [override.input_line for override in before] == [*GIVEN, "trainer.max_epochs=2"]
    record.overrides.append(line)
    if refused:
        with pytest.raises(UsageError, match="its overrides must be settings of a run"):
            inherited_overrides(record, "a.ckpt")
    else:
        assert inherited_overrides(record, "a.ckpt") == before


@pytest.mark.parametrize(
    ("group", "key", "value", "message"),
    [
        ("data", "env", {"_target_": "os.system", "command": "touch canary"}, "_target_='os.system' is none of the cl"),
        ("data", "seed", "${oc.create:{_target_:os.system}}", "is an interpolation"),
        ("model", "distribution", {"_target_": "own.Class"}, "'own.Class' is none of the classes"),
        ("data", "collector", ("a", "b"), "not a plain value"),
    ],
)
def test_config_of_a_file_is_data(group, key, value, message, half, run, tmp_path):
    stored = load(half)
    stored[CONFIG][group][key] = value
    torch.save(stored, tmp_path / "theirs.ckpt")
    done = run("train", "ckpt_path=theirs.ckpt", expect=1)
    assert message in done.stderr
    assert done.stderr.startswith("error: the config in theirs.ckpt")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "logs").exists()
    assert not (tmp_path / "canary").exists()


def test_own_class_is_resumed_only_with_trusted(run, tmp_path):
    (tmp_path / "own_cart.py").write_text(OWN)
    env = "data.env={_target_:hydra.utils.get_method,path:own_cart.%s}"
    run("train", *TINY, "data.total_frames=128", "eval_episodes=1", env % "make", "hydra.run.dir=first")
    checkpoint = tmp_path / "first" / "checkpoints" / "last.ckpt"
    for more in ([], [env % "make"], [env % "other"], ["trusted=false"]):
        said = composed(run, f"ckpt_path={checkpoint}", *more, expect=1)
        assert "data.env._target_='hydra.utils.get_method' is none of the classes" in said
        assert "set trusted=true" in said
        assert len(said.splitlines()) == 1
    assert composed(run, f"ckpt_path={checkpoint}", "trusted=true").data.env.path == "own_cart.make"


@pytest.mark.parametrize("where", ["trusted: true\n", "hydra: {sweeper: {params: {trusted: 'true'}}}\n"])
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_trusted_in_a_file_is_refused(command, where, half, run, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [{command}, _self_]\n{where}")
    sweep = ["--multirun"] if "sweeper" in where else []
    given = ["--config-dir", ".", "--config-name", "mine", f"ckpt_path={checkpoint_of(half)}", *sweep]
    said = run(command, *given, expect=1).stderr
    reason = "trusted must be set on the command line, got trusted=true from a file. Remove it there.\n"
    assert said == (
        f"error: in the run trusted=True: {reason}error: 1 of 1 runs failed.\n" if sweep else f"error: {reason}"
    )


OWN = """
import gymnasium
def make(**options):
    return gymnasium.make("CartPole-v1", **options)
"""


def test_setting_takes_effect_or_is_refused(run, tmp_path):
    prioritized = [
        *("~experiment", "data=prioritized", "model=dqn", "env=cartpole", "data.num_envs=2", "data.warmup_frames=64"),
        *("data.batch_size=8", "data.updates_per_epoch=8", "data.buffer.storage.max_size=256", "seed=3"),
        *("eval_episodes=1", "data.eval_episodes=1", "logger=none", "hydra.run.dir=first"),
    ]
    run("train", *prioritized, "data.total_frames=96")
    resumed = ["train", "ckpt_path=first/checkpoints/last.ckpt", "data.total_frames=128"]
    said = run(*resumed, "data.buffer.sampler.beta=0.9", expect=1).stderr
    assert "data.buffer.sampler.beta=0.9 would not take effect: it is a part of the state" in said
    assert "Traceback" not in said
    assert last_line(run(*resumed, "data.updates_per_epoch=3").stdout)[4] == "128"


def test_settings_of_the_process_are_those_of_the_command(half, run, monkeypatch, tmp_path):
    stored = load(half)
    for threads, cores, expected in ((2, 4, 2), (8, 4, 1), (10**9, 4, 1), ("x", 4, 1), (0, 4, 1)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        stored[CONFIG]["torch_threads"] = threads
        stored[CONFIG]["trainer"]["profiler"] = "simple"
        torch.save(stored, tmp_path / "other.ckpt")
        config = composed(run, "ckpt_path=other.ckpt")
        assert config.torch_threads == expected
        assert config.trainer.get("profiler") is None
    assert composed(run, "ckpt_path=other.ckpt", "torch_threads=3").torch_threads == 3
    stored[CONFIG]["torch_threads"] = 2
    torch.save(stored, tmp_path / "other.ckpt")
    told = run("train", "ckpt_path=other.ckpt", "trainer.max_epochs=-1", "data.total_frames=384").stdout
    assert "torch_threads: 2, as in the run of the checkpoint" in told
