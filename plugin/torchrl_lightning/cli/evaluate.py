"""``torchrl-lightning-evaluate``: play a checkpoint's policy and report the distribution of its returns."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.import_stubs import import_libraries
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.cli.command import cleanup, limit_threads, run_command, silence_libraries

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor


def main() -> None:
    """Run the command; return the mean return of a checkpoint to a sweeper."""
    run_command("evaluate", evaluate)


@cleanup
def evaluate(cfg: DictConfig) -> float:
    """Rebuild the run of a checkpoint, play the policy and report the returns."""
    import_libraries()
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.config.instantiate import setting_errors
    from torchrl_lightning.cli.config.resume import check_checkpoint
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.cli.train import summary
    from torchrl_lightning.collectors.video import check_renderable, record_video

    silence_libraries()
    if OmegaConf.is_missing(cfg, "ckpt_path"):
        raise UsageError("no checkpoint given; set ckpt_path=RUN, or ckpt_path=RUN/checkpoints/last.ckpt.")
    checkpoint, stored, run = load_run(cfg)
    limit_threads(min(run.get("torch_threads", 1), os.cpu_count() or 1))
    data = rebuild_part(checkpoint, run, "data", seed=cfg.seed)
    model = rebuild_part(checkpoint, run, "model")
    with setting_errors(run, "data.env"):
        data.specs  # noqa: B018  # reading this property builds the environment
    if cfg.video is not None:
        check_renderable(data.eval_env)
    check_checkpoint(checkpoint, stored, data, model, plays=True)
    policy = build_policy(cfg, stored, model)
    try:
        frames = data.state_frames(stored[type(data).__qualname__])
    except (KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"{checkpoint} does not store its number of training frames; choose another checkpoint."
        ) from error
    data.setup("validate")

    start = time.perf_counter()
    try:
        episodes = data.evaluate(policy, cfg.episodes, deterministic=cfg.deterministic)
    finally:
        data.close()
    seconds = time.perf_counter() - start
    if cfg.histogram is not None:
        draw_histogram(episodes["episode_return"], Path(cfg.histogram), checkpoint)
        print(f"histogram of returns: {cfg.histogram}")
    if cfg.video is not None:
        video_path = Path(cfg.video) / f"seed_{cfg.seed}.mp4"
        record_video(data.eval_env, policy, video_path, seed=cfg.seed, deterministic=cfg.deterministic)
        print(f"video: {video_path}")
    print(summary(episodes, (frames, "frames"), seconds))
    return float(episodes["episode_return"].mean())


def load_run(cfg: DictConfig, trust_option: str = "trusted=true") -> tuple[Path, dict[str, Any], Any]:
    """Return path and content of the requested checkpoint, and the config of its run, changed for playing on the CPU.

    ``trust_option`` is the option of this command that marks the checkpoint as trusted. Error messages contain it.
    """
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.config.validate import is_trusted, read_checkpoint_file
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.deploy.loading import CONFIG, checkpoint_of, extract_config

    try:
        checkpoint = checkpoint_of(cfg.ckpt_path)
    except ValueError as error:
        raise UsageError(f"ckpt_path={error}.") from error
    trusted = is_trusted(cfg)
    stored = read_checkpoint_file(checkpoint)
    try:
        run = OmegaConf.create(extract_config(stored, checkpoint, "data", "model", trusted=trusted))
    except ValueError as error:
        hint = f"; if you trust its author, set {trust_option}" if CONFIG in stored else ""
        raise UsageError(f"{error}{hint}.") from error
    threads = stored[CONFIG].get("torch_threads")
    run.torch_threads = threads if isinstance(threads, int) and threads >= 1 else 1
    if OmegaConf.select(run, "data.buffer.device") is not None:
        OmegaConf.update(run, "data.buffer.device", "cpu")
    if OmegaConf.select(run, "data.frames_per_update") == 0:
        OmegaConf.update(run, "data.dataset", "unread")  # marks offline training; this data set is never read
    if OmegaConf.select(run, "data.dataset_share") is not None:
        OmegaConf.update(run, "data.dataset_share", None)  # playing does not load the dataset
    return checkpoint, stored, run


def build_policy(cfg: DictConfig, stored: dict[str, Any], model: Any) -> Any:
    """Return the policy of the requested checkpoint."""
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.deploy.loading import extract_policy

    try:
        return extract_policy(stored, cfg.ckpt_path, model, deterministic=cfg.deterministic)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def rebuild_part(checkpoint: Path, run: Any, key: str, **arguments: Any) -> Any:
    """Build a part of a checkpoint's config. Raise UsageError on any error, because the checkpoint causes the error."""
    from torchrl_lightning.cli.config.instantiate import build_part
    from torchrl_lightning.cli.error_messages import UsageError

    try:
        return build_part(run, key, **arguments)
    except Exception as error:
        raise UsageError(
            f"{checkpoint}: {key} cannot be built from its config: {' '.join(str(error).split())}"
        ) from error


def draw_histogram(returns: Tensor, path: Path, checkpoint: Path) -> None:
    """Plot a histogram of the returns with a line at the mean."""
    from matplotlib.ticker import MaxNLocator

    from torchrl_lightning._core.palette import PALETTE
    from torchrl_lightning.plotting.style import add_legend, saved_panels

    mean, std = float(returns.mean()), float(returns.std(correction=0))
    # Without a margin, the axis for equal returns would have ticks at hundredths.
    low, high = float(returns.min()), float(returns.max())
    margin = max(0.0, 0.01 * max(abs(low), abs(high), 1.0) - (high - low)) / 2
    bins = min(20, max(5, len(returns) // 2))
    with saved_panels(path, 1, (6, 4)) as (figure, (axes,)):
        axes.hist(returns.numpy(), bins=bins, range=(low - margin, high + margin), color=PALETTE[0], alpha=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.axvline(mean, color=PALETTE[1])
        axes.set(xlabel="Return of an episode", ylabel="Episodes")
        axes.set_title(printable(f"{len(returns)} episodes of {checkpoint.name}"))
        add_legend(figure, {f"mean {mean:.1f}, standard deviation {std:.1f}": {"color": PALETTE[1]}})


if __name__ == "__main__":
    main()
