"""Start a run with the weights and normalisation moments of another run. No other state is loaded.

If the other run has a different learner, such as behaviour cloning, only the weights of its actor are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from torchrl_lightning._core.trust import resolve_target
from torchrl_lightning.cli.config.resume import module_factory
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.deploy.loading import CONFIG, checkpoint_of, extract_statistics, read_checkpoint
from torchrl_lightning.deploy.weights import initial_weights


class InitFrom(Callback):
    """Load the weights and moments of another run at the start of a fit.

    Args:
        source: A run folder, a checkpoint, or a published policy in a folder or on a hub.

    Raises:
        UsageError: The source does not exist, or does not contain weights of this package.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        try:
            self.path, stored = _read_source(source)
            self._statistics = extract_statistics(stored, self.path)
        except (ValueError, ImportError) as error:
            raise UsageError(f"init_from={source}: {error}.") from error
        self._weights: dict[str, Any] = dict(stored["state_dict"])
        self._new_networks: list[str] = []  # networks that keep their initial weights
        self._config = stored.get(CONFIG)

    def check(self, data: Any, model: Any) -> None:
        """Validate the source's weights and moments before training; raise UsageError if they do not fit this run."""
        try:
            self._check_weights(data, model)
            data.load_normalization(self._statistics, trial=True)
        except ValueError as error:
            raise self._usage_error(error) from error
        finally:
            data.close()

    @property
    def summary(self) -> str:
        """The line to print after :meth:`check`."""
        if self._new_networks:
            return f"starts with the actor and moments of {self.path}; new: {', '.join(self._new_networks)}"
        return f"starts with the weights and moments of {self.path}"

    def _check_weights(self, data: Any, model: Any) -> None:
        if (build_copy := module_factory(model, data)) is None:
            return
        try:
            self._weights, self._new_networks = initial_weights(build_copy, {"state_dict": self._weights}, own=True)
        except ValueError as error:
            # Compare the learners only after an error, because the weights of another learner may fit (A2C and PPO).
            source_class, own_class = self._learner(), type(model)
            if source_class in (None, own_class):
                raise
            raise ValueError(
                f"it is of {source_class.__name__}, this run has {own_class.__name__}; select its experiment= or "
                f"model=: {error}"
            ) from error

    def _learner(self) -> Any:
        """Return the learner class of this package that trained the weights, or None if the file does not name it."""
        model = self._config.get("model") if isinstance(self._config, Mapping) else None
        name = model.get("_target_") if isinstance(model, Mapping) else None
        return resolve_target(name) if isinstance(name, str) else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load weights and moments. At this point, networks and optimizers exist."""
        try:
            initial_weights = pl_module.state_dict() if self._new_networks else {}
            pl_module.load_state_dict({**initial_weights, **self._weights})
        except RuntimeError as error:  # check() could not test a user's own module
            raise self._usage_error(error) from error
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.load_normalization(self._statistics)
        self._weights = {}

    def _usage_error(self, error: Exception) -> UsageError:
        return UsageError(f"init_from={self.source} does not fit this run: {' '.join(str(error).split())}")


def _read_source(source: str) -> tuple[str | Path, dict[str, Any]]:
    """Return the location of a source and its content."""
    from torchrl_lightning.deploy.hub import is_pretrained, read_pretrained

    if is_pretrained(source):
        return source, read_pretrained(source)
    path = checkpoint_of(source)
    if not path.is_file():
        raise ValueError("it must be a run folder, a checkpoint or a published policy")
    return path, read_checkpoint(path)


def load_init_from(cfg: DictConfig, changed_settings: Mapping[str, tuple[Any, Any]]) -> InitFrom | None:
    """Return the ``init_from`` source of a run, or None if it is not set or the run resumes a checkpoint.

    Args:
        cfg: The config of the run.
        changed_settings: The settings that differ from the config of the resumed checkpoint.

    Raises:
        UsageError: The settings contradict each other, or the source cannot be read.
    """
    resumes = cfg.ckpt_path is not None
    if resumes and changed_settings.get("init_from", (None, None))[1] is not None:
        raise UsageError(f"init_from={cfg.init_from} has no effect on a resumed run; remove it, or remove ckpt_path.")
    if cfg.freeze_statistics and not resumes and cfg.init_from is None:
        raise UsageError(
            "freeze_statistics=true freezes the moments at the start of a run; set their source with init_from=RUN."
        )
    if cfg.freeze_statistics and not (cfg.data.get("normalize_observation") or cfg.data.get("normalize_reward")):
        raise UsageError("freeze_statistics=true freezes moments, but this run does not normalise; remove it.")
    return None if resumes or cfg.init_from is None else InitFrom(str(cfg.init_from))
