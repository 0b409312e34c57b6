"""Save and load a trained policy as a folder of plain files (safetensors, JSON, model card) or as a hub repository."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from torchrl_lightning._core.checksums import CHECKSUMS_KEY, add_checksums, verify_checksums
from torchrl_lightning._core.file_limits import PRETRAINED_BYTES, PRETRAINED_CONTENT
from torchrl_lightning._core.files import replaced_files
from torchrl_lightning._core.run_metadata import COMMAND, evaluation_score
from torchrl_lightning._core.state import check_state, mapping
from torchrl_lightning._core.trust import without_folders
from torchrl_lightning._core.untrusted import printable_errors
from torchrl_lightning.deploy.card import render_model_card
from torchrl_lightning.deploy.loading import (
    CONFIG,
    LoadedPolicy,
    checkpoint_of,
    extract_config,
    extract_policy,
    read_checkpoint,
)

VERSION = 1
_WEIGHTS_FILE, _CONFIG_FILE, _CARD_FILE = "model.safetensors", "config.json", "README.md"
_TENSOR_KEY = "__tensor__"
_NETWORK_LIBRARIES = ("httpcore", "httpx", "requests", "urllib3")  # of the client of the hub, also as httpx2
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Entries of a checkpoint that a resumed run needs, but a policy does not.
_RUN_ENTRIES = {
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "optimizer_states", "lr_schedulers"),
    *("hparams_name", "hyper_parameters", "hparams_type", "MixedPrecision", CONFIG, COMMAND, CHECKSUMS_KEY),
    *("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type"),
}
_DATA_ENTRIES = ("fingerprint", "specs", "normalization")


@printable_errors()
def save_pretrained(run: str | Path, folder: str | Path, *, name: str | None = None, trusted: bool = False) -> None:
    """Write a run's policy into a folder for :func:`from_pretrained`: weights, config and model card, but no pickle.

    The files are ``model.safetensors``, ``config.json`` and ``README.md`` with the score, the settings and the usage.

    Args:
        run: A checkpoint, or a run's folder. A folder's best checkpoint is used, or without one, the last.
        folder: Output folder. Files with these names are replaced; after an error, all old files are unchanged.
        name: Title of the card; the folder's name by default.
        trusted: Whether the checkpoint may name classes of other packages, such as your own. Loading the policy then
            also needs ``trusted=True``.

    Raises:
        ValueError: The checkpoint does not exist, or lacks the config or the specs that our training command writes. Or
            it names classes of other packages and ``trusted`` is False. Or this function has written ``run``.
        TypeError: The module's arguments in the checkpoint are not all plain data.

    Examples:
        >>> save_pretrained("logs/run", "cartpole")  # doctest: +SKIP
    """
    if all((Path(run) / name).is_file() for name in (_WEIGHTS_FILE, _CONFIG_FILE)):
        raise ValueError(
            f"run must be the folder of a run or a checkpoint, got {run}, which save_pretrained wrote. Pass the run, "
            f"or upload the folder: hf upload OWNER/NAME {run}"
        )
    folder, path = Path(folder), checkpoint_of(run)
    stored = read_checkpoint(path)
    data_key = next((key for key, state in stored.items() if isinstance(state, Mapping) and "specs" in state), None)
    if data_key is None:
        raise ValueError(f"{path} contains no environment specs: its run did not use one of our DataModules")
    try:
        model = without_folders(_model_config(stored, path, trusted=False))
        trusted = False  # not needed: no class is from another package
    except ValueError as error:  # the config names classes of other packages
        if not trusted:
            raise ValueError(f"{error}. If you trust its author, pass trusted=True") from error
        model = without_folders(_model_config(stored, path, trusted=True))
    state = stored[data_key]
    policy_entries = {
        **{key: value for key, value in stored.items() if key not in _RUN_ENTRIES and key != data_key},
        data_key: {key: state[key] for key in _DATA_ENTRIES},
    }
    try:
        frames = int(state["ranks"][0]["frames"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not contain the number of training frames. Use another checkpoint") from error
    policy = extract_policy({**policy_entries, CONFIG: {"model": model}}, path, deterministic=True, trusted=trusted)
    tensors: dict[str, Tensor] = {}
    content = json.loads(json.dumps(_split_tensors(policy_entries, "", tensors)))  # tuples become lists, as in the file
    entries_with_checksums = _merge_tensors(content, tensors)
    add_checksums(entries_with_checksums, *entries_with_checksums)
    settings = {group: without_folders(stored[CONFIG][group]) for group in ("model", "data") if group in stored[CONFIG]}
    card = render_model_card(
        name or str(folder),
        stored,
        policy,
        frames=frames,
        score=evaluation_score(path, stored[CONFIG]),
        settings=settings,
        trusted=trusted,
    )
    document = {
        "schema_version": VERSION,
        CONFIG: {"model": model},
        "content": content,
        CHECKSUMS_KEY: entries_with_checksums[CHECKSUMS_KEY],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replaced_files(*(folder / file for file in (_WEIGHTS_FILE, _CONFIG_FILE, _CARD_FILE))) as (
        weights_file,
        config_file,
        card_file,
    ):
        weights_file.write(safetensors.torch.save(tensors))
        config_file.write(json.dumps(document, indent=1).encode())
        card_file.write(card.encode())


def _model_config(stored: Mapping[str, Any], path: Path, *, trusted: bool) -> dict[str, Any]:
    config: dict[str, Any] = extract_config(stored, path, "model", trusted=trusted)["model"]
    return config


@printable_errors()
def push_to_hub(run: str | Path, repo: str, *, private: bool | None = None, trusted: bool = False) -> str:
    """Publish a run's policy in a repository on the Hugging Face Hub; create the repository if it does not exist.

    This function needs the extra ``hub``. It uploads with the account of your ``huggingface_hub`` login.

    Args:
        run: As in :func:`save_pretrained`.
        repo: ``owner/name``.
        private: Whether a new repository is private; None uses the owner's default.
        trusted: As in :func:`save_pretrained`.

    Returns:
        URL of the upload.

    Raises:
        ValueError: The repository name is invalid, the hub cannot be reached or refuses the upload, or
            :func:`save_pretrained` raises this error. The message is one line with the remedy.
        ImportError: The extra ``hub`` is not installed.

    Examples:
        >>> push_to_hub("logs/run", "me/ppo-cartpole")  # doctest: +SKIP
    """
    if not _REPOSITORY.fullmatch(repo):
        raise ValueError(f"repo={repo!r} must have the form 'owner/name'")
    hub = _import_hub()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(run, folder, name=repo, trusted=trusted)
        try:
            api = hub.HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Publish a policy"))
        except Exception as error:  # the client and the network raise any error
            raise _upload_error(repo, error) from error


@printable_errors()
def from_pretrained(
    source: str | Path,
    module: Any = None,
    *,
    revision: str | None = None,
    deterministic: bool = True,
    trusted: bool = False,
    limit: int = PRETRAINED_BYTES,
) -> LoadedPolicy:
    """Load a policy from :func:`save_pretrained` or :func:`push_to_hub`, to compute actions on the CPU.

    This function does not run code of the policy's author and does not read a pickle. The config may name the same
    classes as a checkpoint's config.

    Args:
        source: A folder, or ``owner/name`` of a repository on the Hugging Face Hub (needs the extra ``hub``).
        module: As in :func:`load_policy`.
        revision: Branch, tag or commit of a repository; the newest by default.
        deterministic: Whether the policy takes the mode of its distribution instead of a sample.
        trusted: Whether to import and build classes of other packages, such as your own, if the config names them.
        limit: Maximum size of the weights file in bytes; a larger file is not downloaded.

    Raises:
        ValueError: The policy is missing, damaged, larger than ``limit`` or in another format, or
            :func:`load_policy` raises this error.
        ImportError: The extra ``hub`` is not installed.

    Examples:
        >>> policy = from_pretrained("me/ppo-cartpole")  # doctest: +SKIP
        >>> policy.recipe()()  # doctest: +SKIP
    """
    stored = read_pretrained(source, revision=revision, limit=limit)
    return extract_policy(stored, source, module, deterministic=deterministic, trusted=trusted)


def is_pretrained(source: str | Path) -> bool:
    """Return whether :func:`read_pretrained` can read the source; False for a run or a checkpoint."""
    if not Path(source).exists():
        return _REPOSITORY.fullmatch(str(source)) is not None
    return (Path(source) / _CONFIG_FILE).is_file()


@printable_errors()
def read_pretrained(
    source: str | Path, *, revision: str | None = None, limit: int = PRETRAINED_BYTES
) -> dict[str, Any]:
    """Return a checkpoint's entries from a folder or repository; arguments and errors as in :func:`from_pretrained`."""
    limits = {_CONFIG_FILE: PRETRAINED_CONTENT, _WEIGHTS_FILE: limit}
    fetch = _local_files if Path(source).is_dir() else _download_files
    paths = fetch(str(source), limits, revision)
    try:
        document = json.loads(paths[_CONFIG_FILE].read_bytes())
        check_state(document, {CONFIG: mapping, "content": mapping, CHECKSUMS_KEY: mapping}, _CONFIG_FILE, VERSION)
        tensors = safetensors.torch.load(paths[_WEIGHTS_FILE].read_bytes())
        stored = {
            **_merge_tensors(document["content"], tensors),
            CONFIG: document[CONFIG],
            CHECKSUMS_KEY: document[CHECKSUMS_KEY],
        }
        verify_checksums(stored, str(source))
    except Exception as error:  # damaged or hostile files raise any error
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{source} does not contain a policy of torchrl-lightning: {type(error).__name__}: {reason}"
        ) from error
    return stored


def _local_files(source: str, limits: Mapping[str, int], revision: str | None) -> dict[str, Path]:
    paths = {name: Path(source) / name for name in limits}
    for name, path in paths.items():
        if not path.is_file():
            raise ValueError(f"{source} has no {name}. Pass a folder that save_pretrained wrote")
        _check_size(source, name, path.stat().st_size, limits[name])
    return paths


def _download_files(source: str, limits: Mapping[str, int], revision: str | None) -> dict[str, Path]:
    if not _REPOSITORY.fullmatch(source):
        raise ValueError(f"{source} is neither a folder nor a repository 'owner/name'")
    try:
        hub = _import_hub()
    except ImportError as error:
        raise ImportError(f"{source} is not a folder; {error}") from error
    try:
        infos = hub.HfApi().get_paths_info(source, list(limits), revision=revision)
        sizes = {info.path: info.size for info in infos}
    except Exception as error:  # the client and the network raise any error
        raise _download_error(source, error) from error
    for name, limit in limits.items():
        if not isinstance(sizes.get(name), int):
            raise ValueError(f"{source} has no {name}. Pass a repository that push_to_hub wrote")
        _check_size(source, name, sizes[name], limit)
    try:
        paths = {name: Path(hub.hf_hub_download(source, name, revision=revision)) for name in limits}
    except Exception as error:
        raise _download_error(source, error) from error
    return _local_files(str(paths[_CONFIG_FILE].parent), limits, revision)


def _download_error(source: str, error: Exception) -> ValueError:
    remedy = _remedy(error, "read access to it")
    return ValueError(
        f"{source} is not a folder, and cannot be read from the hub: {_reason(error)}{f'. {remedy}' if remedy else ''}"
    )


def _upload_error(repo: str, error: Exception) -> ValueError:
    remedy = _remedy(error, f"write access to {repo}") or "Correct the cause, then push again"
    return ValueError(f"{repo} cannot be written to the hub: {_reason(error)}. {remedy}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"


def _remedy(error: Exception, access: str) -> str:
    """Return the remedy for a missing login, missing rights or a failed connection; "" for another error."""
    chain: list[BaseException] = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)
    names = {type(link).__name__ for link in chain}
    # The client is an optional library, and its errors have a response only if the hub has answered.
    statuses = (getattr(getattr(link, "response", None), "status_code", None) for link in chain)
    status = next((status for status in statuses if status is not None), None)
    if status == 401 or "LocalTokenNotFoundError" in names:
        return f"Log in with `hf auth login`, or set HF_TOKEN to a token with {access}"
    if status == 403:
        return f"Log in with a token that has {access} (`hf auth login`), or name a repository of your own"
    if status == 404:
        return f"Correct owner and name, or log in with {access} (`hf auth login`)"
    if "OfflineModeIsEnabled" in names:
        return "Unset HF_HUB_OFFLINE"
    is_unreachable = any(
        isinstance(link, OSError) or type(link).__module__.startswith(_NETWORK_LIBRARIES) for link in chain
    )
    if (status is None and is_unreachable) or (status is not None and (status in (408, 429) or status >= 500)):
        return "Check the network, its proxy and HF_ENDPOINT, or try again later"
    return ""


def _check_size(source: str, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"{name} in {source} must have at most {limit} bytes, got {size}. Raise limit= to accept it")


def _import_hub() -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError("the hub needs huggingface_hub: pip install 'torchrl-lightning[hub]'") from error


def _split_tensors(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors in plain data by names, and add the tensors to ``tensors``; weights keep their names."""
    if isinstance(node, Tensor):
        name = name.removeprefix("state_dict/")
        tensors[name] = node.detach().cpu().clone().contiguous()
        return {_TENSOR_KEY: name}
    if isinstance(node, Mapping):
        return {key: _split_tensors(value, f"{name}/{key}" if name else key, tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_split_tensors(value, f"{name}/{number}", tensors) for number, value in enumerate(node)]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"{name} in the checkpoint must be plain data, got a {type(node).__name__}")


def _merge_tensors(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Replace the names in plain data by the tensors with these names."""
    if isinstance(node, dict):
        if set(node) == {_TENSOR_KEY}:
            return tensors[node[_TENSOR_KEY]]
        return {key: _merge_tensors(value, tensors) for key, value in node.items()}
    return [_merge_tensors(value, tensors) for value in node] if isinstance(node, list) else node
