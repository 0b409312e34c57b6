"""Rollout hooks of a buffer that replay, mine, save and read demonstrations."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lightning._core.files import check_writable
from torchrl_lightning._core.keys import REPLAYED, VALUE
from torchrl_lightning._core.protocols import EnvsApi
from torchrl_lightning._core.rank_metrics import Mean, Sum
from torchrl_lightning._core.ranks import all_gather, broadcast_from_rank_zero, this_rank
from torchrl_lightning._core.return_threshold import reaches
from torchrl_lightning._core.state import (
    Attribute,
    Child,
    Stateful,
    bounded_integer,
    check_state,
    flag,
    mapping,
    sequence,
)
from torchrl_lightning._core.validators import check_defaults, integer
from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.demo_sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.demo_writer import DemonstrationWriter
from torchrl_lightning.demonstrations.io.directory import DemonstrationDirectory
from torchrl_lightning.demonstrations.io.recording import demonstration_specs
from torchrl_lightning.demonstrations.io.safetensors_files import read_demonstration
from torchrl_lightning.demonstrations.io.saved_dtypes import check_saved_dtypes, with_saved_dtypes
from torchrl_lightning.demonstrations.miner import DemonstrationMiner
from torchrl_lightning.demonstrations.replay.actor import DemonstrationActor
from torchrl_lightning.demonstrations.replay.collector_replay import DemonstrationReplay, End, LogProb
from torchrl_lightning.demonstrations.replay.transform import DemonstrationReplayTransform
from torchrl_lightning.demonstrations.task_check import known_recipe, recipe_metadata
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.environments.env_ids import env_ids
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.rollout.hooks import RolloutHooks

_logger = logging.getLogger(__name__)


class DemonstrationSettings(Protocol):
    """The demonstration settings of a buffer, read at each use; see :class:`PPODBuffer`."""

    envs: Any
    initial_human_demos_dir: str | None
    initial_agent_demos_dir: str | None
    supplementary_demos_dir: str | None
    target_agent_demos_dir: str | None
    num_agent_demos_to_save: int
    initial_reward_threshold: float | None
    save_demos_every: int
    demo_dtypes: dict[str, torch.dtype]
    ends: End
    log_prob: LogProb
    save_value_demos: bool
    human_share: float
    shared_demos: bool


def _miner_states(miners: dict[int, DemonstrationMiner]) -> dict[str, Any]:
    return {str(first): miner.state_dict() for first, miner in miners.items()}


class DemonstrationHooks(Stateful, RolloutHooks):
    """Replay demonstrations in a buffer's rollouts, extract new ones from the rollouts, and save and read them.

    Args:
        settings: the directories, the number of saved demonstrations, and the replay options.
        writer: selects the demonstrations to store, and contains the storage.
        sampler: draws the demonstrations to replay.
        frame_skip: number of frames in one step; None reads the number from the environment in :meth:`attach`.
    """

    OWNER, VERSION = "demonstrations", 1
    STATE = {
        "storage": Child(),
        "writer": Child(),
        "replay": Attribute(check_for=lambda hooks: hooks._read_replay, attribute="_replay_state"),
        "miners": Attribute(check_for=lambda hooks: hooks._read_miners, attribute="_miners", to_saved=_miner_states),
        "rollouts": Attribute(bounded_integer(), "_num_rollouts"),
        "is_tracked": Attribute(flag, "_is_tracked"),
        "taken": Attribute(sequence, "_read_files"),
    }

    def __init__(
        self,
        settings: DemonstrationSettings,
        writer: DemonstrationWriter,
        sampler: DemonstrationSampler,
        frame_skip: int | None = None,
    ) -> None:
        self.settings, self.storage, self.writer, self.sampler = settings, writer.storage, writer, sampler
        self.frame_skip = frame_skip
        """Number of frames in one step; None until :meth:`attach` reads the number from the environment."""
        self._make_replay(1, 1)  # raises an error for invalid options
        self._specs: EnvironmentSpecs | None = None
        self._recipe: EnvironmentRecipe | None = None
        self.replay: DemonstrationReplay | None = None
        """The replay for a collector; None before :meth:`attach`."""
        self._miners: dict[int, DemonstrationMiner] = {}  # the keys are the first environment of each worker
        self._supplementary: DemonstrationDirectory | None = None
        self._waiting: list[Demonstration] = []  # read from the supplementary directory, not loaded yet
        self._target: DemonstrationDirectory | None = None
        self._is_wrapped = False  # True if TorchRL steps the environment with the policy's actions
        self._collected: TensorDictBase | None = None
        self._is_tracked = False  # True if the stored rollout was mined
        self._num_rollouts = 0
        self._success: float | None = None

    # ---- around a rollout --------------------------------------------------------------------------------------------

    def _make_replay(self, num_envs: int, frame_stack: int) -> DemonstrationReplay:
        ends, log_prob = self.settings.ends, self.settings.log_prob
        options: dict[str, Any] = {"ends": ends, "log_prob": log_prob, "frame_stack": frame_stack}
        return DemonstrationReplay(self.storage, self.sampler, num_envs, **options)

    def attach(self, env: Any, num_envs: int) -> None:
        """Prepare the replay in an environment, and read the directories."""
        specs, env_frame_skip = demonstration_specs(env)
        if self.frame_skip is None:
            configured = (EnvsApi.of(self.settings.envs).env_kwargs or {}).get("frame_skip")
            self.frame_skip = env_frame_skip if configured is None else integer(configured, "frame_skip")
        check_saved_dtypes(self.settings.demo_dtypes, specs)
        if self.settings.target_agent_demos_dir is None:
            check_defaults(
                "without target_agent_demos_dir",
                "give target_agent_demos_dir",
                demo_dtypes=(self.settings.demo_dtypes or None, None),
            )
        self._specs = specs
        self._recipe = known_recipe(env)
        self.replay = self._make_replay(num_envs, 1 if self._recipe is None else self._recipe.frame_stack)
        self.load_initial()
        self._open_supplementary()
        if self.settings.target_agent_demos_dir is not None:
            check_writable(Path(self.settings.target_agent_demos_dir), "target_agent_demos_dir")
        self._warn(specs)

    def _warn(self, specs: EnvironmentSpecs) -> None:
        """Warn if failures may count as successes, human_share is useless, or the probability ratio is meaningless."""
        threshold, configured = self.writer.threshold, self.settings.initial_reward_threshold
        is_rewarded = any(bool((demo.rewards > 0).any()) for demo in self.storage.reward_demonstrations)
        if reaches(0.0, threshold) and not is_rewarded and (configured is None or configured >= 0):
            _logger.warning(
                "Failures may count as successes and be replayed: the threshold of a success is the return %g, and no "
                "demonstration has a positive reward. Set initial_reward_threshold "
                "(data.buffer.initial_reward_threshold) to the lowest return of a success.",
                threshold,
            )
        if self.settings.human_share and not self.storage.num_human:
            _logger.warning(
                "human_share=%g has no effect without human demonstrations. Set initial_human_demos_dir "
                "(data.buffer.initial_human_demos_dir).",
                self.settings.human_share,
            )
        if specs.action.dtype.is_floating_point and self.settings.log_prob == "deterministic":
            _logger.warning(
                'log_prob="deterministic" compares the density of continuous actions with 1, so that the ratio depends '
                'on their scale. Set log_prob="current" (data.buffer.log_prob=current).'
            )

    def wrap_env(self, env: Any) -> Any:
        """Wrap a TorchRL environment with the replay. Collectors of other environments use :attr:`replay`."""
        if not isinstance(env, EnvBase) or self.replay is None:
            return env
        self._is_wrapped = True
        return DemonstrationReplayTransform(self.replay).wrap(env)

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Wrap the policy so that it repeats replayed actions, if :meth:`wrap_env` wrapped the environment."""
        return DemonstrationActor(policy, self.settings.log_prob) if self._is_wrapped else policy

    def on_collected(self, rollout: TensorDictBase) -> None:
        """Store the collected ``rollout``, ``[N, T]``, which will be mined instead of the buffer's stored rollout."""
        self._collected = rollout

    def on_estimated(self, rollout: TensorDictBase, value_key: NestedKey) -> None:
        """Mine a rollout, and save and read demonstrations. Each rollout is used once."""
        if self._is_tracked or self._specs is None:
            return
        self._is_tracked = True
        self.mine(self.collected(rollout, value_key))
        self._collected = None
        self.load_supplementary()
        self._num_rollouts += 1
        if self._num_rollouts % self.settings.save_demos_every == 0:
            self.save()

    def discard(self) -> None:
        """Forget the stored rollout."""
        self._is_tracked, self._collected = False, None

    def metrics(self, rollout: TensorDictBase | None) -> dict[str, float]:
        """Return the number of demonstrations, their probabilities, and statistics of the last rollout.

        ``demos/D_R`` and ``demos/D_V`` are ``|D_R|`` and ``|D_V|``. ``demos/replayed`` is the share of replayed
        steps. ``demos/success`` is the share of successes among the agent's finished episodes. With ``shared_demos``
        all ranks have the same demonstrations and the same successes.
        """
        rho, phi = self.sampler.probabilities(self.storage)
        count: type[float] = float if self.settings.shared_demos else Sum
        kinds = {"R": self.storage.reward_demonstrations, "V": self.storage.value_demonstrations}
        values = {
            **{f"demos/D_{kind}": count(len(demonstrations)) for kind, demonstrations in kinds.items()},
            "demos/rho": rho,
        }
        values["demos/phi"] = phi
        if self.writer.threshold > -float("inf"):
            values["demos/threshold"] = self.writer.threshold
        replayed = None if rollout is None else rollout.get(REPLAYED, None)
        if replayed is not None:
            values["demos/replayed"] = replayed.float().mean().item()
        if self._success is not None:
            values["demos/success"] = self._success
        return values

    def choose(self, env_id: int) -> Demonstration | None:
        """Return a sampled demonstration for an environment's next episode, or None, and schedule the replay."""
        self.require_specs()
        assert self.replay is not None
        return self.replay.choose(env_id)

    # ---- mining ------------------------------------------------------------------------------------------------------

    def mine(self, rows: TensorDictBase) -> None:
        """Track the episodes of a rollout ``[T, N]`` with values, and add finished episodes as demonstrations."""
        ids = env_ids(rows, time_dim=0)
        first = 0 if ids is None else int(ids[0])
        if first not in self._miners:
            self._miners[first] = self._make_miner(rows.shape[1])
        miner, successes = self._miners[first], self.storage.successes
        finished = miner.finished(rows)
        if self.settings.shared_demos:
            finished = [episode for rank in all_gather([episode.copied() for episode in finished]) for episode in rank]
        for episode in finished:
            miner.add(episode)
        num_own = sum(episode.demonstration is not None for episode in finished)
        self._success = Mean((self.storage.successes - successes) / num_own, num_own) if num_own else None

    def _make_miner(self, num_envs: int) -> DemonstrationMiner:
        return DemonstrationMiner(
            self.writer,
            num_envs,
            specs=self.require_specs(),
            frame_skip=self.frame_skip or 1,
            metadata=recipe_metadata(self._recipe),
        )

    def collected(self, stored: TensorDictBase, value_key: NestedKey) -> TensorDictBase:
        """Return the rollout in its collected form, ``[T, N]``, with its values."""
        rows = (stored if self._collected is None else self._collected.transpose(0, 1)).copy()
        value = stored.get(value_key, None)
        if isinstance(value, TensorDictBase):  # several critics have a value each
            value = torch.stack([*value.values(True, True)]).mean(0)
        rows.pop(VALUE, None)
        if isinstance(value, Tensor):
            rows[VALUE] = value.to(rows.device or value.device)
        rows.names = ["time", None]
        return rows.to("cpu")

    # ---- files -------------------------------------------------------------------------------------------------------

    def require_specs(self) -> EnvironmentSpecs:
        """Return the specs of the environment; raise a RuntimeError before :meth:`attach`."""
        if self._specs is None:
            raise RuntimeError("The environment of the demonstrations is unknown; call attach(env, num_envs) first.")
        return self._specs

    def _directory(self, path: str, **options: Any) -> DemonstrationDirectory:
        return DemonstrationDirectory(path, self.require_specs(), self.frame_skip or 1, recipe=self._recipe, **options)

    def read(self, path: str | Path) -> Demonstration:
        """Read and return a demonstration without storing it, and check that it fits the environment."""
        specs = self.require_specs()
        demonstration = read_demonstration(path, specs)
        demonstration.fits(specs, self.frame_skip or 1, self._recipe)
        return demonstration

    def load_initial(self) -> None:
        """Replace all stored demonstrations by the demonstrations in the initial directories; see :meth:`attach`."""
        human = self._read_initial("initial_human_demos_dir", is_human=True)
        agent = self._read_initial("initial_agent_demos_dir", is_human=False)
        capacity = self.storage.capacity
        if len(human) + len(agent) > capacity:
            raise DemonstrationFault(
                f"total_buffer_demo_capacity must be at least the number of initial demonstrations, {len(human)} human "
                f"and {len(agent)} of the agent, got {capacity}. Remove demonstrations, or raise it."
            )
        self.storage.replace([], [])
        self.writer.load([*human, *agent])

    def _read_initial(self, name: str, is_human: bool) -> tuple[Demonstration, ...]:
        path = getattr(self.settings, name)
        if path is None:
            return ()
        try:
            return self._directory(path, human=is_human).initial
        except (OSError, ValueError) as error:
            raise DemonstrationFault(f"{name}={path}: {error}") from error

    def load_supplementary(self) -> None:
        """Load new demonstrations from the supplementary directory; skip returns below the threshold."""
        if self._supplementary is None:
            return
        demonstrations: list[Demonstration] = []
        if not self.settings.shared_demos or this_rank() == 0:
            demonstrations, self._waiting = [*self._waiting, *self._supplementary.poll()], []
        if self.settings.shared_demos:
            demonstrations = broadcast_from_rank_zero(demonstrations)
        for demonstration in demonstrations:
            episode_return, threshold = demonstration.total_reward, self.writer.threshold
            if not reaches(episode_return, threshold):
                _logger.info(
                    "Skipped %s: its return %g is below the threshold %g.",
                    demonstration.name,
                    episode_return,
                    threshold,
                )
                continue
            try:
                self.writer.load([demonstration])
            except ValueError as error:
                _logger.warning("Skipped %s: %s", demonstration.name, error)

    def _open_supplementary(self, skipped: Collection[str] = ()) -> None:
        path = self.settings.supplementary_demos_dir
        if path is not None:
            check_writable(Path(path), "supplementary_demos_dir")
            Path(path).mkdir(parents=True, exist_ok=True)
            self._supplementary = self._directory(path, human=False, may_be_empty=True, taken=skipped)
            self._waiting = [*self._supplementary.initial]

    def save(self) -> None:
        """Save the agent's best demonstrations into the target directory, in place of the previous save.

        ``reward_demo_1.safetensors`` has the highest return. If returns are equal, the newest demonstration is first.
        With ``save_value_demos``, ``value_demo_1.safetensors`` has the highest value.
        """
        rank = 0 if self.settings.shared_demos else this_rank()
        if self.settings.target_agent_demos_dir is None or (self.settings.shared_demos and this_rank() > 0):
            return
        if self._target is None:
            path = Path(self.settings.target_agent_demos_dir)
            self._target = self._directory(str(path / f"rank_{rank}" if rank else path), may_be_empty=True)
        agent_demos = [demo for demo in reversed(self.storage.reward_demonstrations) if not demo.is_human]
        best = {"reward": sorted(agent_demos, key=lambda demo: -demo.total_reward)}
        if self.settings.save_value_demos:
            best["value"] = sorted(self.storage.value_demonstrations, key=lambda demo: -demo.value)
        files = {
            f"{kind}_demo_{number}": with_saved_dtypes(demo, self.settings.demo_dtypes)
            for kind, ranked in best.items()
            for number, demo in enumerate(ranked[: self.settings.num_agent_demos_to_save], 1)
        }
        self._target.save([*files.values()], [*files])

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def _replay_state(self) -> dict[str, Any]:
        return {} if self.replay is None else self.replay.state_dict()

    @_replay_state.setter
    def _replay_state(self, state: Mapping[str, Any]) -> None:
        if self.replay is not None:
            self.replay.load_state_dict(state)

    def _read_replay(self, value: Any, name: str) -> Mapping[str, Any]:
        state = mapping(value, name)
        if self.replay is not None:
            self.replay.check_state(state)
        return state

    def _read_miners(self, value: Any, name: str) -> dict[int, DemonstrationMiner]:
        miners = {}
        for first, state in mapping(value, name).items():
            if not first.isdecimal():
                raise ValueError(f"The {self.OWNER} state has a miner of environment {first!r}, expected a number.")
            check_state(state, {"num_envs": bounded_integer(1), "running": sequence}, DemonstrationMiner.OWNER)
            miners[int(first)] = miner = self._make_miner(len(state["running"]))
            miner.load_state_dict(state)
        return miners

    @property
    def _read_files(self) -> list[str]:
        read_names = set() if self._supplementary is None else self._supplementary.taken
        return sorted(read_names - {Path(demo.name).name for demo in self._waiting})

    @_read_files.setter
    def _read_files(self, names: Collection[str]) -> None:
        if self.replay is not None:
            self._open_supplementary(names)
