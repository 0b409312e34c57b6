"""Connect to a Ray cluster and check its versions and resources."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.ranks import world_size

_PATIENCE = 5.0  # seconds until a cluster must answer
_PACKAGES = ("torchrl-lightning", "torch", "torchrl", "tensordict")


class ClusterFault(UserError):
    """A Ray cluster does not exist, has too few resources, or has other versions."""


class ServiceFault(UserError):
    """A replay service differs from the run's settings, rejects a request, or has ended."""


def joined(config: Mapping[str, Any]) -> tuple[Any, bool]:
    """Connect to a cluster; return the Ray module, and whether this call connected it.

    Args:
        config: Arguments of ``ray.init``, for example ``address``. They have no effect in a process that is already
            connected.

    Raises:
        ClusterFault: Ray is not installed, or the cluster does not exist at the address or has another version.
    """
    try:
        import ray
    except ImportError as error:
        raise ClusterFault("Collectors on Ray need it: pip install 'torchrl-lightning[ray]'.") from error
    if ray.is_initialized():
        return ray, False
    address = config.get("address") or os.environ.get("RAY_ADDRESS") or _last_cluster()
    is_on_device = address is not None and _answers(address)
    if world_size() > 1 and (address == "local" or not is_on_device):
        raise ClusterFault(
            f"The {world_size()} ranks of a run collect on one cluster that none of them starts, but there is none at "
            f"address={address!r}. Start one (ray start --head), and write its address."
        )
    if address is not None and not is_on_device:
        if config.get("address") or "RAY_ADDRESS" in os.environ:
            raise ClusterFault(
                f"Nothing answers at address={address!r}. Start a cluster there (ray start --head), write its address, "
                "or leave the address out of ray_init_config for a cluster on this machine."
            )
        config = {**config, "address": "local"}  # the last cluster on this machine was killed
    try:
        ray.init(**config)
    except (ConnectionError, TimeoutError, ValueError) as error:
        raise ClusterFault(
            f"No Ray cluster could be joined at address={address!r} ({_line(error)}). Start one (ray start --head), "
            "write its address, set RAY_AUTH_MODE=token if it asks for one, or leave the address out of "
            "ray_init_config for a cluster on this machine."
        ) from error
    except Exception as error:  # Ray raises a plain Exception if a node does not start in time
        if "ersion" in str(error):
            raise ClusterFault(
                f"The Ray cluster at address={address!r} does not fit this process: {_line(error)}. Install the same "
                "Python and Ray on all machines."
            ) from error
        raise ClusterFault(
            f"Ray could not be started ({_line(error)}). Look for a machine without free processors, memory or disk, "
            "end what remains of earlier clusters (ray stop --force), and run the command again."
        ) from error
    return ray, True


def _last_cluster() -> str | None:
    """Return the address of the last cluster started on this machine, read from Ray's own file."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return note.read_text().strip() or None if note.is_file() else None


def _answers(address: str) -> bool:
    """Return whether the address accepts connections; Ray itself would try for minutes, and end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():  # local, auto
        return True
    try:
        socket.create_connection((host, int(port)), _PATIENCE).close()
    except OSError:
        return False
    return True


def installed() -> dict[str, str]:
    """Return the versions that all machines must share."""
    return {"Python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def check_room(ray: Any, count: int, each: Mapping[str, Any]) -> None:
    """Raise a ClusterFault if the actors of all ranks need more resources than the cluster has in total."""
    count *= world_size()
    wanted = {"CPU": each.get("num_cpus", 1), "GPU": each.get("num_gpus", 0), "memory": each.get("memory", 0)}
    wanted |= each.get("resources", {})
    total = ray.cluster_resources()
    for name, amount in wanted.items():
        if amount * count > total.get(name, 0):
            raise ClusterFault(
                f"num_collectors={count} need {amount * count:g} {name}, but the cluster has "
                f"{total.get(name, 0):g}. Take fewer, add machines, or ask for less of each by remote_configs, such as "
                "{'num_cpus': 0.5}."
            )


def in_one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def _line(error: BaseException) -> str:
    return in_one_line(error).rstrip(".")[:300]
