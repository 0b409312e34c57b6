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
from torchrl_lightning.ray._waits import demand_of, warnings_during

_CONNECT_TIMEOUT = 5.0  # seconds until a cluster must answer
_COMPARED_PACKAGES = ("torchrl-lightning", "torch", "torchrl", "tensordict")


class ClusterFault(UserError):
    """A Ray cluster does not exist, has too few resources, or has other versions."""


class ServiceFault(UserError):
    """A replay service differs from the run's settings, rejects a request, or has ended."""


class FirstCallMissing(UserError):
    """A request waits, because no thread has drawn or written yet."""


def connect(config: Mapping[str, Any]) -> tuple[Any, bool]:
    """Connect to a cluster. Return the Ray module, and True if this call has connected the process.

    Args:
        config: Arguments of ``ray.init``, for example ``address``. They have no effect if the process is already
            connected.

    Raises:
        ClusterFault: Ray is not installed, the address does not have a cluster, or the cluster has another version.
    """
    try:
        import ray
    except ImportError as error:
        raise ClusterFault(
            "Collectors and replay services on Ray need the extra ray: pip install 'torchrl-lightning[ray]'."
        ) from error
    if ray.is_initialized():
        return ray, False
    address = config.get("address") or os.environ.get("RAY_ADDRESS") or _last_address()
    is_reachable = address is not None and _is_reachable(address)
    if world_size() > 1 and (address == "local" or not is_reachable):
        raise ClusterFault(
            f"The {world_size()} ranks of a run need a running cluster, but none answers at address={address!r}. Start "
            "one (ray start --head), and set its address."
        )
    if address is not None and not is_reachable:
        if config.get("address") or "RAY_ADDRESS" in os.environ:
            raise ClusterFault(
                f"No cluster answers at address={address!r}. Start one there (ray start --head), set its address, or "
                "leave the address out of ray_init_config for a cluster on this machine."
            )
        config = {**config, "address": "local"}  # the cluster that Ray remembers was killed, so start a new one
    try:
        with warnings_during(f"the Ray cluster at address={address!r}" if is_reachable else "a new Ray cluster"):
            ray.init(**config)
    except (ConnectionError, TimeoutError, ValueError) as error:
        raise ClusterFault(
            f"Cannot connect to a Ray cluster at address={address!r} ({_short_line(error)}). Start one (ray start "
            "--head), set its address, set RAY_AUTH_MODE=token if it needs a token, or leave the address out of "
            "ray_init_config for a cluster on this machine."
        ) from error
    except Exception as error:  # Ray raises a plain Exception if a node does not start in time
        if "ersion" in str(error):
            raise ClusterFault(
                f"The Ray cluster at address={address!r} is not compatible with this process: {_short_line(error)}. "
                "Install the same Python and Ray on all machines."
            ) from error
        raise ClusterFault(
            f"Ray could not be started ({_short_line(error)}). Check for free processors, memory and disk, stop "
            "earlier clusters (ray stop --force), and run the command again."
        ) from error
    return ray, True


def _last_address() -> str | None:
    """Return the address of the last cluster on this machine, as stored in Ray's file."""
    address_file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return address_file.read_text().strip() or None if address_file.is_file() else None


def _is_reachable(address: str) -> bool:
    """Return True if the address accepts connections. Ray's own test takes minutes and ends the process on failure."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():  # an address such as local or auto
        return True
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def installed_versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines."""
    return {"Python": platform.python_version(), **{name: version(name) for name in _COMPARED_PACKAGES}}


def check_resources(ray: Any, count: int, actor_resources: Mapping[str, Any]) -> None:
    """Raise a ClusterFault if the actors of all ranks need more resources than the cluster has in total."""
    count *= world_size()
    available = ray.cluster_resources()
    for name, amount in demand_of(actor_resources).items():
        if amount * count > available.get(name, 0):
            raise ClusterFault(
                f"num_collectors={count} need {amount * count:g} {name}, but the cluster has "
                f"{available.get(name, 0):g}. Lower num_collectors, add machines, or lower the resources of each by "
                "remote_configs, such as {'num_cpus': 0.5}."
            )


def death_errors(ray: Any) -> tuple[type[Exception], ...]:
    """Return the errors of requests to actors that have died or cannot be reached."""
    # Ray raises OutOfMemoryError for an actor that its memory monitor has killed.
    return ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OutOfMemoryError


def has_failed_to_start(error: BaseException) -> bool:
    """Return True if an actor's constructor raised an error, which another start would raise again."""
    import ray

    return isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed


def last_line(error: BaseException) -> str:
    """Return the last line of a message, which names the error of a traceback, without its full stop."""
    return str(error).strip().rpartition("\n")[2].rstrip(".")


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def _short_line(error: BaseException) -> str:
    return one_line(error).rstrip(".")[:300]
