"""``torchrl-lightning-evaluate``: plays a checkpoint's policy and shows how its returns are spread."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from torchrl_lightning._conf import CONF_DIR

if TYPE_CHECKING:
    from torch import Tensor


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="evaluate")
def main(cfg: DictConfig) -> float:
    """Evaluates; gives the mean return."""
    import time

    import torch
    from hydra.utils import instantiate

    from torchrl_lightning.cli.quiet import quiet
    from torchrl_lightning.cli.train import summary

    if OmegaConf.is_missing(cfg, "ckpt_path"):
        raise ValueError("no checkpoint given; say ckpt_path=RUN/checkpoints/best.ckpt.")
    quiet()
    checkpoint = Path(cfg.ckpt_path)
    run = run_config(checkpoint)
    data = instantiate(run.data, seed=cfg.seed)
    model = instantiate(run.model)
    data.setup("validate")
    model.build(data.specs)
    stored = torch.load(checkpoint, weights_only=True, map_location="cpu")
    data.check_state(stored[type(data).__qualname__])
    model.load_state_dict(stored["state_dict"])
    data.frames = data.state_frames(stored[type(data).__qualname__])

    began = time.perf_counter()
    episodes = data.evaluate(model.policy, cfg.episodes, deterministic=cfg.deterministic)
    seconds = time.perf_counter() - began
    if cfg.histogram is not None:
        draw_histogram(episodes["episode_return"], Path(cfg.histogram), checkpoint)
        print(f"histogram of returns: {cfg.histogram}")
    if cfg.video is not None:
        print(f"video: {record_video(data, model.policy, Path(cfg.video), cfg.seed)}")
    data.close()
    print(summary(episodes, data.frames, seconds))
    return float(episodes["episode_return"].mean())


def run_config(checkpoint: Path) -> Any:
    """Reads the config that Hydra kept in the folder of the run.

    Raises:
        FileNotFoundError: if there is no such checkpoint, or no config in a folder above it.
    """
    if not checkpoint.is_file():
        raise FileNotFoundError(f"ckpt_path={checkpoint} is not a file; checkpoints lie in RUN/checkpoints/.")
    for folder in checkpoint.resolve().parents:
        config = folder / ".hydra" / "config.yaml"
        if config.is_file():
            return OmegaConf.load(config)
    raise FileNotFoundError(
        f"no folder above {checkpoint} holds .hydra/config.yaml; keep a checkpoint in the folder of its run."
    )


def draw_histogram(returns: Tensor, path: Path, checkpoint: Path) -> None:
    """Draws how often each return was reached, with the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    mean, std = float(returns.mean()), float(returns.std(correction=0))
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.hist(returns.numpy(), bins=min(20, max(5, len(returns) // 2)), color="tab:blue", alpha=0.8)
    axes.axvline(mean, color="tab:orange", label=f"mean {mean:.1f} +- {std:.1f}")
    axes.set(xlabel="return of an episode", ylabel="episodes", title=f"{len(returns)} episodes of {checkpoint.name}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def record_video(data: Any, policy: Any, folder: Path, seed: int) -> Path:
    """Plays one episode and writes it as a film.

    Raises:
        ModuleNotFoundError: without the extra `video`.
    """
    from importlib.util import find_spec

    import gymnasium

    from torchrl_lightning.collectors import play_episodes

    if find_spec("moviepy") is None:
        raise ModuleNotFoundError("video= needs moviepy: pip install 'torchrl-lightning[video]'.")

    def make() -> gymnasium.Env[Any, Any]:
        env = data.eval_env
        made = gymnasium.make(env, render_mode="rgb_array") if isinstance(env, str) else env(render_mode="rgb_array")
        return gymnasium.wrappers.RecordVideo(made, str(folder), episode_trigger=lambda episode: episode == 0)

    play_episodes(make, policy, 1, num_envs=1, seed=seed)
    return next(iter(sorted(folder.glob("*.mp4"))))


if __name__ == "__main__":
    main()
