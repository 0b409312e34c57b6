"""Every command and code block of the README and of the guide runs as written, but with fewer frames.

Each line of a ``bash`` block is one of our commands. A ``yaml`` block names its file in its first comment, and a
``python`` block may name one. The ``python`` blocks of a page run in order in one namespace. A ``text`` block contains
the output of the ``python`` block before it. A ``py`` block is a program of another library and runs only if that
library is installed.
"""

from __future__ import annotations

import contextlib
import doctest
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import yaml
from hydra.utils import instantiate
from joblib.externals.loky import get_reusable_executor
from torchrl.envs import EnvBase

import torchrl_lightning
from cli.commands import LAST_LINE, Done, call, last_line
from kit.blocks import END, few_frames, run_blocks
from kit.extras import need_extra
from kit.forks import Forked, forked_workers
from kit.processes import PROJECT
from kit.states import differences
from prose import page_sentences
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.plotting.trials import read_trials

GUIDE = PROJECT / "examples" / "guide"
PAGES = {path.stem: path.read_text() for path in (PROJECT / "README.md", *sorted(GUIDE.glob("*.md")))}
SCRIPTS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]


def fenced(page: str, language: str = r"\w*") -> list[str]:
    """Return the blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


# A Python block, and the text block with its output if one follows directly.
PRINTED = r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
PYTHON = {name: found for name, page in PAGES.items() if (found := re.findall(PRINTED, page, flags=re.M | re.S))}
LINES = [(name, line) for name, page in PAGES.items() for text in fenced(page, "bash") for line in text.splitlines()]
# .ci/run installs the package, and pytest is already running.
SHELL = r"python3 -m venv |pip install |pytest "
NEIGHBOURS = r"Neighbours: .*\[the guide\]\(../../README.md#the-guide\)\."
# Each command once, though pages describe it with different comments.
COMMANDS = list({line.partition("  #")[0].rstrip(): line for _, line in LINES if not re.match(SHELL, line)}.values())
FIRST, *OTHERS = COMMANDS
# Commands with arguments inside sentences.
SENTENCES = "\n".join(re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S) for page in PAGES.values())
INLINE = list(dict.fromkeys(re.findall(r"`((?:torchrl-lightning-|python )[^`\n]* [^`\n]*|python [^`\n]+)`", SENTENCES)))
NOT_RUN = {
    "python tests/benchmarks/": "measurements, which take minutes to hours",
    "python -m torchrl_lightning.cli.train": "another name of a command; the tests of the modules run it",
    "python -m tests.": "checks of the whole project, which .ci/run starts or a developer",
    "python tests/wiring.py": "writes into the package",
}
"""The prefixes of inline commands that are not run, with the reasons."""
HEAD = r"(?:# @.*\n)?# ([\w/]+\.(?:yaml|py))\n"
FILES = [
    (named[1], text)
    for page in PAGES.values()
    for text in fenced(page, "(?:yaml|python)")
    if (named := re.match(HEAD, text))
]
# prefix of an experiment: frames; it collects more before its first update, or updates often
FRAMES = {"pets": 510, "mbpo": 510, "rlpd": 300}
# setting: prefix of the run's folder. Other folders start with the name of the experiment.
NAMES = {"data=vanilla": "a2c_cartpole_vanilla", "data=ppod": "ppo_cartpole_ppod"}


def run_line(line: str, folder: Path, frames: int, run: Path | None = None) -> Done:
    """Run a line like a shell; a training command gets fewer frames and episodes."""
    script, *arguments = shlex.split(line if run is None else line.replace("RUN", str(run)), comments=True)
    module, _, function = SCRIPTS[script].partition(":")
    assert function == "main"
    trains = module.endswith(".train") and not {"--help", "--info"} & set(arguments)
    is_offline = "data=offline" in arguments
    few = ["data.updates_per_epoch=20"] if is_offline else [f"data.total_frames={frames}", "eval_episodes=2"]
    few = few if trains else []
    if trains and line != FIRST:  # the README states the first run's folder name
        few.append("data.eval_episodes=2")
    with forked_workers() if "vtrace" in line else contextlib.nullcontext():
        done = call(module.rpartition(".")[2], *arguments, *few, cwd=folder, draws=line == FIRST)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def runs_below(folder: Path) -> set[Path]:
    return {path.parents[1] for path in folder.glob("logs/train/**/csv/metrics.csv")}


@pytest.fixture(scope="module", autouse=True)
def no_workers_left() -> Iterator[None]:
    yield
    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Done]:
    """Return the working directory, the folder of the first command's run, and its output."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(PROJECT / "examples" / "own_environment.py", folder)
    for name, text in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    done = run_line(FIRST, folder, 1024)
    (run,) = runs_below(folder)
    return folder, run.relative_to(folder), done


def test_commands_inside_sentences_are_run_or_have_a_reason():
    run = [line for line in INLINE if not line.startswith(tuple(NOT_RUN))]
    assert all(line.startswith("torchrl-lightning-") for line in run), run
    assert len(run) >= 4
    assert all(any(line.startswith(begin) for line in INLINE) for begin in NOT_RUN)


@pytest.mark.parametrize("line", [line for line in INLINE if line.startswith("torchrl-lightning-")])
def test_command_inside_a_sentence_runs(line, first, monkeypatch, tmp_path):
    folder, run, _ = first
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    if "convert=demonstrations" in line:
        record = ["record", f"ckpt_path={run}/checkpoints/last.ckpt", "episodes=1", "min_return=0"]
        assert call(*record, "directory=demonstrations", cwd=folder).returncode == 0
        if find_spec("minari") is None:
            done = call("record", *shlex.split(line)[1:], cwd=folder)
            assert done.returncode == 1
            assert "pip install 'torchrl-lightning[minari]'" in done.stderr
            return
    before = runs_below(folder)
    done = run_line(line.replace("SOURCE", str(run)), folder, 1024)
    assert len(runs_below(folder) - before) == ("-train" in line and "--info" not in line)
    if "--info" in line:
        assert str(CONF_DIR) in done.stdout
    if "convert=demonstrations" in line:
        assert len(list(tmp_path.glob("cartpole/own-v0/data/main_data.hdf5"))) == 1


def test_fenced_blocks_are_all_tested():
    languages = re.findall(r"^```(\w*)\n.*?^```$", "\n".join(PAGES.values()), flags=re.MULTILINE | re.DOTALL)
    assert set(languages) == {"bash", "python", "py", "yaml", "text", "bibtex"}
    assert {name for name, page in PAGES.items() if fenced(page, "py")} == {name for name in PAGES if "from_" in name}
    assert languages.count("text") == sum(bool(said) for blocks in PYTHON.values() for _, said in blocks)
    assert FIRST == "torchrl-lightning-train"
    assert {shlex.split(line, comments=True)[0] for line in COMMANDS} == set(SCRIPTS)
    assert sum("--multirun" in line or "hparams_search" in line for line in OTHERS) == 3
    assert {name for name, line in LINES if re.match(SHELL, line)} == {"README"}
    yamls = [name for name, _ in FILES if name.endswith(".yaml")]
    assert len(set(yamls)) == languages.count("yaml")


def test_page_is_short_says_what_it_is_for_and_leads_to_its_neighbours():
    for name, page in PAGES.items():
        title, blank, purpose, *_, last = page.splitlines()
        assert title.startswith("# ")
        assert not blank
        assert re.match(r"\w", purpose), name
        assert len(page.splitlines()) <= (120 if name == "README" else 150), name
        assert name == "README" or re.fullmatch(NEIGHBOURS, last), name
        file = PROJECT / "README.md" if name == "README" else GUIDE / f"{name}.md"
        prose = " ".join(sentence for _, sentence in page_sentences(file))
        numbers = re.findall(r"(?<![\w.`/-])\d[\d,.]*", re.sub(r"`[^`]*`", "", prose))
        assert len(prose.split()) <= 1000, name
        assert len(numbers) <= max(0.04 * len(prose.split()), 4), name


def test_links_lead_to_files_or_headings_and_the_readme_to_all_pages():
    for name, page in PAGES.items():
        folder = PROJECT if name == "README" else GUIDE
        for link in re.findall(r"\]\((?!https?://)([^)]*)\)", page):
            path, _, heading = link.partition("#")
            target = folder / path
            assert target.exists(), f"{name}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if heading else []
            assert not heading or heading in {each.lower().replace(" ", "-") for each in headings}, f"{name}: {link}"
    assert set(re.findall(r"\(examples/guide/(\w+)\.md\)", PAGES["README"])) == set(PAGES) - {"README"}
    pictures = {path.name for path in GUIDE.iterdir() if path.suffix in (".png", ".svg")}
    assert pictures == {name for page in PAGES.values() for name in re.findall(r"(\w+\.(?:png|svg))\)", page)}


def test_site_has_all_pages_and_the_version_to_cite_is_ours():
    _, nav = (GUIDE.parent / "mkdocs.yml").read_text().split("\nnav:\n")
    pages = re.findall(r"[\w/]+\.md", nav)
    folder = sorted(str(path.relative_to(GUIDE)) for path in GUIDE.rglob("*.md"))
    assert sorted(pages) == sorted(["index.md", *folder])
    assert re.search(r"version = \{(.*)\}", PAGES["citing"])[1] == torchrl_lightning.__version__


def test_release_notes_name_the_versions_of_the_dependencies():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"])
    rows = dict(re.findall(r"^\| ([A-Z]\w+)[^|]* \| ([^|]*) \|$", PAGES["changes"], flags=re.MULTILINE))
    names = {"PyTorch": "torch", "TorchRL": "torchrl", "Lightning": "lightning", "Hydra": "hydra-core"}
    for row, name in {**names, "Gymnasium": "gymnasium"}.items():
        assert wanted[name] in rows[row], row
    assert wanted["tensordict"] in rows["TorchRL"]
    assert project["requires-python"].removeprefix(">=") in rows["Python"]


def test_readme_names_every_extra():
    (told,) = re.findall(r"^\*\*From the wheel\*\*.*$", PAGES["README"], flags=re.MULTILINE)
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"`(\w+)`", told)) == set(extras)


def test_layers_of_the_architecture_page_equal_the_import_contract():
    (contract, *_) = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(re.findall(r"torchrl_lightning\.(\w+)", layer)) for layer in contract["layers"]]
    package = PROJECT / "plugin" / "torchrl_lightning"
    expected = [rooms for layer in layers if (rooms := {each for each in layer if (package / each).is_dir()})]
    rows = re.findall(r"^\| \d+ \| (.*?) \|", PAGES["architecture"], flags=re.MULTILINE)
    assert [set(re.findall(r"`(\w+)/`", row)) for row in rows] == expected


def rows_of_experiments(page: str) -> list[str]:
    """Return the rows of a page's only table of experiments, without the header."""
    (rows,) = re.findall(r"^\| `experiment=` \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGES[page], flags=re.MULTILINE)
    return rows.splitlines()


def test_table_of_experiments_has_all_with_their_frames():
    lines = rows_of_experiments("experiments")
    rows = [re.search(r"^\| `(\w+)` \| .*\| ([\d,]+) \|[^|]*\|$", line).groups() for line in lines]
    frames = {name: int(column.replace(",", "")) for name, column in rows}
    assert len(rows) == len(frames)
    assert frames.keys() == {path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")}
    assert {name: frames_of(name) for name in frames} == frames


def test_short_table_of_the_readme_repeats_rows_of_the_complete_one():
    short = rows_of_experiments("README")
    assert len(set(short)) == len(short) == 8
    assert set(short) <= set(rows_of_experiments("experiments"))
    heads = [
        re.findall(r"^\| `experiment=` .*$", PAGES[page], flags=re.MULTILINE) for page in ("README", "experiments")
    ]
    assert heads[0] == heads[1]


def frames_of(experiment: str) -> int:
    """Return the total frames of an experiment, or of the experiment that it extends."""
    settings = yaml.safe_load((CONF_DIR / "experiment" / f"{experiment}.yaml").read_text())
    base = next((each for each in settings["defaults"] if isinstance(each, str) and each != "_self_"), None)
    return settings.get("data", {}).get("total_frames") or frames_of(base)


def test_first_command_leaves_what_the_readme_says(first):
    folder, run, done = first
    assert last_line(done.stdout)[4] == "1024"
    assert run.parts[:-1] == ("logs", "train", "ppo_cartpole", "seed_0")
    assert run.parts[-1][:3] == "202"
    for left in (
        ".hydra/config.yaml",
        "csv/metrics.csv",
        "curve.png",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
    ):
        assert (folder / run / left).is_file(), left


def env_of_experiment(line: str) -> str:
    named = re.search(r" experiment=(\w+)", line)
    file = "" if named is None else f"experiment/{named[1]}.yaml"
    text = dict(FILES).get(file) or ((CONF_DIR / file).read_text() if file else "")
    return (re.findall(r"override /env: (\w+)", text) or [""])[0]


# Hydra's sweeper requires Optuna 2, which uses deprecated functions of SQLAlchemy.
@pytest.mark.filterwarnings("ignore:Deprecated API features detected")
@pytest.mark.parametrize("line", OTHERS, ids=range(len(OTHERS)))
def test_command_runs_as_it_is_written(line, first):
    need_extra((re.findall(r" (?:env|collector|callbacks)=(\w+)", line) or [env_of_experiment(line)])[0])
    folder, run, _ = first
    before = runs_below(folder)
    resumed = "last.ckpt" in line
    frames = next((number for name, number in FRAMES.items() if f"={name}_" in line), 1024)
    done = run_line(line, folder, 2048 if resumed else frames, run)
    new = runs_below(folder) - before
    if "torchrl-lightning-train" not in line or "--help" in line:
        assert not new
        left = {"evaluate": "logs/evaluate/*/returns.png", "plot": "curves.png"}
        for name, pattern in left.items():
            if f"torchrl-lightning-{name}" in line:
                assert len(list(folder.glob(pattern))) == 1
        return
    assert "~experiment" not in line or "note:" not in done.stderr
    jobs = 3 if "seed=0,1,2" in line else int(re.search(r"n_trials=(\d+)|$", line)[1] or 1)
    assert len(new) == jobs
    for made in new:
        settings = yaml.safe_load((made / ".hydra" / "config.yaml").read_text())
        name, seed = made.parts[-3:-1]
        assert seed == f"seed_{settings['seed']}"
        experiment = (re.findall(r" experiment=(\w+)", line) or ["" if "~experiment" in line else "ppo_cartpole"])[0]
        assert name.startswith(next((start for part, start in NAMES.items() if part in line), experiment))
    if jobs == 3:
        assert {made.parts[-2:] for made in new} == {("seed_0", "0"), ("seed_1", "1"), ("seed_2", "2")}
        learnt = [torch.load(made / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for made in new]
        assert differences(learnt[0], learnt[1])
    if "joblib" not in line:  # joblib's workers print elsewhere
        assert done.stdout.count("mean evaluation return") == jobs
    if "hparams_search" in line:
        (found,) = folder.glob("logs/train/search_*/optimization_results.yaml")
        printed = [float(match[0]) for match in re.findall(LAST_LINE, done.stdout)]
        scores = [trial.score for trial in read_trials([found.parent])]
        assert scores == pytest.approx(sorted(printed, reverse=True), abs=0.05)
        assert set(yaml.safe_load(found.read_text())["best_params"]) == {
            "model.learning_rate",
            "model.clip_epsilon",
            "data.num_epochs",
        }
    if resumed:
        assert last_line(done.stdout)[4] == "2048"


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if fenced(page, "py")])
def test_program_of_another_library_runs_there(name, tmp_path):
    (theirs,) = fenced(PAGES[name], "py")
    for module in sorted(set(re.findall(r"^(?:from|import) ([\w.]+)", theirs, flags=re.MULTILINE))):
        pytest.importorskip(module)
    process = Forked(partial(run_blocks, [few_frames(theirs)]), tmp_path, said=tmp_path / "said")
    assert process.ends() == 0, process.said


@pytest.mark.parametrize("name", PYTHON)
def test_code_of_a_page_prints_what_it_says(name, first):
    folder, run, _ = first
    blocks = [few_frames(text).replace("RUN", str(run)) for text, _ in PYTHON[name]]
    process = Forked(partial(run_blocks, blocks), folder, said=folder / f"{name}-said")
    assert process.ends() == 0, process.said
    for (_, expected), printed in zip(PYTHON[name], process.said.split(END), strict=False):
        last = "".join(printed.splitlines(keepends=True)[-expected.count("\n") :])  # Lightning prints before
        assert not expected or doctest.OutputChecker().check_output(expected, last, doctest.ELLIPSIS), printed


def shown(env: gymnasium.Env | EnvBase) -> object:
    return env.observation_spec if isinstance(env, EnvBase) else env.observation_space


def test_custom_environment_is_the_same_on_the_command_line_and_in_python(first, monkeypatch):
    folder, *_ = first
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    made: dict[str, Any] = {}
    exec(PYTHON["environments"][0][0], made)
    written = [made[name] for name in ("hopper", "acrobot", "pendulum", "treasure")]
    assert made["data"].num_envs == 8
    (lines,) = fenced(PAGES["environments"], "bash")
    for line, recipe in zip(lines.splitlines(), written, strict=True):
        said = call("train", *shlex.split(line)[1:], "--cfg", "job", "--package", "data.env", cwd=folder).stdout
        composed_env = instantiate(yaml.safe_load(said))
        with contextlib.suppress(gymnasium.error.DependencyNotInstalled):
            assert shown(composed_env()) == shown(recipe())
