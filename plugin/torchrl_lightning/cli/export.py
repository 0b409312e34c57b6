"""``torchrl-lightning-export``: write a run's policy to one file that is usable without this package."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_lightning.cli.command import cleanup, limit_threads, silence_libraries
from torchrl_lightning.cli.error_messages import UsageError, exit_with_one_line
from torchrl_lightning.cli.working_directory import append_working_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Export the policy of a run; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrl-lightning-export",
        description="Write the policy of a run as one file that acts without this package. It maps raw observations of "
        "the environment to actions, and includes the normalisation. Before writing, the file is compared with the "
        "policy on random observations.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run folder (its best checkpoint), a checkpoint, or a published policy"
    )
    parser.add_argument(
        "--format", choices=("torch", "onnx"), default="torch", help="torch.export, or ONNX (needs the extra `onnx`)"
    )
    parser.add_argument(
        "--output", "-o", help="the file to write (default: policy.pt2 or policy.onnx in the folder of RUN)"
    )
    parser.add_argument(
        "--trusted", action="store_true", help="allow classes and modules outside this package in the checkpoint"
    )
    options = parser.parse_args(argv)
    append_working_directory()
    with exit_with_one_line():
        export(options.run, options.format, options.output, trusted=options.trusted)
    return 0


@cleanup
def export(run: str, format: Any, output: str | None, *, trusted: bool) -> None:
    """Load the policy of a run and write it to a file."""
    from torchrl_lightning.deploy.export import SUFFIXES, export_policy
    from torchrl_lightning.deploy.hub import from_pretrained, is_pretrained

    silence_libraries()
    limit_threads(1)
    try:
        if is_pretrained(run):
            policy, folder = from_pretrained(run, trusted=trusted), Path(run if Path(run).is_dir() else "")
        else:
            policy, folder = _policy_of_run(run, trusted)
        path = Path(output) if output is not None else folder / f"policy{SUFFIXES[format]}"
        description = export_policy(policy, path, format=format)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    print(f"{path}: {_format_tensors(description['inputs'])} -> {_format_tensors(description['outputs'])}")


def _policy_of_run(run: str, trusted: bool) -> tuple[Any, Path]:
    """Return the policy of a run or a checkpoint, and the folder of the run or checkpoint."""
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.evaluate import build_policy, load_run, rebuild_part
    from torchrl_lightning.deploy.loading import checkpoint_of

    if not Path(run).exists():
        raise UsageError(f"{run}: file or folder not found; name a run, a checkpoint or a published policy.")
    cfg = OmegaConf.create({"ckpt_path": str(checkpoint_of(run)), "trusted": trusted, "deterministic": True})
    checkpoint, stored, config = load_run(cfg, "--trusted")
    policy = build_policy(cfg, stored, rebuild_part(checkpoint, config, "model"))
    return policy, Path(run) if Path(run).is_dir() else checkpoint.parent


def _format_tensors(tensors: Mapping[str, Any]) -> str:
    """Return the names, shapes and dtypes of tensors as text."""
    return ", ".join(
        f"{name} [{', '.join(map(str, tensor['shape']))}] {tensor['dtype']}" for name, tensor in tensors.items()
    )


if __name__ == "__main__":
    raise SystemExit(main())
