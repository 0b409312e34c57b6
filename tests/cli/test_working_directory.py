"""A command in an untrusted folder imports only the modules that the user names from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import environment

RUN = "import sys; sys.argv[0] = 'x'; from torchrl_lightning.cli.{0} import main; main()"
PLANNER = """
import matplotlib.figure
import sys
print("last:", sys.path[-1])

def act(observation):
    return int(observation[2] > 0)
"""


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """Return a folder of plugins, installed names and entry points that write a canary when imported."""
    hostile = "import os; open(os.path.join({!r}, 'canary_{}'), 'w')"

    def write(name: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(hostile.format(str(tmp_path), name.replace("/", ".")))

    for name in (
        *("hydra_plugins/__init__.py", "hydra_plugins/evil/__init__.py", "mpl_toolkits/__init__.py"),
        *("tqdm.py", "torchrl.py", "safetensors/__init__.py", "omegaconf.py", "evil_envs.py", "google/__init__.py"),
    ):
        write(name)
    info = tmp_path / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\nevil = evil_envs:{name}\n\n"
            for group, name in {
                "gymnasium.envs": "register",
                "torch.backends": "register",
                "numba_extensions": "init",
                "lightning.pytorch.callbacks_factory": "make",
            }.items()
        )
    )
    (tmp_path / "planner.py").write_text(PLANNER)
    return tmp_path


def run(folder: Path, name: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", RUN.format(name), *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_working_directory_comes_after_installed_modules(sent):
    settings = ("policy=planner:act", "env=cartpole", "episodes=1", "min_return=0", "directory=demos")
    # Python puts the working directory first on the import path, as for `python -m`.
    done = run(sent, "record", *settings, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert f"last: {sent}" in done.stdout
    assert len(list(sent.glob("demos/*.safetensors"))) == 1
    assert [path.name for path in sent.glob("canary*")] == []


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("plot", ["."], "no metrics.csv below"),
        ("inspect", ["."], "contains no checkpoint"),
        ("export", ["."], "has neither checkpoints/best.ckpt"),
    ],
)
def test_commands_without_hydra_import_nothing_from_the_working_directory(sent, name, arguments, told):
    done = run(sent, name, *arguments, options=("-P",))  # like a console script: without the working directory
    assert done.returncode != 0
    assert told in done.stderr
    assert [path.name for path in sent.glob("canary*")] == []


SETTINGS_OF_NUMBA = """
import sys
from torchrl_lightning.cli.working_directory import append_working_directory
append_working_directory()
import numba.core.config as config
print(repr(config.CACHE_DIR), repr(config.CACHE_LOCATOR_CLASSES), "evil" in sys.modules)
"""


def test_numba_runs_no_code_named_in_the_working_directory(tmp_path):
    # numba unpickles the files in its cache folder and imports the configured locator classes.
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: here\ncache_locator_classes: evil.Locator\n")
    (tmp_path / "evil.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS_OF_NUMBA],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout == "'' '' False\n"
