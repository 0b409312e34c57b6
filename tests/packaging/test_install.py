from __future__ import annotations

import re
import zipfile
from email import message_from_string
from pathlib import Path

from omegaconf import OmegaConf

from kit.processes import PROJECT

FOREIGN_APP = """
import sys
import hydra
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    assert "torch" not in sys.modules
    print(OmegaConf.to_yaml(cfg))

main()
"""


def test_wheel_carries_the_modules_the_hydra_tree_the_plugin_and_the_type_marker(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = {f"torchrl_lightning/conf/{path.relative_to(PROJECT / 'conf')}" for path in PROJECT.glob("conf/**/*.*")}
    assert {Path(name).suffix for name in tree} == {".yaml", ".safetensors"}
    sources = [*PROJECT.glob("plugin/**/*.py"), *PROJECT.glob("plugin/**/*.pyi")]
    modules = {str(path.relative_to(PROJECT / "plugin")) for path in sources}
    assert "hydra_plugins/torchrl_lightning_searchpath/__init__.py" in modules
    assert tree | modules | {"torchrl_lightning/py.typed", "torchrl_lightning/_hydra/schemas.json"} <= names
    # An __init__.py in hydra_plugins would hide the Hydra plugins of all other distributions.
    assert "hydra_plugins/__init__.py" not in names
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"torchrl_lightning", "hydra_plugins"}


def test_description_on_a_package_index_shows_nothing_broken(wheel: Path):
    """Relative addresses do not work on a package index, so pictures are removed and links become plain text."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
    description = str(metadata.get_payload())
    assert "](" in (PROJECT / "README.md").read_text()
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("https://")] == []
    assert "* **Start:** quickstart, concepts, choosing an algorithm and a buffer, experiments" in description
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None  # the project does not have a URL yet
    versions = {value.rsplit(" ", 1)[1] for value in metadata.get_all("Classifier") if "Python :: 3." in value}
    assert versions == {"3.11", "3.12", "3.13"}


def test_package_comes_from_where_it_was_installed_and_costs_no_torch(from_wheel, from_checkout):
    heavy = "[name for name in ('torch', 'tensordict', 'torchrl', 'lightning', 'numba') if name in sys.modules]"
    code = f"import sys, torchrl_lightning, torchrl_lightning.cli.train; print(torchrl_lightning.__file__, {heavy})"
    for installation, root in ((from_wheel, from_wheel.root), (from_checkout, PROJECT / "plugin")):
        where, loaded = installation.python(code).split(maxsplit=1)
        assert Path(where).is_relative_to(root)
        assert loaded == "[]"


def test_train_command_composes_its_config(installation):
    arguments = ("--cfg", "job", "--resolve", "data=vtrace", "seed=3")
    cfg = OmegaConf.create(installation.run("torchrl-lightning-train", *arguments).stdout)
    assert cfg.data.buffer._target_ == "torchrl_lightning.VTraceBuffer"
    assert cfg.data.env == "CartPole-v1"
    assert cfg.seed == 3
    assert list(Path(cfg.paths.demonstrations, "mountaincar").glob("*.safetensors"))


def test_other_commands_answer(installation):
    for name, said in (("evaluate", "ckpt_path"), ("record", "ckpt_path"), ("plot", "usage"), ("export", "usage")):
        assert said in installation.run(f"torchrl-lightning-{name}", "--help").stdout.lower()


def test_foreign_hydra_app_finds_our_data_group(installation, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults:\n  - data: gae\n  - _self_\nepochs: 3\n")
    (tmp_path / "app.py").write_text(FOREIGN_APP)
    cfg = OmegaConf.create(installation.run("python", "app.py", "+data.buffer.gae_lambda=0.9", cwd=tmp_path).stdout)
    assert cfg.epochs == 3
    assert cfg.data.buffer._target_ == "torchrl_lightning.GAEBuffer"
    assert cfg.data.buffer.gae_lambda == 0.9
