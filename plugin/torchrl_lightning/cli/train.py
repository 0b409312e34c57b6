"""``torchrl-lightning-train``: train an agent from a config, evaluate the agent, and plot the learning curve."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.import_stubs import import_libraries
from torchrl_lightning._core.processes import handled_signal
from torchrl_lightning._core.run_metadata import SCORE
from torchrl_lightning._core.run_names import recorded_command
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.cli.command import cleanup, limit_threads, run_command, silence_libraries

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from tensordict import TensorDict


def main() -> None:
    """Run the command; return the mean evaluation return, which a sweeper maximises."""
    run_command("train", train, resumes=True)


@cleanup
def train(cfg: DictConfig) -> float:
    """Check the config, train, evaluate and report, in this order."""
    from hydra.core.hydra_config import HydraConfig

    from torchrl_lightning._core.first_rank import become_first_rank, end_with_first_rank
    from torchrl_lightning.cli.config.validate import check_command, check_config, is_trusted, read_resumed_checkpoint
    from torchrl_lightning.cli.error_messages import run_errors
    from torchrl_lightning.cli.run_folder.folder import RunRecord, is_follower, locked

    if HydraConfig.initialized() and "_ddp_process_" in HydraConfig.get().job.name:  # the name that Lightning gives
        end_with_first_rank(grace=30.0)
    else:
        become_first_rank()
    check_command(cfg)
    check_config(cfg)
    is_trusted(cfg)
    record = RunRecord(cfg)
    if HydraConfig.initialized() and not is_follower():
        cleanup.enter_context(locked(folder := Path(cfg.paths.output_dir)))
        cleanup.enter_context(run_errors(folder.absolute(), cfg.ckpt_path))
        record.write(folder, replace=False)  # do not replace an earlier run's record before training begins
    # Import slow libraries only after the checks above, so that config mistakes are reported immediately.
    import_libraries()
    import lightning as L
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from torchrl_lightning._core.rank_metrics import gather_episodes
    from torchrl_lightning._core.rank_stop import rank_stop
    from torchrl_lightning._core.slurm import requeued_on_signal
    from torchrl_lightning.cli.config.changed_settings import ChangedSettings
    from torchrl_lightning.cli.config.init_from import load_init_from
    from torchrl_lightning.cli.config.instantiate import (
        SaveConfig,
        build_part,
        build_parts,
        build_trainer,
        check_parts,
        trainer_errors,
    )
    from torchrl_lightning.cli.config.resume import check_checkpoint, config_diff
    from torchrl_lightning.cli.rank_failures import reported_rank_failures
    from torchrl_lightning.deploy.weights import bounded_tensors

    silence_libraries()
    limit_threads(cfg.torch_threads)
    stored = None if cfg.ckpt_path is None else read_resumed_checkpoint(cfg)
    L.seed_everything(cfg.seed, verbose=False)

    data = build_part(cfg, "data", **({"freeze_statistics": True} if cfg.freeze_statistics else {}))
    with nullcontext() if stored is None else bounded_tensors(stored.get("state_dict", {})):
        model = build_part(cfg, "model")
    save_config = SaveConfig(cfg, *(recorded_command(HydraConfig.get()) if HydraConfig.initialized() else ()))
    callbacks = [*build_parts(cfg, "callbacks"), save_config]
    changed_settings = {} if stored is None else config_diff(stored, cfg.ckpt_path, save_config.config)
    if changed_settings:
        callbacks.append(ChangedSettings(changed_settings))
    init_from = load_init_from(cfg, changed_settings)
    if init_from is not None:
        callbacks.append(init_from)
    trainer = build_trainer(cfg, callbacks)
    # Compare the checkpoint before Lightning loads it. Lightning loads weights before the data's state, so that its
    # error for a changed environment would contain only tensor shapes.
    compare = None
    if stored is not None:
        path = Path(cfg.ckpt_path)
        compare = partial(check_checkpoint, path, stored, data, model, trainer.world_size, cfg, resumes=True)
    check_parts(cfg, data, model, compare, trainer)
    if init_from is not None:
        init_from.check(data, model)
    if (
        stored is not None
        and cfg.torch_threads != 1
        and "torch_threads" not in changed_settings
        and trainer.is_global_zero
    ):
        print(f"torch_threads: {cfg.torch_threads}, as in the run of the checkpoint")
    compare = stored = None
    if trainer.is_global_zero:
        record.write(Path(cfg.paths.output_dir))
        if cfg.ckpt_path is None and save_config.resume_settings:
            print("note: this run has your own classes or folders; to resume or evaluate it, set trusted=true")
        for name, (stored_value, current_value) in changed_settings.items():
            print(f"{printable(name)}: {printable(stored_value)} in the checkpoint, {printable(current_value)} now")
        if init_from is not None:
            print(init_from.summary)

    for logger in trainer.loggers:
        logger.log_hyperparams(save_config.config)
    start = time.perf_counter()
    signals = requeued_on_signal() if trainer.world_size == 1 else rank_stop.requeued()
    with reported_rank_failures(trainer), signals, trainer_errors(cfg):
        trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
        if trainer.received_sigterm:  # the signal came during the last batch
            raise SIGTERMException
        rank_stop.raise_pending()
    seconds = time.perf_counter() - start
    if trainer.world_size == 1:  # several ranks wait for each other
        folder = Path(cfg.paths.output_dir)
        saved = folder / "checkpoints" / "last.ckpt" if cfg.eval_checkpoint == "last" else folder
        end = partial(_end_after_training, saved)
        cleanup.enter_context(handled_signal(signal.SIGTERM, end))

    checkpoint = load_weights(model, data, trainer, cfg.eval_checkpoint)
    episodes = data.evaluate(model.policy, cfg.eval_episodes)
    with reported_rank_failures(trainer):
        episodes = gather_episodes([episodes])
    returns = episodes["episode_return"]
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics({SCORE: float(returns.mean())}, step=data.clock[0])
            logger.save()
        report(cfg, episodes, checkpoint, data.clock, seconds)
    return float(returns.mean())


def _end_after_training(path: Path, number: int, frame: FrameType | None) -> None:
    """End the command by a signal with one line."""
    hint = f"evaluate it with torchrl-lightning-evaluate ckpt_path={path}"
    print(f"stopped by a signal after the training; {hint}", file=sys.stderr)
    sys.exit(128 + number)


def load_weights(model: Any, data: Any, trainer: Any, which: str) -> str | None:
    """Load the weights and moments of the best policy and return its path. Return None to keep the last policy."""
    from torchrl_lightning._core.checkpoint_reader import load_checkpoint

    paths = (getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks)
    path = next(filter(None, paths), "")
    if which == "last" or not path:
        return None
    stored = load_checkpoint(path)
    model.load_state_dict(stored["state_dict"])
    data.load_statistics(stored[type(data).__qualname__])
    return str(path)


def report(
    cfg: DictConfig, episodes: TensorDict, checkpoint: str | None, clock: tuple[int, str], seconds: float
) -> None:
    """Plot the learning curve, and print the paths of all outputs and the evaluation results."""
    from torchrl_lightning.cli.plot import plot_runs

    folder = Path(cfg.paths.output_dir)
    metrics = folder / "csv" / "metrics.csv"
    if metrics.exists():
        # A run shorter than one evaluation interval has only training returns.
        columns = metrics.read_text().partition("\n")[0].split(",")
        metric = next((name for name in ("eval/return", "train/return") if name in columns), None)
        if metric is not None:
            print(f"learning curve: {plot_runs([folder], folder / 'curve.png', metric=metric)}")
    if checkpoint is not None:
        print(f"evaluated checkpoint: {checkpoint}")
    print(summary(episodes, clock, seconds))


def summary(episodes: TensorDict, clock: tuple[int, str], seconds: float) -> str:
    """Return the last output line of a run in a format for people and scripts."""
    returns = episodes["episode_return"].double()
    digits = 1 if returns.abs().max() >= 10 else 3  # one digit is too coarse for returns of 0 or 1
    count, unit = clock
    mean, std = (f"{value:.{digits}f}" for value in (returns.mean(), returns.std(correction=0)))
    success = f", success rate {episodes['success'].double().mean():.2f}" if "success" in episodes else ""
    end = f"over {len(returns)} episodes{success}, {count} {unit}, {seconds:.0f} s"
    return f"mean evaluation return: {mean} +- {std} {end}"


if __name__ == "__main__":
    main()
