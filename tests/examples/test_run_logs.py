"""A log names the origin of a run, and a changed log or a changed config is found."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
from omegaconf import OmegaConf
from tensordict.nn import TensorDictModule

from benchmarks import results, run_logs, zoo
from benchmarks.run_logs import Evaluation, ResultsError, RunLog, Score, config_digest, differences, log_path
from kit.store import composed_run
from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning.cli import evaluate

NAME = "ppo_cartpole"
LOG = RunLog(
    f"torchrl-lightning-train experiment={NAME} seed=0",
    config_digest(NAME),
    "0123456789abcdef0123456789abcdef01234567",
    "python 3.11.9, torch 2.13.0",
    "A processor",
    1,
    0,
    98304,
    0.25,
    Score(480.0, 20.0),
    Score(500.0, 0.0),
    None,
    (Evaluation(10, 20.5, 1.5), Evaluation(20, 400.0, 3.0, 0.5)),
)
REMEDY = rf"Record it again: python tests/benchmarks/results\.py run {NAME} --seeds 0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project with our configs and one log."""
    shutil.copytree(run_logs.PROJECT / "conf", tmp_path / "conf")
    LOG.write(log_path(NAME, 0, tmp_path))
    return tmp_path


def logs(*scores: float, **changes: Any) -> dict[int, RunLog]:
    return {seed: replace(LOG, seed=seed, last=Score(mean, 20.0), **changes) for seed, mean in enumerate(scores)}


def test_log_is_read_as_it_was_written(root):
    assert run_logs.read_logs(NAME, root) == [LOG]
    assert run_logs.read_logs("ppo_pendulum", root) == []
    head = log_path(NAME, 0, root).read_text().splitlines()[: len(run_logs.KEYS)]
    assert [line[2:].partition(":")[0] for line in head] == [*run_logs.KEYS]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("score of last.ckpt: 480", "score of last.ckpt: 490"),
        ("commit: 0123", "commit: 1123"),
        ("20,400,3", "20,401,3"),
        ("threads: 1\n", ""),
    ],
)
def test_changed_line_raises_with_the_remedy(before, after, root):
    path = log_path(NAME, 0, root)
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ResultsError, match=rf"seed_0\.csv: .*git.*{REMEDY}") as error:
        run_logs.read_logs(NAME, root)
    assert re.search(r"checksum of its lines must be \w{16}, got \w{16}", str(error.value))


@pytest.mark.parametrize("file", ["model/ppo.yaml", "env/cartpole.yaml", "data/gae.yaml", "trainer/default.yaml"])
def test_changed_setting_of_a_group_raises_with_the_remedy(file, root):
    path = root / "conf" / file
    path.write_text(f"{path.read_text()}# a comment\n")
    assert run_logs.read_logs(NAME, root) == [LOG]
    path.write_text(re.sub(r"^(\s*\w+: )(\d\S*)", r"\g<1>77", path.read_text(), count=1, flags=re.MULTILINE))
    with pytest.raises(ResultsError, match=rf"digest of the config must be.*got.*{REMEDY}"):
        run_logs.read_logs(NAME, root)


def test_other_format_name_or_command_raises_with_the_remedy(root):
    path = log_path(NAME, 0, root)
    replace(LOG, command=f"{LOG.command} data.total_frames=1").write(path)
    with pytest.raises(ResultsError, match=rf"command must be.*seed=0, got.*data\.total_frames=1\. {REMEDY}"):
        run_logs.read_logs(NAME, root)
    replace(LOG, seed=1).write(path)
    with pytest.raises(ResultsError, match=r"name of the file must be .*seed_1\.csv"):
        run_logs.read_logs(NAME, root)
    path.write_text(path.read_text().replace("# format: 2", "# format: 3"))
    with pytest.raises(ResultsError, match=rf"format must be 2, got 3.*{REMEDY}"):
        run_logs.read_logs(NAME, root)
    with pytest.raises(ResultsError, match=r"NAME must be an experiment of .*, got none"):
        config_digest("none", root)


def test_remedy_of_a_log_of_the_peer_names_its_script(root):
    path = log_path(NAME, 3, root, peer=True)
    replace(LOG, seed=3).write(path)
    with pytest.raises(ResultsError, match=rf"command must be .*again: .*/zoo\.py run {NAME} --seeds 3"):
        run_logs.read_logs(NAME, root, peer=True)


def test_digest_covers_demonstrations_and_not_the_seed(root):
    name, conf = "ppod_minigrid_keycorridor", root / "conf"
    before = config_digest(name, root)
    train = conf / "train.yaml"
    train.write_text(train.read_text().replace("\nseed: 0", "\nseed: 5").replace("logs/", "elsewhere/"))
    assert config_digest(name, root) == before
    (conf / "demonstrations" / "keycorridor" / "another.safetensors").write_bytes(b"0")
    assert config_digest(name, root) != before
    assert config_digest(NAME, root) == LOG.config


def test_run_is_refused_on_a_changed_work_tree(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.yaml").write_text("a: 1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert re.fullmatch(r"[0-9a-f]{40}", run_logs.code_commit(tmp_path))
    (tmp_path / "README.md").write_text("not the code")
    run_logs.code_commit(tmp_path)
    monkeypatch.setattr(run_logs, "record", lambda *_: pytest.fail("a run began"))
    for name in ("conf/a.yaml", "conf/new.yaml"):
        (tmp_path / name).write_text("a: 2")
        with pytest.raises(ResultsError, match=rf"got changes in {name}\. Commit them first"):
            results.run(NAME, [0], tmp_path)
        git("add", ".")
        git("commit", "-m", "next")


def test_run_trains_and_plays_both_checkpoints(root, monkeypatch):
    arguments: list[tuple[str, ...]] = []

    def command(program: str, *options: str, root: Path) -> str:
        arguments.append(options)
        if program == run_logs.TRAIN:
            folder = Path(options[-1].partition("=")[2])
            for name in ("checkpoints", "csv"):
                (folder / name).mkdir()
            (folder / "checkpoints" / "best.ckpt").touch()
            (folder / "csv" / "metrics.csv").write_text("eval/return,eval/return_std,step\n,,64\n20.5,1.5,10\n")
            return ""
        mean = "480.0" if "last.ckpt" in options[0] else "500.0"
        return f"mean evaluation return: {mean} +- 20.0 over 100 episodes, success rate 0.91, 98304 frames, 3 s\n"

    monkeypatch.setattr(run_logs, "command", command)
    monkeypatch.setattr(run_logs, "code_commit", lambda _: LOG.commit)
    results.run(NAME, [3], root)
    log = RunLog.read(log_path(NAME, 3, root))
    assert (log.seed, log.frames, log.success) == (3, 98304, 0.91)
    assert (log.last, log.best) == (Score(480, 20), Score(500, 20))
    assert log.curve == (Evaluation(10, 20.5, 1.5),)
    assert arguments[0][:2] == (f"experiment={NAME}", "seed=3")
    assert ["episodes=100" in options for options in arguments] == [False, True, True]
    with pytest.raises(ResultsError, match="must end with its scores, got 'error'"):
        run_logs.read_evaluation("error")


def test_episodes_are_the_curve_of_a_run_without_evaluations(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/return,loss\n64,,0.5\n200,-3.5,\n")
    assert [*run_logs.read_curve(path)] == [Evaluation(200, -3.5, 0.0)]


def test_repetition_on_the_same_machine_must_have_equal_numbers():
    stored = logs(480.0, 490.0)
    assert differences(stored, replace(stored[0], minutes=9.0, commit="another"))[1]
    for changed in (
        {"curve": LOG.curve[:1]},
        {"curve": (*LOG.curve[:1], Evaluation(20, 400.001, 3.0, 0.5))},
        {"best": None},
        {"frames": 98305},
    ):
        sentence, agrees = differences(stored, replace(stored[0], **changed))
        assert not agrees
        assert "same machine, but" in sentence


def test_repetition_on_another_machine_must_be_near_the_range_of_the_seeds():
    stored = logs(400.0, 460.0, 440.0)
    for changes in ({"processor": "other"}, {"versions": "python 3.12"}, {"threads": 2}):
        for score, expected in ((341.0, True), (519.0, True), (339.0, False), (521.0, False)):
            sentence, agrees = differences(stored, replace(stored[1], last=Score(score, 20.0), curve=(), **changes))
            assert agrees is expected
            assert f"other {next(iter(changes))}" in sentence
            assert "340 to 520" in sentence
    same = replace(stored[1], curve=())
    assert differences(stored, same, exact=False)[1]
    sentence, agrees = differences(stored, replace(stored[1], processor="other"))
    assert agrees
    assert sentence == "other processor: all scores, the frames and the curve are equal"
    low, high = run_logs.seed_interval([LOG])  # a single seed: two errors of a difference of two means of 100 episodes
    assert (low, high) == pytest.approx((480 - 5.657, 480 + 5.657), abs=1e-3)
    assert [run_logs.is_repeatable(composed_run(f"experiment={name}")) for name in (NAME, "vtrace_cartpole")] == [
        True,
        False,
    ]


def test_check_exits_if_a_run_differs_and_keeps_the_logs(root, monkeypatch):
    stored = log_path(NAME, 0, root).read_text()
    repeated = LOG
    monkeypatch.setattr(run_logs, "record", lambda *_: repeated)
    assert results.check(NAME, [0], root)
    repeated = replace(LOG, frames=1)
    assert not results.check(NAME, [0], root)
    assert log_path(NAME, 0, root).read_text() == stored
    with pytest.raises(ResultsError, match="--seeds must have logs"):
        results.check(NAME, [0, 1], root)
    options = SimpleNamespace(command="run", name=NAME, seeds=[0], check=True)
    monkeypatch.setattr(results, "asked", lambda *_, **__: options)
    monkeypatch.setattr(results, "check", lambda *_: False)
    with pytest.raises(SystemExit, match="1"):
        results.main()


def test_versions_include_the_package_of_the_environment():
    versions = run_logs.versions(composed_run(f"experiment={NAME}"))
    assert [part.split()[0] for part in versions.split(", ")] == ["python", *run_logs.LIBRARIES]
    assert run_logs.environment_packages({"id": "a-v0", "vectorization": "envpool"}) == ["envpool"]
    for env in ("yaml:a-v0", {"id": "a-v0", "module": "yaml"}):
        assert run_logs.environment_packages(env) == ["PyYAML"]
    assert run_logs.environment_packages("examples.mine:a-v0") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx512f\n", "AVX-512"),
        ("processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n", None),
    ],
)
def test_processor_has_its_family_and_vector_instructions(text, name, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(f"{text}\n{text.replace('AMD', 'Other')}")
    monkeypatch.setattr(run_logs, "CPUINFO", file)
    assert run_logs.processor() == ", ".join(["AMD EPYC", "family 26", "model 2", *filter(None, [name])])
    monkeypatch.setattr(run_logs, "CPUINFO", tmp_path / "absent")
    assert run_logs.processor() == (platform.processor() or platform.machine())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_recorded_runs_use_code_for_avx2(machine, monkeypatch):
    """The libraries of another processor do not know these names of x86 processors."""
    monkeypatch.setattr(run_logs.platform, "machine", lambda: machine)
    for name in run_logs.AVX2_CODE:
        monkeypatch.setenv(name, "own")
    found = json.loads(run_logs.command("import json, os; print(json.dumps(dict(os.environ)))"))
    expected = run_logs.AVX2_CODE if machine == "x86_64" else dict.fromkeys(run_logs.AVX2_CODE, "own")
    assert {name: found[name] for name in run_logs.AVX2_CODE} == expected


def test_peer_plays_the_episodes_of_the_evaluation_command(monkeypatch):
    """The seeds of all resets and the episodes are equal."""
    seeds: list[int | None] = []
    acrobot = gymnasium.make("Acrobot-v1").unwrapped.__class__
    reset = acrobot.reset

    def recorded_reset(self: Any, *, seed: int | None = None, options: Any = None) -> Any:
        seeds.append(seed)
        return reset(self, seed=seed, options=options)

    monkeypatch.setattr(acrobot, "reset", recorded_reset)
    config = composed_run("experiment=ppo_acrobot")
    monkeypatch.setattr(evaluate, "load_run", lambda _: (Path("last.ckpt"), {"OnPolicyDataModule": {}}, config))
    left = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])
    monkeypatch.setattr(evaluate, "build_policy", lambda *_: left)
    monkeypatch.setattr("torchrl_lightning.cli.config.resume.check_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(OnPolicyDataModule, "state_frames", lambda *_: 0)
    options = OmegaConf.load(run_logs.PROJECT / "conf" / "evaluate.yaml")
    options.update({"ckpt_path": "last.ckpt", "episodes": 12, "histogram": None})
    ours = evaluate.evaluate(options)
    of_command = seeds[:]
    seeds.clear()
    episodes = zoo.play(config, lambda observations: torch.zeros(len(observations)).long().numpy(), 12)
    assert seeds == of_command
    assert len({seed for seed in seeds if seed is not None}) >= 10
    assert float(episodes["episode_return"].mean()) == ours
