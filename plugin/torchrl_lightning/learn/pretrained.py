"""A trained policy as a folder of plain files that others load: safetensors, JSON and a card; also as a repository."""

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

from torchrl_lightning.files import replaced_files
from torchrl_lightning.learn.card import written_card
from torchrl_lightning.learn.loading import (
    CONFIG,
    LoadedPolicy,
    checkpoint_of,
    config_in,
    policy_in,
    read_checkpoint,
)
from torchrl_lightning.limits import PRETRAINED_BYTES, PRETRAINED_CONTENT
from torchrl_lightning.records import COMMAND, score_of
from torchrl_lightning.seal import SEAL, check_seal, seal
from torchrl_lightning.state import check_state, mapping
from torchrl_lightning.trust import without_folders
from torchrl_lightning.untrusted import printable_errors

VERSION = 1
_WEIGHTS, _CONTENT, _CARD = "model.safetensors", "config.json", "README.md"
_TENSOR = "__tensor__"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# What a checkpoint holds for a run that goes on, and who only acts does without.
_OF_RUNS = {
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "optimizer_states", "lr_schedulers"),
    *("hparams_name", "hyper_parameters", "hparams_type", "MixedPrecision", CONFIG, COMMAND, SEAL),
    *("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type"),
}
_OF_DATA = ("fingerprint", "specs", "normalization")


@printable_errors()
def save_pretrained(run: str | Path, folder: str | Path, *, name: str | None = None, trusted: bool = False) -> None:
    """Write a run's policy into a folder, for :func:`from_pretrained`: weights, config and card, and no pickle.

    The files are ``model.safetensors``, ``config.json`` and ``README.md``, which has score, settings and how to run it.

    Args:
        run: The folder of a run, whose best checkpoint is taken, else its last; or a checkpoint.
        folder: Where the files go; those of these names are replaced, all or none.
        name: What the card calls it; the folder by default.
        trusted: Whether the checkpoint may name classes of other packages, such as your own. Whoever loads the
            policy then needs ``trusted=True``, too.

    Raises:
        ValueError: There is no checkpoint; or it has no config or no specs, as one without the command has none; or it
            names classes of other packages and is not trusted; or the folder is one that this has written.
        TypeError: The checkpoint holds something else than plain data for its module.

    Examples:
        >>> save_pretrained("logs/run", "cartpole")  # doctest: +SKIP
    """
    if all((Path(run) / name).is_file() for name in (_WEIGHTS, _CONTENT)):
        raise ValueError(
            f"{run} is no run, but what save_pretrained has written of one, ready to be published; give the run, or "
            f"upload the folder as it is: hf upload OWNER/NAME {run}"
        )
    folder, path = Path(folder), checkpoint_of(run)
    stored = read_checkpoint(path)
    data = next((key for key, state in stored.items() if isinstance(state, Mapping) and "specs" in state), None)
    if data is None:
        raise ValueError(f"{path} holds no environment specs: it was not written through one of our DataModules")
    try:
        model = without_folders(_model_in(stored, path, trusted=False))
        trusted = False  # is not needed
    except ValueError as error:  # it names classes of the user's own
        if not trusted:
            raise ValueError(f"{error}. If you trust whoever made it, say trusted=True") from error
        model = without_folders(_model_in(stored, path, trusted=True))
    state = stored[data]
    kept = {
        **{key: value for key, value in stored.items() if key not in _OF_RUNS and key != data},
        data: {key: state[key] for key in _OF_DATA},
    }
    try:
        frames = int(state["ranks"][0]["frames"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not say for how many frames it was trained; name another checkpoint") from error
    policy = policy_in({**kept, CONFIG: {"model": model}}, path, deterministic=True, trusted=trusted)
    tensors: dict[str, Tensor] = {}
    content = json.loads(json.dumps(_apart(kept, "", tensors)))  # as it will be read
    sealed = _joined(content, tensors)
    seal(sealed, *sealed)
    settings = {group: without_folders(stored[CONFIG][group]) for group in ("model", "data") if group in stored[CONFIG]}
    card = written_card(
        name or str(folder),
        stored,
        policy,
        frames=frames,
        score=score_of(path, stored[CONFIG]),
        settings=settings,
        trusted=trusted,
    )
    written = {"schema_version": VERSION, CONFIG: {"model": model}, "content": content, SEAL: sealed[SEAL]}
    folder.mkdir(parents=True, exist_ok=True)
    with replaced_files(*(folder / each for each in (_WEIGHTS, _CONTENT, _CARD))) as (weights, contents, text):
        weights.write(safetensors.torch.save(tensors))
        contents.write(json.dumps(written, indent=1).encode())
        text.write(card.encode())


def _model_in(stored: Mapping[str, Any], path: Path, *, trusted: bool) -> dict[str, Any]:
    found: dict[str, Any] = config_in(stored, path, "model", trusted=trusted)["model"]
    return found


def push_to_hub(run: str | Path, repo: str, *, private: bool | None = None, trusted: bool = False) -> str:
    """Publish a run's policy as a repository of Hugging Face's hub, which is made if it is not there.

    Who publishes is whom ``huggingface_hub`` is logged in as, with the extra ``hub``.

    Args:
        run: As of :func:`save_pretrained`.
        repo: ``owner/name``.
        private: Whether a new repository is private; None for what the owner has as default.
        trusted: As of :func:`save_pretrained`.

    Returns:
        Where it is.

    Raises:
        ValueError: The name is none, or as of :func:`save_pretrained`.
        ImportError: The extra is missing.

    Examples:
        >>> push_to_hub("logs/run", "me/ppo-cartpole")  # doctest: +SKIP
    """
    if not _REPOSITORY.fullmatch(repo):
        raise ValueError(f"repo={repo!r} is no repository; expected 'owner/name'")
    hub = _hub()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(run, folder, name=repo, trusted=trusted)
        api = hub.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Publish a policy"))


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
    """Load a policy that :func:`save_pretrained` or :func:`push_to_hub` has written, to act with it on the CPU.

    Nothing in it is run, and no pickle is read. It may name the classes that a checkpoint may name.

    Args:
        source: A folder, or ``owner/name`` of a repository on Hugging Face's hub, with the extra ``hub``.
        module: As of :func:`load_policy`, like ``deterministic`` and ``trusted``.
        revision: Which one of a repository: a branch, a tag or a commit; its newest by default.
        deterministic: Whether the policy takes the mode of its distribution instead of a sample.
        trusted: Whether it may name classes of other packages, such as your own, which are then imported and built.
        limit: How many bytes the file of the weights may have; a larger one is not fetched.

    Raises:
        ValueError: There is none, it is too large, damaged or foreign, or as of :func:`load_policy`.
        ImportError: The extra is missing.

    Examples:
        >>> policy = from_pretrained("me/ppo-cartpole")  # doctest: +SKIP
        >>> policy.recipe()()  # doctest: +SKIP
    """
    stored = read_pretrained(source, revision=revision, limit=limit)
    return policy_in(stored, source, module, deterministic=deterministic, trusted=trusted)


def is_pretrained(source: str | Path) -> bool:
    """Return whether something is to be read by :func:`read_pretrained`, and is no run, nor a checkpoint."""
    if not Path(source).exists():
        return _REPOSITORY.fullmatch(str(source)) is not None
    return (Path(source) / _CONTENT).is_file()


@printable_errors()
def read_pretrained(
    source: str | Path, *, revision: str | None = None, limit: int = PRETRAINED_BYTES
) -> dict[str, Any]:
    """Read what a folder or a repository holds of a checkpoint; arguments and errors as of :func:`from_pretrained`."""
    limits = {_CONTENT: PRETRAINED_CONTENT, _WEIGHTS: limit}
    read = _local if Path(source).is_dir() else _downloaded
    paths = read(str(source), limits, revision)
    try:
        written = json.loads(paths[_CONTENT].read_bytes())
        check_state(written, {CONFIG: mapping, "content": mapping, SEAL: mapping}, _CONTENT, VERSION)
        tensors = safetensors.torch.load(paths[_WEIGHTS].read_bytes())
        stored = {**_joined(written["content"], tensors), CONFIG: written[CONFIG], SEAL: written[SEAL]}
        check_seal(stored, str(source))
    except Exception as error:  # a damaged or hostile file makes the readers of JSON and safetensors raise anything
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{source} holds no policy of ours: {type(error).__name__}: {reason}") from error
    return stored


def _local(source: str, limits: Mapping[str, int], revision: str | None) -> dict[str, Path]:
    paths = {name: Path(source) / name for name in limits}
    for name, path in paths.items():
        if not path.is_file():
            raise ValueError(f"{source} holds no {name}; expected a folder as save_pretrained writes it")
        _check_size(source, name, path.stat().st_size, limits[name])
    return paths


def _downloaded(source: str, limits: Mapping[str, int], revision: str | None) -> dict[str, Path]:
    if not _REPOSITORY.fullmatch(source):
        raise ValueError(f"{source} is neither a folder nor a repository, 'owner/name'")
    try:
        hub = _hub()
    except ImportError as error:
        raise ImportError(f"{source} is no folder; {error}") from error
    try:
        found = hub.HfApi().get_paths_info(source, list(limits), revision=revision)
        sizes = {each.path: each.size for each in found}
    except Exception as error:  # by whatever the client and the network raise
        raise _not_fetched(source, error) from error
    for name, most in limits.items():
        if not isinstance(sizes.get(name), int):
            raise ValueError(f"{source} holds no {name}; expected a repository as push_to_hub writes it")
        _check_size(source, name, sizes[name], most)
    try:
        paths = {name: Path(hub.hf_hub_download(source, name, revision=revision)) for name in limits}
    except Exception as error:
        raise _not_fetched(source, error) from error
    return _local(str(paths[_CONTENT].parent), limits, revision)


def _not_fetched(source: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"{source} is no folder, and cannot be read from the hub: {type(error).__name__}: {reason}")


def _check_size(source: str, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(
            f"{name} in {source} has {size} bytes, more than the limit of {limit}; a larger one takes limit="
        )


def _hub() -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError("the hub needs huggingface_hub: pip install 'torchrl-lightning[hub]'") from error


def _apart(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return plain data with names in the place of tensors, which are put aside; weights keep their own names."""
    if isinstance(node, Tensor):
        name = name.removeprefix("state_dict/")
        tensors[name] = node.detach().cpu().clone().contiguous()
        return {_TENSOR: name}
    if isinstance(node, Mapping):
        return {key: _apart(value, f"{name}/{key}" if name else key, tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_apart(value, f"{name}/{number}", tensors) for number, value in enumerate(node)]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"the checkpoint's {name} is a {type(node).__name__}; only plain data can be published")


def _joined(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return plain data with the tensors that it names."""
    if isinstance(node, dict):
        if set(node) == {_TENSOR}:
            return tensors[node[_TENSOR]]
        return {key: _joined(value, tensors) for key, value in node.items()}
    return [_joined(value, tensors) for value in node] if isinstance(node, list) else node
