"""Every public constructor shows its arguments: to ``inspect``, to ``help``, to editors and to LightningCLI."""

from __future__ import annotations

import inspect
import pydoc
import warnings

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI

import torchrl_lightning
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

CLASSES = [name for name in torchrl_lightning.__all__ if inspect.isclass(getattr(torchrl_lightning, name))]


def arguments(function: object) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_constructor_shows_every_argument_with_its_default(name):
    component = getattr(torchrl_lightning, name)
    shown = arguments(component)
    hidden = [each for each in shown.values() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert not hidden
    assert shown == arguments(component.__init__)


# A description that we hand out, made of TorchRL's specs; nobody configures one.
@pytest.mark.parametrize("name", sorted({*CLASSES} - {"EnvironmentSpecs"}))
def test_a_constructor_is_read_by_lightnings_cli(name):
    component = getattr(torchrl_lightning, name)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(component, "part", fail_untyped=False)
    read = {action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("part.")}
    assert read == set(arguments(component))


def test_a_subclass_shows_its_own_constructor():
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
    assert shown.startswith("GAEBuffer(size: 'int', device:")
    assert "gae_lambda: 'float' = 0.95" in shown


def run_cli(model: type, data: type, *args: str) -> LightningCLI:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about jsonargparse
        return LightningCLI(
            model,
            data,
            run=False,
            save_config_callback=None,
            args=["--trainer.logger=false", "--trainer.accelerator=cpu", "--data.env=CartPole-v1", *args],
        )


def test_lightnings_cli_builds_the_default_buffer():
    data = run_cli(PPOModule, OnPolicyDataModule, "--data.num_envs=2", "--data.frames_per_batch=16").datamodule
    data.setup("fit")
    try:
        assert type(data.buffer) is GAEBuffer
        assert (data.num_envs, data.buffer.size, data.buffer.gae_lambda) == (2, 8, 0.95)
    finally:
        data.close()


def test_lightnings_cli_builds_another_buffer_with_its_arguments():
    chosen = ("--data.buffer=torchrl_lightning.VTraceBuffer", "--data.buffer.gamma=0.5")
    data = run_cli(PPOModule, OnPolicyDataModule, *chosen).datamodule
    data.setup("fit")
    try:
        assert type(data.buffer) is VTraceBuffer
        assert data.buffer.gamma == 0.5
    finally:
        data.close()


def test_lightnings_cli_builds_a_replay_buffer_with_its_parts():
    chosen = (
        "--data.buffer=torchrl_lightning.ExperienceBuffer",
        "--data.buffer.storage=torchrl_lightning.RingStorage",
        "--data.buffer.storage.max_size=12",
        "--data.buffer.sampler=torchrl_lightning.UniformSampler",
        "--data.num_envs=2",
    )
    data = run_cli(DQNModule, ReplayDataModule, *chosen).datamodule
    data.setup("fit")
    try:
        assert type(data.buffer) is ExperienceBuffer
        assert (data.buffer.storage.max_size, data.buffer.writer.num_envs) == (12, 2)
        assert type(data.buffer.sampler) is UniformSampler
    finally:
        data.close()
