"""Build the parts of a config, report a wrong setting in one line, and save the config in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf

from torchrl_lightning._core.errors import IncompatibleError, check_compatible
from torchrl_lightning._core.launchers import check_launcher, restarts_script
from torchrl_lightning._core.run_metadata import COMMAND
from torchrl_lightning._core.suggestions import did_you_mean
from torchrl_lightning._hydra.compat import instantiate
from torchrl_lightning.agents.base import AgentModule
from torchrl_lightning.agents.dry_run import NetworkFault, network_errors
from torchrl_lightning.cli.config.resume import module_factory, needs_trust, plain
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.deploy.loading import CONFIG
from torchrl_lightning.environments.install_hint import install_hint

# Constructors raise these errors for invalid arguments. Any other error is a bug and keeps its traceback.
SETTING_ERRORS = (ValueError, TypeError, KeyError, ImportError)
# Remedies to append to messages of other libraries.
_REMEDIES = {
    "No supported gpu backend found": " Set trainer=default to train on the CPU, or install a build of PyTorch that "
    "supports this machine's GPU.",
    "'total_seconds'": ". Set max_time=DD:HH:MM:SS, in quotes.",
}


def build_part(cfg: DictConfig, key: str, **arguments: Any) -> Any:
    """Instantiate the node ``key`` of a config with additional arguments; raise UsageError for an invalid setting."""
    from hydra.errors import InstantiationException
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        return instantiate(OmegaConf.select(cfg, key), **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        is_known = any(part in str(cause) for part in _REMEDIES)
        if not (is_known or isinstance(cause, (*SETTING_ERRORS, MisconfigurationException))):
            raise
        where = re.search(r"full_key: (\S+)", str(error))
        raise UsageError(describe(cfg, key if where is None else where[1], cause or error)) from error


def build_parts(cfg: DictConfig, group: str) -> list[Any]:
    """Instantiate the parts of a group, such as callbacks; leave out parts that are null.

    Raises:
        UsageError: A part is not a class with its settings, or a setting is invalid.
    """
    parts = OmegaConf.select(cfg, group)
    if parts is not None and not isinstance(parts, DictConfig):
        raise UsageError(f"{group} must be parts by name, got {parts!r}. Select an option with {group}=NAME.")
    configured = [] if parts is None else [(f"{group}.{name!s}", part) for name, part in parts.items()]
    for key, part in configured:
        if part is not None and not (isinstance(part, DictConfig) and "_target_" in part):
            raise UsageError(
                f"{key} must be a class (_target_) with its settings, or null to leave it out, got {part}. "
                f"Set {key}=null."
            )
    return [build_part(cfg, key) for key, part in configured if part is not None]


def build_trainer(cfg: DictConfig, callbacks: Sequence[Callback]) -> Trainer:
    """Instantiate the trainer with its loggers.

    ``trainer.enable_progress_bar=false`` leaves out the progress bars among the callbacks. If there are none, as with
    ``callbacks.progress_bar=null``, Lightning's own bar is shown only if this setting is true.
    """
    is_shown = cfg.trainer.get("enable_progress_bar")
    bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    if is_shown is False:
        callbacks = [callback for callback in callbacks if callback not in bars]
    # A class of the user may not have this argument.
    hides = not bars and "enable_progress_bar" in cfg.trainer and is_shown is None
    hidden = {"enable_progress_bar": False} if hides else {}
    trainer: Trainer = build_part(
        cfg, "trainer", callbacks=list(callbacks), logger=build_parts(cfg, "logger"), **hidden
    )
    return trainer


def check_parts(
    cfg: DictConfig,
    data: Any,
    model: Any,
    compare: Callable[[], None] | None = None,
    trainer: Trainer | None = None,
) -> None:
    """Build and release environment, buffer and networks as a test; raise UsageError for an incompatible setting.

    ``compare`` compares the networks with a checkpoint before the networks are allocated. If a trainer is given, the
    test also includes the trainer's settings, its number of ranks, and a forward and a backward pass.
    """
    setting = "trainer"
    # The test must not advance the random generator of the run.
    with torch.random.fork_rng(devices=[]):
        try:
            if trainer is not None:
                check_launcher(trainer)
                check_sweep(trainer)
                data.check_trainer(trainer, model)
                data.trainer = trainer  # the number of ranks decides which settings fit
            setting = "data"
            for argument in data.check_fit(model):
                setting = f"data.{argument}"
            setting = "model"
            if compare is not None:
                compare()
            if (build_model := module_factory(model, data)) is not None:
                with network_errors(model, data.specs):
                    trial_model = build_model()
                # The CPU may not support a network for a GPU. If the run uses a GPU, the trainer tests the network.
                on_cpu = trainer is not None and trainer.strategy.root_device.type == "cpu"
                if isinstance(trial_model, AgentModule) and on_cpu:
                    trial_model.dry_run_networks(data.specs, trainer)
                    model.passed_dry_run = trial_model.passed_dry_run
            check_compatible(model, data)
        except (UsageError, NetworkFault):
            raise
        except SETTING_ERRORS as error:
            raise UsageError(describe(cfg, setting, error)) from error
        finally:
            data.close()


def check_sweep(trainer: Trainer) -> None:
    """Raise IncompatibleError if a run of a sweep would start the command again for its other ranks."""
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if is_sweep and restarts_script(trainer):
        raise IncompatibleError(
            f"devices must be 1 in a sweep (--multirun), got {trainer.num_devices}: each of the other ranks would "
            "start the sweep again. Set trainer.devices=1 and trainer.strategy=auto, or start the runs one by one "
            "without --multirun."
        )


@contextmanager
def trainer_errors(cfg: DictConfig) -> Iterator[None]:
    """Convert errors of a trainer whose settings or callbacks do not fit the run to a UsageError."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (IncompatibleError, MisconfigurationException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("Early stopping conditioned on"):
            raise
        raise UsageError(describe(cfg, "trainer", error)) from error


@contextmanager
def setting_errors(cfg: DictConfig, key: str) -> Iterator[None]:
    """Convert errors to a UsageError that names the wrong setting, at or below a key of the config."""
    try:
        yield
    except SETTING_ERRORS as error:
        raise UsageError(describe(cfg, key, error)) from error


def describe(cfg: DictConfig, key: str, error: BaseException) -> str:
    """Return an error's message. If the message starts with a setting, replace the setting by its full name."""
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    text += next((remedy for part, remedy in _REMEDIES.items() if part in text), "")
    if isinstance(error, ImportError) and "torchrl-lightning[" not in text:
        text += install_hint(error)
    misspelt = re.search(r"that '(\w+)' is importable from module '(torchrl_lightning[\w.]*)'", text)
    if misspelt is not None:
        text = f"{misspelt[2]} has no {misspelt[1]}{did_you_mean(misspelt[1], dir(import_module(misspelt[2])))}"
    name_match = re.match(r"(\w+)(\[\d+\])?", text)
    # The wrong setting may be a sibling of ``key``, for example in an error of the environment.
    for holder in filter(None, (key, key.rpartition(".")[0])):
        node = OmegaConf.select(cfg, holder)
        if isinstance(node, DictConfig) and name_match is not None and name_match[1] in node:
            setting = f"{name_match[1]}={node[name_match[1]]}"
            # A message about an entry of a list already includes the value.
            return f"{holder}.{text}" if name_match[2] or text.startswith(setting) else f"{holder}.{setting}: {text}"
    return text if isinstance(error, IncompatibleError) else f"{key}: {text}"


class SaveConfig(Callback):
    """Save the config of a run in each checkpoint, so that the checkpoint is usable outside its run folder.

    Messages of a stopped run append ``resume_settings`` to the command that resumes the run.

    Args:
        cfg: The whole config.
        choices: The selected option of each config group.
        overrides: The overrides of the command line.
    """

    def __init__(
        self, cfg: DictConfig, choices: Mapping[str, str | None] | None = None, overrides: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.config, self.command = plain(cfg), {"choices": dict(choices or {}), "overrides": list(overrides)}
        self.resume_settings = [] if cfg.get("trusted") or not needs_trust(self.config) else ["trusted=true"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add config and command."""
        checkpoint[CONFIG], checkpoint[COMMAND] = self.config, self.command
