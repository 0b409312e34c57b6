"""The on-policy buffer of PPO with demonstrations."""

from __future__ import annotations

__all__ = ["PPODBuffer"]

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.actor import DemonstrationActor
from torchrl_lightning.demonstrations.annealing import Schedule
from torchrl_lightning.demonstrations.directory import DemonstrationDirectory
from torchrl_lightning.demonstrations.files import read_demonstration
from torchrl_lightning.demonstrations.miner import DemonstrationMiner
from torchrl_lightning.demonstrations.recording import demonstration_specs
from torchrl_lightning.demonstrations.replay import DemonstrationReplay, End, LogProb
from torchrl_lightning.demonstrations.replay_transform import DemonstrationReplayTransform
from torchrl_lightning.demonstrations.sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.saved_dtypes import FIELDS, check_saved_dtypes, saved_dtypes, with_saved_dtypes
from torchrl_lightning.demonstrations.storage import DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.demonstrations.writer import DemonstrationWriter
from torchrl_lightning.environments import EnvironmentRecipe, EnvironmentSpecs
from torchrl_lightning.environments.origins import env_ids
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import Check, boolean, fraction, integer, not_negative, optional
from torchrl_lightning.ranks import gathered, of_first_rank, this_rank
from torchrl_lightning.rollout import GAEBuffer
from torchrl_lightning.rollout.names import DOCUMENTED
from torchrl_lightning.rollout.values import RECURRENT_KEYS
from torchrl_lightning.rollout.writer import time_major
from torchrl_lightning.state import check_state, flag, mapping, sequence, whole

STATE_VERSION = 1
_logger = logging.getLogger(__name__)
_PARTS = ("storage", "writer", "replay")


class PPODBuffer(GAEBuffer):
    """On-policy buffer of PPO with demonstrations (Libardi et al. 2021, arXiv:2007.03328), over :class:`GAEBuffer`.

    Where an episode begins, a demonstration may be played in its place (:class:`DemonstrationSampler`); its steps are
    learned from like the agent's own. After each rollout the agent's finished episodes are offered as demonstrations
    (:class:`DemonstrationWriter`), and those that were replayed get the value that the critic gives them now.

    :meth:`attach` names the environment and reads the directories; then :attr:`replay` is what a collector replays.
    DataModules do both.

    Args:
        size: as in :class:`VanillaOnPolicyBuffer`, here and in the next four.
        rho: probability of a reward demonstration, before the first success.
        phi: probability of a value demonstration, before the first success.
        gae_lambda: λ.
        alpha: how much more likely value demonstrations of higher values are: ``P ~ max(v, 0) ** alpha``.
        total_buffer_demo_capacity: most demonstrations of both kinds.
        initial_human_demos_dir: demonstrations that are always kept.
        initial_agent_demos_dir: demonstrations that give way to better ones, such as those of an earlier run.
        supplementary_demos_dir: looked into before each update for demonstrations that come while training runs; those
            whose return reaches the threshold are taken. Made if it is missing.
        target_agent_demos_dir: where the agent's best demonstrations are saved; nowhere if None.
        num_agent_demos_to_save: how many of them, of those of highest return, and of highest value.
        initial_reward_threshold: lowest return of a success; that of the worst reward demonstration, if higher or None.
        save_demos_every: rollouts between two savings.
        demo_dtypes: dtypes of what is saved, by the documented names ``Observation``, ``Action`` and ``Reward``; those
            of the environment where none is named. Rewards are rounded to theirs.
        annealing: how successes move probability from value to reward demonstrations, see
            :class:`DemonstrationAnnealing`.
        cut_after_reward: whether the agent's demonstrations end with the last positive reward.
        ends: how a replayed demonstration ends, see :class:`DemonstrationReplay`.
        log_prob: log-probability of replayed actions, see :class:`DemonstrationReplay`.
        save_value_demos: save value demonstrations too.
        shared_demos: whether all ranks keep the same demonstrations, mined by any of them; else each keeps its own.
            Then the first one alone saves; else the others save to folders ``rank_1``, ... below the target.
        frame_skip: frames of one step, which demonstrations must have too; that of the environment's recipe if None.
        gamma: as in :class:`VanillaOnPolicyBuffer`, here and below.

    Raises:
        ValueError: A probability is outside ``[0, 1]``, their sum too, or another argument is out of range.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import GymnasiumCollector
        >>> buffer = PPODBuffer(4, rho=1.0, phi=0.0, bootstrap=False)
        >>> buffer.attach("CartPole-v1", num_envs=1)
        >>> steps = TensorDict({"observation": torch.zeros(2, 4), "action": torch.tensor([0, 1])}, [2])
        >>> steps["next", "reward"] = torch.tensor([[0.0], [1.0]])
        >>> buffer.demonstration_writer.load([Demonstration(steps, is_human=True)])
        >>> collector = GymnasiumCollector("CartPole-v1", frames_per_batch=4, replay=buffer.replay)
        >>> buffer.insert_data_slice(collector.rollout())
        >>> buffer.before_gradients()
        >>> buffer.rollout["next", "reward"].flatten().tolist(), buffer.metrics()["demos/replayed"]
        ([0.0, 1.0, 0.0, 1.0], 1.0)
    """

    on_policy_data_fields: ClassVar[tuple[str, ...]] = tuple(DOCUMENTED)
    """The documented names of what rollouts hold."""
    demos_data_fields: ClassVar[tuple[str, ...]] = FIELDS
    """The documented names of what demonstrations hold."""
    parameters: ClassVar[Mapping[str, Check]] = {
        **GAEBuffer.parameters,
        "rho": fraction,
        "phi": fraction,
        "alpha": not_negative,
        "num_agent_demos_to_save": lambda value, name: integer(value, name, 0),
        "save_demos_every": integer,
    }

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        actor: Any = None,
        algorithm: Any = None,
        envs: Any = None,
        rho: float = 0.1,
        phi: float = 0.3,
        gae_lambda: float = 0.95,
        alpha: float = 10,
        total_buffer_demo_capacity: int = 51,
        initial_human_demos_dir: str | None = None,
        initial_agent_demos_dir: str | None = None,
        supplementary_demos_dir: str | None = None,
        target_agent_demos_dir: str | None = None,
        num_agent_demos_to_save: int = 10,
        initial_reward_threshold: float | None = None,
        save_demos_every: int = 10,
        demo_dtypes: Mapping[str, torch.dtype | str] | None = None,
        *,
        annealing: Schedule = "linear",
        cut_after_reward: bool = True,
        ends: End = "recorded",
        log_prob: LogProb = "deterministic",
        save_value_demos: bool = False,
        shared_demos: bool = False,
        frame_skip: int | None = None,
        gamma: float | None = None,
        critic: TensorDictModuleBase | None = None,
        intrinsic_critic: TensorDictModuleBase | None = None,
        gamma_intrinsic: float | None = None,
        normalize_intrinsic: bool = True,
        intrinsic_direction: Literal["forward", "backward"] = "forward",
        standardize_advantages: bool = True,
        recompute_values: bool = False,
        bootstrap: bool = True,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        frame_stack: int | None = None,
        num_envs: int | None = None,
        time_dim: int | None = None,
        recurrent: bool | None = None,
        recurrent_keys: tuple[NestedKey, ...] = RECURRENT_KEYS,
        batch_keys: Collection[NestedKey] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        transform: Any = None,
    ) -> None:
        super().__init__(**passed_on(GAEBuffer, locals()))
        self.demonstrations = DemonstrationStorage(integer(total_buffer_demo_capacity, "total_buffer_demo_capacity"))
        self.demonstration_writer = DemonstrationWriter(
            self.demonstrations,
            reward_threshold=initial_reward_threshold,
            cut_after_reward=cut_after_reward,
            annealing=annealing,
        )
        self.demonstration_sampler = DemonstrationSampler(rho, phi, alpha, self.generator)
        self.initial_human_demos_dir, self.initial_agent_demos_dir = initial_human_demos_dir, initial_agent_demos_dir
        self.supplementary_demos_dir, self.target_agent_demos_dir = supplementary_demos_dir, target_agent_demos_dir
        self.num_agent_demos_to_save = integer(num_agent_demos_to_save, "num_agent_demos_to_save", 0)
        self.save_demos_every = integer(save_demos_every, "save_demos_every")
        self.demo_dtypes = saved_dtypes(demo_dtypes)
        self.save_value_demos = boolean(save_value_demos, "save_value_demos")
        self.shared_demos = boolean(shared_demos, "shared_demos")
        self.frame_skip = optional(integer)(frame_skip, "frame_skip")
        self._options: dict[str, Any] = {"ends": ends, "log_prob": log_prob}
        DemonstrationReplay(self.demonstrations, self.demonstration_sampler, 1, **self._options)  # checks them
        self._specs: EnvironmentSpecs | None = None
        self._replay: DemonstrationReplay | None = None
        self._miners: dict[int, DemonstrationMiner] = {}  # by the first environment of each worker
        self._supplementary: DemonstrationDirectory | None = None
        self._waiting: list[Demonstration] = []  # found in that directory, and not taken yet
        self._target: DemonstrationDirectory | None = None
        self._is_wrapped = False  # whether TorchRL steps the environment, which takes the policy's actions
        self._collected: TensorDictBase | None = None
        self._is_tracked = False  # whether what is stored was looked through
        self._num_rollouts = 0
        self._success: float | None = None

    @classmethod
    def create_factory(  # type: ignore[override]  # the documented order
        cls,
        size: int,
        rho: float = 0.1,
        phi: float = 0.3,
        gae_lambda: float = 0.95,
        alpha: float = 10,
        **options: Any,
    ) -> Callable[..., Self]:
        """Return ``f(device, actor, algorithm, envs)`` that builds a buffer of this class, of these options."""
        return super().create_factory(size, gae_lambda=gae_lambda, rho=rho, phi=phi, alpha=alpha, **options)

    # ---- the demonstrations ------------------------------------------------------------------------------------------

    @property
    def rho(self) -> float:
        """Probability of a reward demonstration by now; setting it sets that before the first success."""
        return self.demonstration_sampler.probabilities(self.demonstrations)[0]

    @rho.setter
    def rho(self, rho: float) -> None:
        self.demonstration_sampler.set_probabilities(rho=rho)

    @property
    def phi(self) -> float:
        """Probability of a value demonstration by now; setting it sets that before the first success."""
        return self.demonstration_sampler.probabilities(self.demonstrations)[1]

    @phi.setter
    def phi(self, phi: float) -> None:
        self.demonstration_sampler.set_probabilities(phi=phi)

    @property
    def alpha(self) -> float:
        """Exponent of values in the probability of value demonstrations."""
        return self.demonstration_sampler.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self.demonstration_sampler.alpha = not_negative(alpha, "alpha")

    @property
    def reward_demos(self) -> tuple[Demonstration, ...]:
        """``D_R``, human demonstrations first."""
        return self.demonstrations.reward_demonstrations

    @property
    def value_demos(self) -> tuple[Demonstration, ...]:
        """``D_V``."""
        return self.demonstrations.value_demonstrations

    @property
    def reward_threshold(self) -> float:
        """Lowest return of a success by now."""
        return self.demonstration_writer.threshold

    @property
    def replay(self) -> DemonstrationReplay | None:
        """What a collector replays; None before :meth:`attach`."""
        return self._replay

    def attach(self, env: Any = None, num_envs: int | None = None) -> None:
        """Prepare to replay demonstrations in an environment, and read the directories.

        Args:
            env: id, recipe, factory or ready environment, as a DataModule takes it; ``envs`` if None.
            num_envs: how many are stepped side by side; as many as ``envs`` has if None.

        Raises:
            DemonstrationFault: A directory of initial demonstrations is missing or holds none that can be used in this
                environment, there are more than the capacity, or ``demo_dtypes`` cannot hold what is saved.
        """
        env, num_envs = self.envs if env is None else env, self.num_envs if num_envs is None else num_envs
        if env is None or num_envs is None:
            raise ValueError("attach() needs an environment and num_envs, or a buffer that was built with envs=.")
        specs, frame_skip = demonstration_specs(env)
        told = (getattr(self.envs, "env_kwargs", None) or {}).get("frame_skip")
        if self.frame_skip is None:
            self.frame_skip = frame_skip if told is None else integer(told, "frame_skip")
        check_saved_dtypes(self.demo_dtypes, specs)
        self._specs = specs
        stack = env.frame_stack if isinstance(env, EnvironmentRecipe) else 1
        self._replay = DemonstrationReplay(
            self.demonstrations, self.demonstration_sampler, num_envs, frame_stack=stack, **self._options
        )
        self.load_initial_demos()
        self._look_for_supplementary()

    def _attached(self) -> EnvironmentSpecs:
        if self._specs is None:
            raise RuntimeError("The environment of the demonstrations is unknown; call attach(env, num_envs) first.")
        return self._specs

    def _directory(self, path: str, **options: Any) -> DemonstrationDirectory:
        return DemonstrationDirectory(path, self._attached(), self.frame_skip or 1, **options)

    def load_demo(self, demo_path: str | Path) -> Demonstration:
        """Read a demonstration, and refuse it if it does not fit the environment; it is not kept.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is damaged, or was recorded in another environment; the message names it.
        """
        specs = self._attached()
        demonstration = read_demonstration(demo_path, specs)
        demonstration.fits(specs, self.frame_skip or 1)
        return demonstration

    def load_initial_demos(self) -> None:
        """Keep what the initial directories hold in the place of all that was kept; see :meth:`attach`."""
        human = self._initial("initial_human_demos_dir", is_human=True)
        agent = self._initial("initial_agent_demos_dir", is_human=False)
        capacity = self.demonstrations.capacity
        if len(human) + len(agent) > capacity:
            raise DemonstrationFault(
                f"There are {len(human)} human and {len(agent)} agent demonstrations at start, more than "
                f"total_buffer_demo_capacity={capacity}; take some away, or enlarge it."
            )
        self.demonstrations.replace([], [])
        self.demonstration_writer.load([*human, *agent])

    def _initial(self, name: str, is_human: bool) -> tuple[Demonstration, ...]:
        path = getattr(self, name)
        if path is None:
            return ()
        try:
            return self._directory(path, human=is_human).initial
        except (OSError, ValueError) as error:
            raise DemonstrationFault(f"{name}={path}: {error}") from error

    def load_supplementary_demos(self) -> None:
        """Take what came into the supplementary directory, if its return reaches the threshold."""
        if self._supplementary is None:
            return
        found: list[Demonstration] = []
        if not self.shared_demos or this_rank() == 0:
            found, self._waiting = [*self._waiting, *self._supplementary.poll()], []
        if self.shared_demos:
            found = of_first_rank(found)
        for demonstration in found:
            total, threshold = demonstration.total_reward, self.reward_threshold
            if total < threshold:
                _logger.info(
                    "%s is left out: its return %g is below the threshold %g.", demonstration.name, total, threshold
                )
                continue
            try:
                self.demonstration_writer.load([demonstration])
            except ValueError as error:
                _logger.warning("%s is left out: %s", demonstration.name, error)

    def _look_for_supplementary(self, taken: Collection[str] = ()) -> None:
        path = self.supplementary_demos_dir
        if path is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
            self._supplementary = self._directory(path, may_be_empty=True, taken=taken)
            self._waiting = [*self._supplementary.initial]

    def save_demos(self) -> None:
        """Save the agent's best demonstrations into the target directory, in the place of those saved before.

        ``reward_demo_1.safetensors`` has the highest return, the newest of equals comes first; with
        ``save_value_demos``, ``value_demo_1.safetensors`` has the highest value.
        """
        rank = 0 if self.shared_demos else this_rank()
        if self.target_agent_demos_dir is None or (self.shared_demos and this_rank() > 0):
            return
        if self._target is None:
            path = Path(self.target_agent_demos_dir)
            self._target = self._directory(str(path / f"rank_{rank}" if rank else path), may_be_empty=True)
        agents = [each for each in reversed(self.reward_demos) if not each.is_human]
        best = {"reward": sorted(agents, key=lambda each: -each.total_reward)}
        if self.save_value_demos:
            best["value"] = sorted(self.value_demos, key=lambda each: -each.value)
        named = {
            f"{kind}_demo_{place}": with_saved_dtypes(demonstration, self.demo_dtypes)
            for kind, ranked in best.items()
            for place, demonstration in enumerate(ranked[: self.num_agent_demos_to_save], 1)
        }
        self._target.save([*named.values()], [*named])

    def sample_demo(self, env_id: int) -> Demonstration | None:
        """Draw what an environment plays in the episode that begins: a demonstration, or its own if None.

        Raises:
            ValueError: There is no such environment.
        """
        num_envs = 1 if self._replay is None else self._replay.num_envs
        if not 0 <= env_id < num_envs:
            raise ValueError(f"env_id={env_id} must be between 0 and {num_envs - 1}.")
        return self.demonstration_sampler.draw(self.demonstrations)

    def track_potential_demos(self, sample: TensorDictBase | None = None) -> None:
        """Follow the episodes of a rollout, and offer those that end as demonstrations.

        Args:
            sample: a rollout ``[N, T]`` that follows the one before, with values; what is stored if None.
        """
        rows = self._stored_rows() if sample is None else time_major(sample, None)
        ids = env_ids(rows, time_dim=0)
        first = 0 if ids is None else int(ids[0])
        if first not in self._miners:
            self._miners[first] = self._miner(rows.shape[1])
        miner, successes = self._miners[first], self.demonstrations.successes
        finished = miner.finished(rows)
        if self.shared_demos:
            copied = [each.copied() if isinstance(each, Demonstration) else each for each in finished]
            finished = [each for rank in gathered(copied) for each in rank]
        for each in finished:
            miner.offer(each)
        own = sum(isinstance(each, Demonstration) for each in finished)
        self._success = (self.demonstrations.successes - successes) / own if own else None

    def _miner(self, num_envs: int) -> DemonstrationMiner:
        options: dict[str, Any] = {"specs": self._attached(), "frame_skip": self.frame_skip or 1}
        return DemonstrationMiner(self.demonstration_writer, num_envs, **options)

    def _stored_rows(self) -> TensorDictBase:
        """Return what was collected, ``[T, N]``, with its values."""
        stored = self.rollout
        rows = (stored if self._collected is None else self._collected.transpose(0, 1)).copy()
        value = stored.get(self.value_key, None)
        if isinstance(value, TensorDictBase):  # of several critics
            value = torch.stack([*value.values(True, True)]).mean(0)
        rows.pop("state_value", None)
        if isinstance(value, Tensor):
            rows["state_value"] = value.to(rows.device or value.device)
        rows.names = ["time", None]
        return rows.to("cpu")

    def check_demo_buffer_capacity(self) -> None:
        """Drop what exceeds the capacity, as is done with each that comes: of lowest value, then the longest."""
        self.demonstration_writer.make_room()

    def anneal_parameters(self) -> None:
        """Move probability from value to reward demonstrations, as with each success."""
        self.demonstration_writer.anneal()

    # ---- around a rollout --------------------------------------------------------------------------------------------

    def wrap_env(self, env: Any) -> Any:
        """Lay the replay around an environment of TorchRL; collectors of others take it as :attr:`replay`."""
        if not isinstance(env, EnvBase) or self._replay is None:
            return env
        self._is_wrapped = True
        return DemonstrationReplayTransform(self._replay).wrap(env)

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Let the policy do what demonstrations did, where :meth:`wrap_env` replays them."""
        return DemonstrationActor(policy, self._options["log_prob"]) if self._is_wrapped else policy

    def note_collected(self, rollout: TensorDictBase) -> None:
        """Mine demonstrations from ``rollout``, ``[N, T]``, in the place of what is stored of it."""
        self._collected = rollout

    def empty(self, empty_write_count: bool = True) -> None:
        """Discard the stored steps."""
        self._is_tracked, self._collected = False, None
        super().empty(empty_write_count)

    def before_gradients(self) -> None:
        """Write values, advantages and targets; then, once for each rollout, mine it, save and read demonstrations.

        Raises:
            RuntimeError: nothing is stored, or a critic is needed and missing.
        """
        super().before_gradients()
        if self._is_tracked or self._specs is None:
            return
        self._is_tracked = True
        self.track_potential_demos()
        self._collected = None
        self.load_supplementary_demos()
        self._num_rollouts += 1
        if self._num_rollouts % self.save_demos_every == 0:
            self.save_demos()

    def metrics(self) -> dict[str, float]:
        """Return how many demonstrations there are, how likely, and what the last rollout was.

        ``demos/D_R`` and ``demos/D_V`` are ``|D_R|`` and ``|D_V|``; ``demos/replayed`` is the share of replayed
        steps, ``demos/success`` that of successes among the agent's finished episodes.
        """
        figures = {
            "demos/D_R": float(len(self.reward_demos)),
            "demos/D_V": float(len(self.value_demos)),
            "demos/rho": self.rho,
            "demos/phi": self.phi,
        }
        if self.reward_threshold > -float("inf"):
            figures["demos/threshold"] = self.reward_threshold
        replayed = self.rollout.get(REPLAYED, None) if self.step else None
        if replayed is not None:
            figures["demos/replayed"] = replayed.float().mean().item()
        if self._success is not None:
            figures["demos/success"] = self._success
        return {**super().metrics(), **figures}

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return an exact copy of the buffer and of its demonstrations: tensors and scalars only."""
        taken = set() if self._supplementary is None else self._supplementary.taken
        waiting = {Path(each.name).name for each in self._waiting}
        demonstrations = {
            "schema_version": STATE_VERSION,
            "storage": self.demonstrations.state_dict(),
            "writer": self.demonstration_writer.state_dict(),
            "replay": {} if self._replay is None else self._replay.state_dict(),
            "miners": {str(first): miner.state_dict() for first, miner in self._miners.items()},
            "rollouts": self._num_rollouts,
            "is_tracked": self._is_tracked,
            "taken": sorted(taken - waiting),
        }
        return {**super().state_dict(), "demonstrations": demonstrations}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        super().check_state({name: value for name, value in state_dict.items() if name != "demonstrations"})
        owner = "demonstrations"
        state: Any = state_dict.get(owner)
        mapping(state, owner)
        schema = {**dict.fromkeys((*_PARTS, "miners"), mapping), "rollouts": whole()}
        check_state(state, {**schema, "is_tracked": flag, "taken": sequence}, owner, STATE_VERSION)
        self.demonstrations.check_state(state["storage"])
        self.demonstration_writer.check_state(state["writer"])
        if self._replay is not None:
            self._replay.check_state(state["replay"])
        for first, mined in state["miners"].items():
            if not first.isdecimal():
                raise ValueError(f"The {owner} state has a miner of environment {first!r}, expected a number.")
            self._restored_miner(mined)

    def _restored_miner(self, state: Any) -> DemonstrationMiner:
        check_state(state, {"num_envs": whole(1), "running": sequence}, "demonstration miner")
        miner = self._miner(len(state["running"]))
        miner.load_state_dict(state)
        return miner

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state: the next batches, and what is replayed and mined next, are those that would have come.

        Raises:
            ValueError: another version, capacity, number of environments or other data; names both.
            RuntimeError: :meth:`attach` was not called, and there were environments.
        """
        super().load_state_dict(state_dict)
        state = state_dict["demonstrations"]
        self._miners = {int(first): self._restored_miner(mined) for first, mined in state["miners"].items()}
        self.demonstrations.load_state_dict(state["storage"])
        self.demonstration_writer.load_state_dict(state["writer"])
        if self._replay is not None:
            self._replay.load_state_dict(state["replay"])
            self._look_for_supplementary(state["taken"])
        self._num_rollouts, self._is_tracked = state["rollouts"], state["is_tracked"]
