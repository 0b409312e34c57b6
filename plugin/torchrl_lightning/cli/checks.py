"""What is refused before anything is built, with a message that says how to mend it."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf


def check_config(cfg: DictConfig) -> None:
    """Refuses a config with missing values, unknown groups or a checkpoint that is not there.

    Raises:
        ValueError: naming each missing field, or the group that was not found.
        FileNotFoundError: if ``ckpt_path`` does not exist.
    """
    for group in ("data", "model", "trainer"):
        node = cfg.get(group)
        if not isinstance(node, DictConfig):
            # `+data=gae` becomes the string 'gae' when our configs are not on Hydra's search path.
            raise ValueError(
                f"{group} is {node!r}, expected a config. Is torchrl-lightning installed (pip install -e .)? "
                f"Select a group as {group}=NAME, without a plus sign."
            )
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ValueError(f"the config has no value for {', '.join(missing)}; give each one, as {missing[0]}=VALUE.")
    if cfg.ckpt_path is not None and not Path(cfg.ckpt_path).is_file():
        raise FileNotFoundError(f"ckpt_path={cfg.ckpt_path} is not a file; checkpoints lie in RUN/checkpoints/.")
    if cfg.eval_checkpoint not in ("best", "last"):
        raise ValueError(f"eval_checkpoint is {cfg.eval_checkpoint!r}; expected 'best' or 'last'.")


def check_environment(cfg: DictConfig) -> None:
    """Refuses what Lightning and Hydra cannot do together.

    Raises:
        ValueError: for a sweep over a strategy that starts processes by running the command again.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    strategy = str(cfg.trainer.get("strategy", "auto"))
    if strategy.startswith("ddp") and strategy != "ddp_spawn":
        raise ValueError(
            f"--multirun with trainer.strategy={strategy} would start the whole sweep again in each process; "
            "use trainer.strategy=ddp_spawn, or one run at a time."
        )
