"""``torchrl-lightning-export``: write a run's policy as one file that runs without this package."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_lightning.cli.command import behind, quiet, use_threads
from torchrl_lightning.cli.error_messages import UsageError, one_line
from torchrl_lightning.cli.working_directory import append_working_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Export the policy of a run; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrl-lightning-export",
        description="Write the policy of a run as one file that acts without this package: observations in, as the "
        "environment shows them, and the action out, with whatever normalises them inside. The file is compared with "
        "the policy on random observations before it is written.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run's folder, whose best checkpoint is taken, a checkpoint, or a published policy"
    )
    parser.add_argument(
        "--format", choices=("torch", "onnx"), default="torch", help="torch.export's, or ONNX by the extra `onnx`"
    )
    parser.add_argument(
        "--output", "-o", help="the file to write (default: policy.pt2 or policy.onnx in the folder of RUN)"
    )
    parser.add_argument("--trusted", action="store_true", help="let the checkpoint name your own classes and modules")
    options = parser.parse_args(argv)
    append_working_directory()
    with one_line():
        export(options.run, options.format, options.output, trusted=options.trusted)
    return 0


@behind
def export(run: str, format: Any, output: str | None, *, trusted: bool) -> None:
    """Load the policy of a run and write it to a file."""
    from torchrl_lightning.deploy.export import SUFFIXES, export_policy
    from torchrl_lightning.deploy.hub import from_pretrained, is_pretrained

    quiet()
    use_threads(1)
    try:
        if is_pretrained(run):
            policy, beside = from_pretrained(run, trusted=trusted), Path(run if Path(run).is_dir() else "")
        else:
            policy, beside = _policy_of_run(run, trusted)
        path = Path(output) if output is not None else beside / f"policy{SUFFIXES[format]}"
        described = export_policy(policy, path, format=format)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    print(f"{path}: {_told(described['inputs'])} -> {_told(described['outputs'])}")


def _policy_of_run(run: str, trusted: bool) -> tuple[Any, Path]:
    """Return the policy of a run or a checkpoint, and its folder."""
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.evaluate import policy_of, rebuilt, run_of
    from torchrl_lightning.deploy.loading import checkpoint_of

    if not Path(run).exists():
        raise UsageError(f"{run}: there is no such file or folder; name a run, a checkpoint or a published policy.")
    cfg = OmegaConf.create({"ckpt_path": str(checkpoint_of(run)), "trusted": trusted, "deterministic": True})
    checkpoint, stored, config = run_of(cfg, "--trusted")
    policy = policy_of(cfg, stored, rebuilt(checkpoint, config, "model"))
    return policy, Path(run) if Path(run).is_dir() else checkpoint.parent


def _told(tensors: Mapping[str, Any]) -> str:
    """Format the names, shapes and dtypes of tensors."""
    return ", ".join(
        f"{name} [{', '.join(map(str, tensor['shape']))}] {tensor['dtype']}" for name, tensor in tensors.items()
    )
