"""Editors, type checkers and ``help()`` find the public names, although they are imported on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

import torchrl_lightning
from kit.processes import environment

PLUGIN = Path(torchrl_lightning.__file__).resolve().parents[1]

# Mypy skips third-party packages: our own files are enough for these checks, which then take a few seconds.
MYPY = """
[mypy]
mypy_path = {plugin}
explicit_package_bases = true
ignore_missing_imports = true
{skipped}
"""
OTHERS = ("torch", "torchrl", "tensordict", "lightning", "gymnasium", "numpy", "numba", "omegaconf", "hydra")

# the expected part of mypy's output for each snippet
SNIPPETS = {
    "from torchrl_lightning import GAEBufer": 'has no attribute "GAEBufer"',
    "from torchrl_lightning.collectors import GymnasiumColector": 'has no attribute "GymnasiumColector"',
    "import torchrl_lightning\ntorchrl_lightning.GAEBufer": 'Module has no attribute "GAEBufer"',
    "from torchrl_lightning import GAEBuffer\nreveal_type(GAEBuffer(8))": '"torchrl_lightning.rollout.gae.GAEBuffer"',
    "from torchrl_lightning import GymnasiumCollector\nreveal_type(GymnasiumCollector)": (
        "-> torchrl_lightning.collectors.gymnasium.GymnasiumCollector"
    ),
    "from torchrl_lightning import discounted_scan\nreveal_type(discounted_scan)": "reverse: bool =",
    "import torchrl_lightning\nreveal_type(torchrl_lightning.__version__)": '"str"',
    "from torchrl_lightning import *\nreveal_type(RingStorage(8))": (
        '"torchrl_lightning.replay.ring_storage.RingStorage"'
    ),
}


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run mypy once over all snippets; return its messages for each."""
    folder = tmp_path_factory.mktemp("snippets")
    skipped = "\n".join(f"[mypy-{name}.*,{name}]\nfollow_imports = skip" for name in OTHERS)
    (folder / "mypy.ini").write_text(MYPY.format(plugin=PLUGIN, skipped=skipped))
    for number, snippet in enumerate(SNIPPETS):
        (folder / f"s{number}.py").write_text(snippet + "\n")
    # Mypy's cache is stored in pytest's cache, so that only the first run of a checkout reads the whole package.
    cache = request.config.cache.mkdir("mypy")
    out, err, _ = api.run([f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={cache}", str(folder)])
    assert not err, err
    lines = out.splitlines()
    return {each: "\n".join(line for line in lines if f"s{n}.py:" in line) for n, each in enumerate(SNIPPETS)}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_name_has_its_type_and_a_misspelt_one_is_an_error(said, snippet):
    assert SNIPPETS[snippet] in said[snippet]


LISTED = """
import importlib, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    assert {*package.__all__} <= {*dir(package)}, name
print(sorted({"torch", "lightning", "tensordict", "gymnasium", "numba", "numpy", "hydra"} & {*sys.modules}))
"""


def test_names_are_listed_without_importing_a_library():
    folders = [f"torchrl_lightning.{stub.parent.name}" for stub in PLUGIN.glob("torchrl_lightning/*/__init__.pyi")]
    command = [sys.executable, "-c", LISTED, "torchrl_lightning", *folders]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
