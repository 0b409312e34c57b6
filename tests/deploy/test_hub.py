"""Policies are stored as folders of plain files and as hub repositories. A local folder replaces the hub."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from omegaconf import OmegaConf

from kit.runs import trainer
from torchrl_lightning import (
    OnPolicyDataModule,
    from_pretrained,
    load_policy,
    play_episodes,
    push_to_hub,
    save_pretrained,
)
from torchrl_lightning.agents import PPOModule, RecurrentNetwork
from torchrl_lightning.cli.config.instantiate import SaveConfig

NETWORK = {"_target_": "torchrl_lightning.RecurrentNetwork", "cell": "gru", "hidden_size": 4}
MODEL = {"_target_": "torchrl_lightning.PPOModule", "_convert_": "all", "network": NETWORK}
DATA = {"_target_": "torchrl_lightning.OnPolicyDataModule", "env": "CartPole-v1", "eval_episodes": 2}
FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a recurrent network, normalised observations and a final score."""
    folder = tmp_path_factory.mktemp("run")
    sizes = {"num_envs": 2, "frames_per_batch": 32, "num_mini_batch": 1, "num_epochs": 1, "seed": 0}
    data = OnPolicyDataModule("CartPole-v1", normalize_observation=True, **sizes)
    config = OmegaConf.create({"data": DATA, "model": MODEL, "eval_episodes": 20, "paths": {"log_dir": "/secret"}})
    content = ["experiment=ppo_recurrent_cartpole", "seed=3", "hydra.run.dir=/secret", "ckpt_path=/secret"]
    fit = trainer(max_epochs=2, limit_val_batches=0, callbacks=[SaveConfig(config, {}, content)])
    fit.fit(PPOModule(RecurrentNetwork("gru", 4)), datamodule=data)
    fit.save_checkpoint(folder / "checkpoints" / "best.ckpt")
    (folder / "csv").mkdir()
    (folder / "csv" / "metrics.csv").write_text("step,final/return\n32,\n64,123.5\n")
    return folder


@pytest.fixture(scope="module")
def saved(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "mine"
    save_pretrained(run, folder)
    return folder


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "changed"))


def test_folder_holds_the_policy_as_it_was_and_no_pickle(run, saved):
    assert sorted(path.name for path in saved.iterdir()) == FILES
    mine, theirs = load_policy(run), from_pretrained(saved)
    for name, weight in mine.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name
    rows = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for _ in range(3):
        assert theirs.act(rows).tolist() == mine.act(rows).tolist()
    assert theirs.specs == mine.specs
    assert play_episodes(theirs.recipe(), theirs, 1, seed=0)["episode_length"] > 5
    names = set(safetensors.torch.load_file(saved / "model.safetensors"))
    assert set(torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]) <= names


def test_card_contains_score_settings_and_commands(saved):
    text = (saved / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    content = yaml.safe_load(head)
    assert content["tags"] == ["reinforcement-learning", "torchrl", "PPOModule", "CartPole-v1"]
    (result,) = content["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 123.5
    assert "| mean return | 123.5 over 20 episodes, after training |" in body
    assert "| trained for | 64 frames |" in body
    assert "| action | Discrete(2) |" in body
    assert "torchrl-lightning-train experiment=ppo_recurrent_cartpole seed=3\n" in body
    assert f"torchrl-lightning-train experiment=ppo_recurrent_cartpole seed=3 init_from={saved}\n" in body
    settings = yaml.safe_load(body.partition("```yaml\n")[2].partition("```")[0])
    assert settings["model"]["network"] == NETWORK
    assert "secret" not in text + (saved / "config.json").read_text()
    namespace: dict[str, Any] = {}
    exec(body.partition("```python\n")[2].partition("```")[0].replace("print(total)", ""), namespace)
    assert namespace["total"] > 5


class Hub:
    """A client that stores repositories in a local folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.fetched = root, []

    def client(self) -> SimpleNamespace:
        return SimpleNamespace(HfApi=lambda: self, hf_hub_download=self.download)

    def create_repo(self, repo: str, *, private: bool | None, exist_ok: bool) -> None:
        (self.root / repo).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return f"hub/{repo_id}"

    def get_paths_info(self, repo: str, paths: list[str], *, revision: str | None) -> list[SimpleNamespace]:
        if not (self.root / repo).is_dir():
            raise RuntimeError(f"404\nno {repo}")
        files = (self.root / repo / path for path in paths)
        return [SimpleNamespace(path=path.name, size=path.stat().st_size) for path in files if path.is_file()]

    def download(self, repo: str, name: str, *, revision: str | None) -> str:
        self.fetched.append(name)
        return str(self.root / repo / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    namespace = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", namespace.client())
    monkeypatch.chdir(tmp_path)
    return namespace


def test_policy_is_uploaded_and_downloaded_unchanged(run, hub):
    assert push_to_hub(run, "me/cartpole", private=True) == "hub/me/cartpole"
    assert sorted(path.name for path in (hub.root / "me" / "cartpole").iterdir()) == FILES
    assert 'from_pretrained("me/cartpole")' in (hub.root / "me" / "cartpole" / "README.md").read_text()
    rows = np.ones((2, 4), np.float32)
    assert from_pretrained("me/cartpole").act(rows).tolist() == load_policy(run).act(rows).tolist()
    assert sorted(hub.fetched) == FILES[1:]


class HubError(OSError):
    """A client error with the hub's response, like HfHubHTTPError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Client Error for url: https://hub/api\n\n\x1b[31mThe hub says no.")
        self.response = SimpleNamespace(status_code=status)


LocalTokenNotFoundError = type("LocalTokenNotFoundError", (OSError,), {})
OfflineModeIsEnabled = type("OfflineModeIsEnabled", (ConnectionError,), {})
ConnectError = type("ConnectError", (Exception,), {"__module__": "httpx"})

RemoteProtocolError = type("RemoteProtocolError", (Exception,), {"__module__": "httpx2._exceptions"})


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


HUB_ERRORS = {
    "no login": (HubError(401), "hf auth login.*write access to me/cartpole"),
    "no token": (LocalTokenNotFoundError("Token is required"), "hf auth login"),
    "no rights": (HubError(403), "write access to me/cartpole.*repository of your own"),
    "no owner": (HubError(404), "Correct owner and name"),
    "too many requests": (HubError(429), "try again later"),
    "failing hub": (HubError(503), "try again later"),
    "no network": (ConnectionError("Connection refused"), "Check the network"),
    "no answer": (TimeoutError("timed out"), "Check the network"),
    "no network in httpx": (ConnectError("[Errno 111]"), "Check the network"),
    "no answer in httpx2": (RemoteProtocolError("Server disconnected"), "Check the network"),
    "no network below": (caused(RuntimeError("failed"), ConnectionError("refused")), "Check the network"),
    "offline": (OfflineModeIsEnabled("offline mode\nis enabled"), "Unset HF_HUB_OFFLINE"),
    "another": (RuntimeError("bad\nname"), "Correct the cause"),
}


@pytest.mark.parametrize("method", ["create_repo", "upload_folder"])
@pytest.mark.parametrize("name", HUB_ERRORS)
def test_failed_upload_names_repository_cause_and_remedy(name, method, run, hub, monkeypatch):
    error, remedy = HUB_ERRORS[name]

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hub, method, fail, raising=True)
    with pytest.raises(ValueError, match=rf"^me/cartpole cannot be .*{type(error).__name__}: .*{remedy}") as raised:
        push_to_hub(run, "me/cartpole")
    assert len(str(raised.value).splitlines()) == 1
    assert "\x1b" not in str(raised.value)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "remedy"), [(HubError(401), "hf auth login"), (ConnectionError("no"), "the network")]
)
def test_failed_download_names_the_remedy(error, remedy, hub, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hub, "get_paths_info", fail)
    with pytest.raises(ValueError, match=rf"^me/cartpole is not a folder.*{remedy}"):
        from_pretrained("me/cartpole")


def test_files_that_are_too_large_or_missing_are_not_downloaded(run, hub):
    push_to_hub(run, "me/cartpole")
    with pytest.raises(ValueError, match=r"model.safetensors.*me/cartpole.*99"):
        from_pretrained("me/cartpole", limit=99)
    with pytest.raises(ValueError, match=r"me/other.*RuntimeError: 404.*me/other$"):
        from_pretrained("me/other")
    (hub.root / "me" / "cartpole" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"me/cartpole.*config.json"):
        from_pretrained("me/cartpole")
    assert not hub.fetched
    with pytest.raises(ValueError, match="repo='cartpole'"):
        push_to_hub(run, "cartpole")


def test_saved_folder_is_refused_as_a_run(saved, hub, tmp_path):
    for publish in (partial(save_pretrained, saved, tmp_path / "again"), partial(push_to_hub, saved, "me/cartpole")):
        with pytest.raises(ValueError, match=rf"{saved}.*OWNER/NAME {saved}"):
            publish()
    assert not (tmp_path / "again").exists()


def test_classes_of_other_packages_are_published_only_if_trusted(run, tmp_path):
    stored = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    own = {"_target_": "kit.networks.Own"}
    torch.save({**stored, "checksums": {}, "config": {"model": {**MODEL, "network": own}}}, tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match=r"'kit\.networks\.Own'.*trusted=True$"):
        save_pretrained(tmp_path / "own.ckpt", tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"^me/cartpole.*'torchrl-lightning\[hub\]'$"):
        from_pretrained("me/cartpole")


def edit(folder: Path, change: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda content: content["config"]["model"].update(_target_="os.system"),
            "'os.system' is none of the classes that",
        ),
        (
            lambda content: content["config"]["model"]["network"].update(hidden_size=10**7),
            "hidden_size=10000000 is more",
        ),
        (lambda content: content["content"]["OnPolicyDataModule"].pop("specs"), "is damaged: 'OnPolicyDataModule'"),
        (lambda content: content.update(schema_version=2), "has schema version 2, this release reads version 1"),
        (lambda content: content.update(content=[[]]), "'content' is a list"),
        (lambda content: content["content"].update(state_dict={"__tensor__": "none"}), "KeyError"),
        (lambda content: content["content"].update(state_dict={}), "is damaged: 'state_dict'"),
    ],
)
def test_foreign_folder_is_refused_in_one_line(change, message, changed):
    edit(changed, change)
    with pytest.raises(ValueError, match=message) as raised:
        from_pretrained(changed)
    assert "\n" not in str(raised.value)


def test_changed_bit_and_truncated_file_are_detected(changed):
    data = bytearray((changed / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (changed / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: "):
        from_pretrained(changed)
    (changed / "model.safetensors").write_bytes(data[:-9])
    with pytest.raises(ValueError, match="SafetensorError"):
        from_pretrained(changed)
    with pytest.raises(ValueError, match="is neither a folder nor a repository"):
        from_pretrained(changed / "config.json")


def test_failed_save_leaves_existing_files_unchanged(run, changed, tmp_path):
    before = {path.name: path.read_bytes() for path in changed.iterdir()}
    stored = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    for change, message in (
        ({"config": None}, "contains no config"),
        ({"OnPolicyDataModule": None}, "no environment specs"),
        ({"config": {"model": {**MODEL, "network": {**NETWORK, "hidden_size": 5}}}}, "the networks differ"),
    ):
        torch.save({**stored, "checksums": {}, **change}, tmp_path / "b.ckpt")
        with pytest.raises(ValueError, match=message):
            save_pretrained(tmp_path / "b.ckpt", changed)
    assert {path.name: path.read_bytes() for path in changed.iterdir()} == before
