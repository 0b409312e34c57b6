"""What editors, type checkers and ``help()`` see of the public names."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

import torchrl_lightning

PLUGIN = Path(torchrl_lightning.__file__).resolve().parents[1]

# Other people's packages are left unread: what is asked here is answered by our own files, in a few seconds.
MYPY = """
[mypy]
mypy_path = {plugin}
explicit_package_bases = true
ignore_missing_imports = true
{skipped}
"""
OTHERS = ("torch", "torchrl", "tensordict", "lightning", "gymnasium", "numpy", "numba", "omegaconf", "hydra")

SNIPPETS = {
    "misspelt": "from torchrl_lightning import GAEBufer",
    "misspelt_in_a_room": "from torchrl_lightning.collectors import GymnasiumColector",
    "misspelt_attribute": "import torchrl_lightning\ntorchrl_lightning.GAEBufer",
    "buffer": "from torchrl_lightning import GAEBuffer\nreveal_type(GAEBuffer(8))",
    "collector": "from torchrl_lightning import GymnasiumCollector\nreveal_type(GymnasiumCollector)",
    "function": "from torchrl_lightning import discounted_scan\nreveal_type(discounted_scan)",
    "version": "import torchrl_lightning\nreveal_type(torchrl_lightning.__version__)",
    "star": "from torchrl_lightning import *\nreveal_type(RingStorage(8))",
}


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run mypy once over all snippets; give what it says about each."""
    folder = tmp_path_factory.mktemp("snippets")
    skipped = "\n".join(f"[mypy-{name}.*,{name}]\nfollow_imports = skip" for name in OTHERS)
    (folder / "mypy.ini").write_text(MYPY.format(plugin=PLUGIN, skipped=skipped))
    for name, snippet in SNIPPETS.items():
        (folder / f"{name}.py").write_text(snippet + "\n")
    # Pytest's cache keeps mypy's, so that only the first run of a checkout reads the whole package.
    cache = request.config.cache.mkdir("mypy")
    out, err, _ = api.run([f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={cache}", str(folder)])
    assert not err, err
    return {name: "\n".join(line for line in out.splitlines() if f"{name}.py:" in line) for name in SNIPPETS}


@pytest.mark.parametrize(("name", "misspelt"), [("misspelt", "GAEBufer"), ("misspelt_in_a_room", "GymnasiumColector")])
def test_a_misspelt_import_is_an_error(said, name, misspelt):
    assert f'has no attribute "{misspelt}"' in said[name]


def test_a_misspelt_attribute_is_an_error(said):
    assert 'Module has no attribute "GAEBufer"' in said["misspelt_attribute"]


@pytest.mark.parametrize(
    ("name", "revealed"),
    [
        ("buffer", '"torchrl_lightning.rollout.gae.GAEBuffer"'),
        ("collector", "-> torchrl_lightning.collectors.gymnasium.GymnasiumCollector"),
        ("function", "reverse: bool ="),
        ("version", '"str"'),
        ("star", '"torchrl_lightning.replay.storage.RingStorage"'),
    ],
)
def test_a_name_has_its_type(said, name, revealed):
    assert revealed in said[name]
