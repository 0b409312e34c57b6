"""The log of one run: train an experiment with one seed, store the run in a file, and repeat it.

A log is ``examples/results/NAME/seed_S.csv``. Its head has lines ``# key: value`` with the command, the config, the
code, the machine and the scores. The curve follows: a row for each evaluation in training. The key ``config`` has a
digest of all groups that Hydra composes for the experiment, and of its files of demonstrations. The key ``checksum``
covers all other lines, so that a change by hand is found.
"""

from __future__ import annotations

import csv
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from itertools import zip_longest
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, NamedTuple

import numpy as np
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from kit.store import only_our_schemas

PROJECT = Path(__file__).resolve().parents[2]
PEER = "stable_baselines3"
"""Folder of the logs of ``zoo.py`` in the folder of results."""
VARIANTS = "variants"
"""Folder of the logs of runs with other settings than an experiment; ``variants.yaml`` lists their arguments."""
FORMAT, EPISODES = 2, 100
COLUMNS = "frames,score,deviation,success"
KEYS = (
    *("format", "command", "config", "commit", "versions", "processor", "threads", "seed", "frames"),
    *("processor minutes", "score of last.ckpt", "score of best.ckpt", "success rate", "checksum"),
)
LIBRARIES = ("torch", "torchrl", "tensordict", "lightning", "numpy", "numba", "gymnasium")
CPUINFO = Path("/proc/cpuinfo")
AVX2_CODE = {
    "OPENBLAS_CORETYPE": "Haswell",  # matrix products of NumPy
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",  # NumPy's functions on vectors
    "MKL_CBWR": "AVX2",  # matrix products of torch
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's functions on vectors
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # convolutions
    "NUMBA_CPU_NAME": "haswell",  # our compiled kernels
}
"""Environment variables that select code for AVX2, which nearly all x86 processors have."""
TRAIN, EVALUATE = (f"from torchrl_lightning.cli.{name} import main; main()" for name in ("train", "evaluate"))


class ResultsError(ValueError):
    """Raised if a log has another format, another config or changed lines, or if a run cannot be recorded."""


class Evaluation(NamedTuple):
    """A row of a curve. ``success`` is the share of episodes that end at the goal, or None without goals."""

    frames: int
    score: float
    deviation: float
    success: float | None = None


class Score(NamedTuple):
    """Mean and deviation of the returns of 100 unseen episodes."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{number(self.mean)} +- {number(self.deviation)} over {EPISODES} unseen episodes"

    @classmethod
    def parse(cls, text: str) -> Score:
        """Return the score of a line of a log."""
        mean, _, deviation, *_ = text.split()
        return cls(float(mean), float(deviation))


@dataclass(frozen=True)
class RunLog:
    """A run with one seed: its origin, its scores and its curve. ``best`` is None without a best checkpoint."""

    command: str
    config: str
    commit: str
    versions: str
    processor: str
    threads: int
    seed: int
    frames: int
    minutes: float
    last: Score
    best: Score | None
    success: float | None
    curve: tuple[Evaluation, ...]

    def lines(self) -> list[str]:
        """Return the lines of the file."""
        values = (
            *(FORMAT, self.command, self.config, self.commit, self.versions, self.processor, self.threads, self.seed),
            *(self.frames, self.minutes, self.last, self.best, self.success),
        )
        head = [f"# {key}: {number(value)}".rstrip() for key, value in zip(KEYS, values, strict=False)]
        curve = [COLUMNS, *(",".join(map(number, row)) for row in self.curve)]
        return [*head, f"# {KEYS[-1]}: {checksum([*head, *curve])}", *curve]

    def write(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.lines()) + "\n")

    @classmethod
    def read(cls, path: Path, config: str | None = None) -> RunLog:
        """Read the file of a run whose experiment has the digest ``config``, by default the present digest.

        Raises:
            ResultsError: The format, the checksum, the name of the file or the config differs.
        """
        lines = path.read_text().splitlines()
        head = {key: value.strip() for key, _, value in (line[2:].partition(":") for line in lines if line[:2] == "# ")}
        _expect(path, "format", head.get("format"), str(FORMAT))
        others = [line for line in lines if not line.startswith(f"# {KEYS[-1]}:")]
        _expect(
            path, "checksum of its lines", checksum(others), head.get("checksum"), "Restore a changed file with git."
        )
        _expect(path, "keys of its head", ", ".join(head), ", ".join(KEYS))
        _expect(path, "name of the file", path.name, f"seed_{head['seed']}.csv")
        _expect(path, "command", head["command"], command_of(path))
        present = config_digest(path.parent.name) if config is None else config
        _expect(path, "digest of the config", head["config"], present, "The settings have changed.")
        curve = [line.split(",") for line in lines[len(KEYS) + 1 :]]
        return cls(
            head["command"],
            head["config"],
            head["commit"],
            head["versions"],
            head["processor"],
            int(head["threads"]),
            int(head["seed"]),
            int(head["frames"]),
            float(head["processor minutes"]),
            Score.parse(head["score of last.ckpt"]),
            Score.parse(head["score of best.ckpt"]) if head["score of best.ckpt"] else None,
            _optional(head["success rate"]),
            tuple(Evaluation(int(row[0]), float(row[1]), float(row[2]), _optional(row[3])) for row in curve),
        )


def number(value: object) -> str:
    """Return a value as it is written in a log: six digits of a float, an empty text for None."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _optional(text: str) -> float | None:
    return float(text) if text else None


def checksum(lines: Iterable[str]) -> str:
    """Return a digest of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def command_of(path: Path) -> str:
    """Return the command that trains the run of a log."""
    name, seed = path.parent.name, path.stem.removeprefix("seed_")
    if path.parents[1].name == PEER:
        return f"python tests/benchmarks/zoo.py run {name} --seeds {seed}"
    if path.parents[1].name == VARIANTS:
        return " ".join(("torchrl-lightning-train", *arguments_of(name, path.parents[4]), f"seed={seed}"))
    return f"torchrl-lightning-train experiment={name} seed={seed}"


def remedy(path: Path) -> str:
    """Return the sentence with the command that records a log again."""
    script, seed = "zoo.py" if path.parents[1].name == PEER else "results.py", path.stem.removeprefix("seed_")
    return f"Record it again: python tests/benchmarks/{script} run {path.parent.name} --seeds {seed}"


def _expect(path: Path, what: str, received: str | None, expected: str | None, hint: str = "") -> None:
    if received != expected:
        raise ResultsError(f"{path}: the {what} must be {expected}, got {received}.{hint and ' '}{hint} {remedy(path)}")


def log_path(name: str, seed: int, root: Path = PROJECT, peer: bool = False) -> Path:
    """Return the path of the log of a seed."""
    group = PEER if peer else "" if is_experiment(name, root) else VARIANTS
    return root / "examples" / "results" / group / name / f"seed_{seed}.csv"


def read_logs(name: str, root: Path = PROJECT, peer: bool = False) -> list[RunLog]:
    """Read the logs of an experiment or a variant in the order of the seeds, or an empty list without logs."""
    folder = log_path(name, 0, root, peer).parent
    paths = sorted(folder.glob("seed_*.csv"), key=lambda path: int(path.stem.removeprefix("seed_")))
    config = config_digest(name, root) if paths else ""
    return [RunLog.read(path, config) for path in paths]


def is_experiment(name: str, root: Path = PROJECT) -> bool:
    """Return whether an experiment has this name."""
    return (root / "conf" / "experiment" / f"{name}.yaml").is_file()


def arguments_of(name: str, root: Path = PROJECT) -> list[str]:
    """Return the arguments of the training command; raise ResultsError if neither experiment nor variant exists."""
    if is_experiment(name, root):
        return [f"experiment={name}"]
    file = root / "examples" / "results" / f"{VARIANTS}.yaml"
    runs: dict[str, list[str]] = yaml.safe_load(file.read_text())["runs"] if file.is_file() else {}
    if name not in runs:
        raise ResultsError(f"NAME must be an experiment of {root / 'conf' / 'experiment'} or of {file}, got {name}.")
    return runs[name]


def composed(name: str, root: Path = PROJECT) -> DictConfig:
    """Compose the config of an experiment or a variant like the command; raise ResultsError if it does not exist."""
    arguments = arguments_of(name, root)
    with only_our_schemas(), initialize_config_dir(str(root / "conf"), version_base="1.3"):
        return compose("train", arguments)


def config_digest(name: str, root: Path = PROJECT) -> str:
    """Return a digest of the composed config of an experiment or a variant, and of its demonstrations.

    Seed and paths are left out, because they differ between runs and machines. Comments and the order of the keys do
    not count.
    """
    paths = [*(root / "conf").rglob("*"), root / "examples" / "results" / f"{VARIANTS}.yaml"]
    stats = [(path, path.stat()) for path in sorted(paths) if path.is_file()]
    return _config_digest(name, root, tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


@cache
def _config_digest(name: str, root: Path, files: tuple[object, ...]) -> str:
    """Return the digest for this state of the config files."""
    config: Any = OmegaConf.to_container(composed(name, root), resolve=False)
    text = yaml.safe_dump({key: value for key, value in config.items() if key not in ("seed", "paths")})
    digest = hashlib.sha256(text.encode())
    for folder in re.findall(r"\$\{paths\.demonstrations\}/(\w+)", text):
        for file in sorted((root / "conf" / "demonstrations" / folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def code_commit(root: Path = PROJECT) -> str:
    """Return the commit of the code; raise ResultsError if the package or a config differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ResultsError(f"{root} must be a git checkout, because logs name the commit. {done.stderr.strip()}")
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=all", "--", "plugin", "conf")
    if changes:
        files = ", ".join(line.split()[-1] for line in changes.splitlines())
        raise ResultsError(f"plugin/ and conf/ must equal the last commit, got changes in {files}. Commit them first.")
    return git("rev-parse", "HEAD")


def processor() -> str:
    """Return the name of the processor, its family and model, and whether it has AVX-512, as far as they are known.

    Clouds give processors of several families the same name, and results depend on the vector instructions.
    """
    try:
        lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name") or platform.processor() or platform.machine()
    details = [f"{what} {found[key]}" for what, key in (("family", "cpu family"), ("model", "model")) if key in found]
    if "avx512f" in found.get("flags", "").split():
        details.append("AVX-512")
    return ", ".join([name, *details])


def is_x86() -> bool:
    """Return whether the processor is an x86 processor of 64 bits."""
    return platform.machine().lower() in ("x86_64", "amd64")


def versions(config: DictConfig, *more: str) -> str:
    """Return the versions of Python, of the libraries, of the packages of the environment and of ``more``."""
    names = [*LIBRARIES, *environment_packages(config.data.env), *more]
    return ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])


def environment_packages(env: Any) -> list[str]:
    """Return the distributions that define an environment, without Gymnasium."""
    import gymnasium

    recipe = {"id": env} if isinstance(env, str) else env
    if recipe.get("vectorization") == "envpool":
        return ["envpool"]
    name = recipe["id"] if isinstance(recipe["id"], str) else ""
    modules = [recipe.get("module") or name.rpartition(":")[0]]
    if name and not modules[0]:
        point = str(gymnasium.spec(name).entry_point)
        modules = [point.partition(".")[0], *point.split(".")[2:3]]  # gymnasium.envs.mujoco.hopper_v5:HopperEnv
    if modules == ["gymnasium_robotics"]:
        modules.append("mujoco")
    of_module = {module.lower(): names for module, names in packages_distributions().items()}
    found = {of_module[module.lower()][0] for module in modules if module.lower() in of_module}
    return sorted(found - {"gymnasium"})


def command(program: str, *arguments: str, root: Path = PROJECT) -> str:
    """Run a command of the package in this checkout, and return its output; raise ResultsError if it fails.

    On x86, libraries use code for AVX2 on every machine.
    """
    paths = [str(root / "plugin"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **(AVX2_CODE if is_x86() else {}), "PYTHONPATH": os.pathsep.join(paths)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ResultsError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def processor_time() -> float:
    """Return the processor time of all ended child processes in seconds."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_curve(path: Path) -> Iterator[Evaluation]:
    """Yield the evaluations in the log of a training command; the collected episodes of a run without evaluations."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kind = "eval" if any(row.get("eval/return") for row in rows) else "train"
    for row in rows:
        if row.get(f"{kind}/return"):
            score, deviation = float(row[f"{kind}/return"]), float(row.get(f"{kind}/return_std") or 0)
            yield Evaluation(int(float(row["step"])), score, deviation, _optional(row.get(f"{kind}/success") or ""))


def read_evaluation(output: str) -> tuple[Evaluation, int]:
    """Return the result and the number of episodes of the last line of ``torchrl-lightning-evaluate``."""
    line = r"return: (\S+) \+- (\S+) over (\d+) episodes,(?: success rate (\S+),)? (\d+) frames"
    match = re.search(line, output)
    if match is None:
        raise ResultsError(f"the evaluation must end with its scores, got {output[-300:]!r}.")
    mean, deviation, episodes, success, frames = match.groups()
    return Evaluation(int(frames), float(mean), float(deviation), _optional(success or "")), int(episodes)


def play(checkpoint: Path, root: Path = PROJECT) -> Evaluation:
    """Play 100 unseen episodes with a checkpoint."""
    options = (f"episodes={EPISODES}", "trusted=true", "histogram=null", f"hydra.run.dir={checkpoint.parent / 'play'}")
    return read_evaluation(command(EVALUATE, f"ckpt_path={checkpoint}", *options, root=root))[0]


def record(path: Path, commit: str, root: Path = PROJECT) -> RunLog:
    """Train the run of a log with the command, and play 100 unseen episodes with the last and the best checkpoint."""
    name, seed = path.parent.name, int(path.stem.removeprefix("seed_"))
    config = composed(name, root)
    machine = f"{processor()}, code for AVX2" if is_x86() else processor()
    origin = (command_of(path), config_digest(name, root), commit, versions(config), machine, config.torch_threads)
    began = processor_time()
    with tempfile.TemporaryDirectory() as folder:
        command(TRAIN, *command_of(path).split()[1:], f"hydra.run.dir={folder}", root=root)
        minutes = (processor_time() - began) / 60
        checkpoints = Path(folder, "checkpoints")
        last = play(checkpoints / "last.ckpt", root)
        best = play(checkpoints / "best.ckpt", root) if (checkpoints / "best.ckpt").is_file() else None
        curve = tuple(read_curve(Path(folder, "csv", "metrics.csv")))
    return RunLog(
        *origin,
        seed,
        last.frames,
        minutes,
        Score(last.score, last.deviation),
        None if best is None else Score(best.score, best.deviation),
        last.success,
        curve,
    )


def is_repeatable(config: DictConfig) -> bool:
    """Return False if a run depends on the speed of its worker processes."""
    return config.data.get("collector") is None and config.data.get("source") is None


def seed_interval(logs: Sequence[RunLog]) -> tuple[float, float]:
    """Return the interval that must contain the score of a repetition on another machine.

    It reaches from the lowest to the highest seed. It is widened on both sides by its width, because one more seed of
    the same experiment is often outside of the range of five. It is widened at least by two standard errors of the
    difference of two means of 100 episodes, because there may be a single seed or equal scores.
    """
    scores = [log.last.mean for log in logs]
    error = max(log.last.deviation for log in logs) * np.sqrt(2 / EPISODES)
    margin = max(np.ptp(scores), 2 * error)
    return float(min(scores) - margin), float(max(scores) + margin)


def differences(logs: Mapping[int, RunLog], repeated: RunLog, exact: bool = True) -> tuple[str, bool]:
    """Compare a repeated run with the stored logs of all seeds; return a sentence and if the run agrees.

    All scores, the frames and the curve must be equal if processor, threads and versions are the same and if the run is
    ``exact``, which is false with worker processes. Otherwise a score in the interval of the seeds is sufficient.
    """
    stored = logs[repeated.seed]
    before, after = ([line for line in log.lines() if _is_result(line)] for log in (stored, repeated))
    changed = [f"{one!r} became {two!r}" for one, two in zip_longest(before, after) if one != two]
    machine = ("processor", "threads", "versions")
    other = [key for key in machine if getattr(stored, key) != getattr(repeated, key)]
    if not changed:
        where = f"other {' and '.join(other)}" if other else "same machine"
        return f"{where}: all scores, the frames and the curve are equal", True
    if other or not exact:
        reason = f"other {' and '.join(other)}" if other else "worker processes"
        low, high = seed_interval([*logs.values()])
        score, agrees = repeated.last.mean, low <= repeated.last.mean <= high
        inside = "in" if agrees else "outside"
        return f"{reason}: score {score:.6g} is {inside} the interval {low:.6g} to {high:.6g} of the seeds", agrees
    return f"same machine, but {changed[0]} and {len(changed) - 1} more lines", False


def _is_result(line: str) -> bool:
    return line.startswith(("# frames", "# score", "# success")) or not line.startswith("#")
