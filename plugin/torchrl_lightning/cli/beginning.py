"""Begin a run with what another has learnt: its weights, and the moments that it normalised by. The rest is new.

Of a run of another learner, such as one that cloned behaviour, the weights are those of its actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from torchrl_lightning.cli.checks import UsageError
from torchrl_lightning.cli.resuming import copies
from torchrl_lightning.learn.loading import CONFIG, checkpoint_of, read_checkpoint, statistics_in
from torchrl_lightning.learn.weights import beginning_weights
from torchrl_lightning.trust import target_named


class Beginning(Callback):
    """The weights and moments of another run, which are handed over where a fit begins.

    Args:
        source: What was asked for: the folder of a run, a checkpoint, or a published policy, in a folder or on a hub.

    Raises:
        UsageError: There is none, or it holds no weights of ours.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        try:
            self.path, stored = _read(source)
            self._statistics = statistics_in(stored, self.path)
        except (ValueError, ImportError) as error:
            raise UsageError(f"init_from={source}: {error}.") from error
        self._weights: dict[str, Any] = dict(stored["state_dict"])
        self._anew: list[str] = []  # the networks that do not begin with them
        self._config = stored.get(CONFIG)

    def check(self, data: Any, model: Any) -> None:
        """Refuse, by a UsageError, what does not fit, before anything is trained."""
        try:
            self._check_weights(data, model)
            data.begin_from(self._statistics, trial=True)
        except ValueError as error:
            raise self._misfit(error) from error
        finally:
            data.close()

    @property
    def told(self) -> str:
        """What is printed of it, once it is checked."""
        what, new = ("actor", f"; new: {', '.join(self._anew)}") if self._anew else ("weights", "")
        return f"begins with the {what} and moments of {self.path}{new}"

    def _check_weights(self, data: Any, model: Any) -> None:
        if (make := copies(model, data)) is None:
            return
        try:
            self._weights, self._anew = beginning_weights(make, {"state_dict": self._weights}, own=True)
        except ValueError as error:
            # Asked only now: weights of another learner may fit, such as those of A2C in PPO.
            there, here = self._learner(), type(model)
            if there in (None, here):
                raise
            raise ValueError(
                f"it is of {there.__name__}, this run has {here.__name__}; say the experiment= or model= of that one: "
                f"{error}"
            ) from error

    def _learner(self) -> Any:
        """Return which class of ours has learnt the weights; None where the file does not say."""
        model = self._config.get("model") if isinstance(self._config, Mapping) else None
        name = model.get("_target_") if isinstance(model, Mapping) else None
        return target_named(name) if isinstance(name, str) else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand them over; networks and optimizers are there by now."""
        try:
            others = pl_module.state_dict() if self._anew else {}
            pl_module.load_state_dict({**others, **self._weights})
        except RuntimeError as error:  # of a module of the user's own, which could not be asked before
            raise self._misfit(error) from error
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.begin_from(self._statistics)
        self._weights = {}

    def _misfit(self, error: Exception) -> UsageError:
        return UsageError(f"init_from={self.source} does not fit this run: {' '.join(str(error).split())}")


def _read(source: str) -> tuple[str | Path, dict[str, Any]]:
    """Return where something to begin with lies, and what it holds."""
    from torchrl_lightning.learn.pretrained import is_pretrained, read_pretrained

    if is_pretrained(source):
        return source, read_pretrained(source)
    path = checkpoint_of(source)
    if not path.is_file():
        raise ValueError("it is neither the folder of a run, nor a checkpoint, nor a published policy")
    return path, read_checkpoint(path)


def beginning_of(cfg: DictConfig, differ: Mapping[str, tuple[Any, Any]]) -> Beginning | None:
    """Return what a run begins with, if it begins with something and resumes nothing.

    Args:
        cfg: The config of the run.
        differ: In what it differs from that of the checkpoint that it resumes.

    Raises:
        UsageError: Its settings contradict each other, or it cannot be read.
    """
    resumes = cfg.ckpt_path is not None
    if resumes and differ.get("init_from", (None, None))[1] is not None:
        raise UsageError(
            f"init_from={cfg.init_from} has no effect on a run that is resumed; leave it out, or leave out ckpt_path."
        )
    if cfg.freeze_statistics and not resumes and cfg.init_from is None:
        raise UsageError(
            "freeze_statistics=true keeps the moments that a run begins with; say with which: init_from=RUN."
        )
    if cfg.freeze_statistics and not (cfg.data.get("normalize_observation") or cfg.data.get("normalize_reward")):
        raise UsageError("freeze_statistics=true keeps moments, but this run normalises nothing; leave it out.")
    return None if resumes or cfg.init_from is None else Beginning(str(cfg.init_from))
