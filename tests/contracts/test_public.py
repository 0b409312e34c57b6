"""Every public name is exported and documented, and shows its arguments: to ``help``, editors and LightningCLI."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import warnings
from operator import attrgetter
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI

import torchrl_lightning
from kit.processes import environment
from torchrl_lightning import (
    BufferBase,
    DQNModule,
    ExperienceBuffer,
    GAEBuffer,
    OnPolicyDataModule,
    PPOModule,
    RecurrentReplayBuffer,
    ReplayDataModule,
    UniformSampler,
    VTraceBuffer,
)

PUBLIC = sorted(set(torchrl_lightning.__all__) - {"__version__"})
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(torchrl_lightning, name))]


def arguments(function: object) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}


ROOT = Path(torchrl_lightning.__file__).parent
FOLDERS = [f"torchrl_lightning.{stub.parent.name}" for stub in sorted(ROOT.glob("*/__init__.pyi"))]


@pytest.mark.parametrize("package", ["torchrl_lightning", *FOLDERS])
def test_completion_knows_every_name(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_every_public_name_is_exported_by_its_folder() -> None:
    for name in PUBLIC:
        part = getattr(torchrl_lightning, name)
        package, folder, *inside = part.__module__.split(".")
        if inside and folder != "_core":
            assert getattr(importlib.import_module(f"{package}.{folder}"), name) is part


def test_functions_named_like_their_modules_are_exported_whatever_is_imported_first() -> None:
    code = "import torchrl_lightning.estimators.gae as module, torchrl_lightning as package; print(module, package.gae)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True, text=True)
    assert done.stdout.count("<function gae") == 2


@pytest.mark.parametrize("name", PUBLIC)
def test_it_says_what_it_is(name: str) -> None:
    part = getattr(torchrl_lightning, name)
    if not (inspect.isclass(part) or inspect.isfunction(part)):
        return
    assert part.__module__.startswith("torchrl_lightning.")
    assert re.match(r"r?[A-Z`].*", part.__doc__ or "")


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_documented(name: str) -> None:
    part = getattr(torchrl_lightning, name)
    text = "\n".join(base.__doc__ or "" for base in part.__mro__)
    # "Further arguments as in :class:`...`"
    others = re.findall(r":class:`(?:\w+\.)*(\w+)`", text)
    text += "\n".join(getattr(torchrl_lightning, each, object).__doc__ or "" for each in others)
    assert {each for each in arguments(part) if not re.search(rf"\b{each}\b", text)} == set()


@pytest.mark.parametrize("name", CLASSES)
def test_constructor_shows_every_argument_with_its_default(name):
    component = getattr(torchrl_lightning, name)
    shown = arguments(component)
    hidden = [each for each in shown.values() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert not hidden
    assert shown == arguments(component.__init__)


# A description that we hand out, made of TorchRL's specs; nobody configures one.
@pytest.mark.parametrize("name", sorted({*CLASSES} - {"EnvironmentSpecs"}))
def test_constructor_is_read_by_lightnings_cli(name):
    component = getattr(torchrl_lightning, name)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(component, "part", fail_untyped=False)
    read = {action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("part.")}
    assert read == set(arguments(component))


def test_subclass_shows_its_own_constructor():
    class Sampler(UniformSampler):
        def __init__(self, temperature: float = 1.0) -> None:
            super().__init__()

    class Buffer(BufferBase):
        pass

    assert list(inspect.signature(Sampler).parameters) == ["temperature"]
    assert inspect.signature(Buffer) == inspect.signature(RecurrentReplayBuffer) == inspect.signature(BufferBase)


def test_help_shows_the_arguments():
    text = pydoc.render_doc(GAEBuffer, renderer=pydoc.plaintext)
    # Python 3.13 gives each argument a line of its own.
    shown = " ".join(text.partition(" |  ")[2].replace(" |", " ").split()).replace("( ", "(")
    assert shown.startswith("GAEBuffer(size: 'PositiveInt', device:")
    assert "gae_lambda: 'Fraction' = 0.95" in shown


# A model, its data, what is chosen on the command line, and what the buffer is then.
CHOSEN = {
    "the default": (
        (PPOModule, OnPolicyDataModule, "--data.frames_per_batch=16"),
        (GAEBuffer, {"size": 8, "gae_lambda": 0.95}),
    ),
    "another with its arguments": (
        (PPOModule, OnPolicyDataModule, "--data.buffer=torchrl_lightning.VTraceBuffer", "--data.buffer.gamma=0.5"),
        (VTraceBuffer, {"gamma": 0.5}),
    ),
    "one of replay with its parts": (
        (
            DQNModule,
            ReplayDataModule,
            "--data.buffer=torchrl_lightning.ExperienceBuffer",
            "--data.buffer.storage=torchrl_lightning.RingStorage",
            "--data.buffer.storage.max_size=12",
            "--data.buffer.sampler=torchrl_lightning.UniformSampler",
        ),
        (ExperienceBuffer, {"storage.max_size": 12, "writer.num_envs": 2, "sampler.__class__": UniformSampler}),
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_lightnings_cli_builds_a_buffer(name):
    (model, data, *chosen), (kind, shown) = CHOSEN[name]
    fixed = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--data.env=CartPole-v1", "--data.num_envs=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about jsonargparse
        made = LightningCLI(model, data, run=False, save_config_callback=None, args=[*fixed, *chosen]).datamodule
    made.setup("fit")
    try:
        assert made.num_envs == 2
        assert type(made.buffer) is kind
        assert {attribute: attrgetter(attribute)(made.buffer) for attribute in shown} == shown
    finally:
        made.close()
