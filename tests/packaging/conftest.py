"""Build two environments with the package, from a wheel and editable. This interpreter provides the other packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.processes import PROJECT

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Installation:
    """An environment into which only torchrl-lightning is installed, and a folder outside the checkout."""

    root: Path
    elsewhere: Path

    @property
    def bin(self) -> Path:
        return self.root / ("Scripts" if os.name == "nt" else "bin")

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return run(self.bin / program, *arguments, cwd=cwd or self.elsewhere)

    def python(self, code: str) -> str:
        return self.run("python", "-c", code).stdout.strip()


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # With PYTHONPATH, the environments would import the package from the checkout.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done


def make_environment(root: Path) -> Installation:
    """Create a venv with the running interpreter's packages, but without their .pth files and editable installs."""
    venv.create(root / "venv", with_pip=False, symlinks=os.name != "nt")
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    installation = Installation(root / "venv", elsewhere)
    own = Path(installation.python("import sysconfig; print(sysconfig.get_path('purelib'))"))
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "packages_of_the_test_run.pth").write_text("\n".join(packages) + "\n")
    return installation


def pip_install(installation: Installation, *arguments: str | Path) -> None:
    # --ignore-installed: pip sees the package of the outer environment, but must not uninstall it.
    options = ("--quiet", "--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation")
    python = ("--python", installation.bin / "python")
    run(*PIP, *python, "install", *options, *arguments, cwd=installation.elsewhere)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, PROJECT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    installation = make_environment(tmp_path_factory.mktemp("from_wheel"))
    pip_install(installation, wheel)
    return installation


@pytest.fixture(scope="session")
def from_checkout(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    installation = make_environment(tmp_path_factory.mktemp("from_checkout"))
    pip_install(installation, "--editable", PROJECT)
    return installation


@pytest.fixture(params=["wheel", "editable"])
def installation(request: pytest.FixtureRequest) -> Installation:
    return request.getfixturevalue({"wheel": "from_wheel", "editable": "from_checkout"}[request.param])
