"""The on-policy buffer of PPO with demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tensordict import TensorDictBase

from torchrl_lightning._core.settings import Boolean, Fraction, NonNegative, PositiveInt, setting
from torchrl_lightning._core.state import Child
from torchrl_lightning._core.validators import integer
from torchrl_lightning.demonstrations.annealing import Schedule
from torchrl_lightning.demonstrations.demo_sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.demo_storage import DemonstrationStorage
from torchrl_lightning.demonstrations.demo_writer import DemonstrationWriter, check_threshold
from torchrl_lightning.demonstrations.hooks import DemonstrationHooks
from torchrl_lightning.demonstrations.io.saved_dtypes import FIELDS, Dtype, saved_dtypes
from torchrl_lightning.demonstrations.replay.collector_replay import End, LogProb
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.rollout import GAEBuffer
from torchrl_lightning.rollout.pytorchrl_names import DOCUMENTED
from torchrl_lightning.rollout.rollout_buffer import RolloutBuffer
from torchrl_lightning.rollout.rollout_writer import time_major

NonNegativeInt = Annotated[int, lambda value, name: integer(value, name, 0)]
Dtypes = Annotated[Mapping[str, Dtype] | None, lambda value, name: saved_dtypes(value)]


class PPODBuffer(GAEBuffer):
    """On-policy buffer of PPO with demonstrations (Libardi et al. 2021, arXiv:2007.03328), over :class:`GAEBuffer`.

    At the start of an episode, :class:`DemonstrationSampler` may select a demonstration to replay instead. The update
    uses replayed steps like the agent's own steps. After each rollout, :class:`DemonstrationWriter` receives the
    agent's finished episodes as new demonstrations, and replayed demonstrations get new values from the critic.

    :meth:`attach` sets the environment and reads the directories. Then pass :attr:`replay` to a collector. DataModules
    do both.

    Args:
        size: see :class:`VanillaOnPolicyBuffer`, which also documents ``device``, ``actor``, ``algorithm`` and
            ``envs``.
        rho: probability of a reward demonstration before the first success.
        phi: probability of a value demonstration before the first success; 0 stores no value demonstrations.
        gae_lambda: λ.
        alpha: exponent in the probability of a value demonstration with value ``v``: ``P ~ max(v, 0) ** alpha``.
        total_buffer_demo_capacity: maximum number of demonstrations of both kinds.
        initial_human_demos_dir: directory of demonstrations that are never dropped.
        initial_agent_demos_dir: directory of replaceable demonstrations, for example from an earlier run. Better
            demonstrations replace them.
        supplementary_demos_dir: directory for demonstrations that you add during training. It is read before each
            update; a missing directory is created. A demonstration is loaded if its return reaches the threshold.
            Better demonstrations replace it, even if a person recorded it.
        target_agent_demos_dir: directory for the agent's best demonstrations. By default, none are saved.
        num_agent_demos_to_save: maximum number of saved demonstrations of each kind. The reward demonstrations with the
            highest returns and the value demonstrations with the highest values are saved.
        initial_reward_threshold: lowest return of a success. If the threshold is None or lower than all returns of the
            reward demonstrations, the lowest of these returns becomes the threshold. If the threshold is at most 0 and
            no demonstration has a positive reward, failures may count as successes. A warning is then logged, unless
            you set a threshold below 0.
        save_demos_every: number of rollouts between two saves.
        demo_dtypes: map of the documented names ``Observation``, ``Action`` and ``Reward`` to saved dtypes. A field
            that the map lacks keeps the environment's dtype. Rewards are rounded to their dtype.
        annealing: schedule that moves probability from value to reward demonstrations, see
            :class:`DemonstrationAnnealing`.
        cut_after_reward: cut the agent's demonstrations after the last positive reward.
        ends: end of a replayed demonstration, see :class:`DemonstrationReplay`.
        log_prob: log-probability of replayed actions, see :class:`DemonstrationReplay`; use ``current`` for continuous
            actions.
        save_value_demos: also save value demonstrations; requires ``phi`` above 0.
        human_share: minimum share of human demonstrations among the drawn reward demonstrations, even if the agent
            recorded most stored demonstrations. With 0, all reward demonstrations are equally likely. A warning is
            logged if human demonstrations are missing.
        shared_demos: share the demonstrations of all ranks, and save them on rank 0. Otherwise each rank stores its own
            demonstrations. Rank 0 then saves to the target, and other ranks save to its folders ``rank_1``, ...
        frame_skip: number of frames in one step of demonstrations and environment; None uses the recipe's number.
        gamma: see :class:`VanillaOnPolicyBuffer`, which also documents the remaining arguments.

    Raises:
        ValueError: A probability or the sum of rho and phi is outside ``[0, 1]``, or another argument is out of range.
            Or a setting has no effect, for example ``save_demos_every`` without ``target_agent_demos_dir``.

    Examples:
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
    """The documented names of the fields of a rollout."""
    demos_data_fields: ClassVar[tuple[str, ...]] = FIELDS
    """The documented names of the fields of a demonstration."""
    mutable_settings = (
        *GAEBuffer.mutable_settings,
        "rho",
        "phi",
        "alpha",
        "num_agent_demos_to_save",
        "save_demos_every",
    )

    STATE = {**RolloutBuffer.STATE, "demonstrations": Child(attribute="hooks")}

    _rho: Fraction = setting(alias="rho", default=0.1, kw_only=False)
    _phi: Fraction = setting(alias="phi", default=0.3, kw_only=False)
    gae_lambda: Fraction = setting(default=0.95, kw_only=False)
    _alpha: NonNegative = setting(alias="alpha", default=10, kw_only=False)
    total_buffer_demo_capacity: PositiveInt = setting(default=51, kw_only=False)
    initial_human_demos_dir: str | None = setting(default=None, kw_only=False)
    initial_agent_demos_dir: str | None = setting(default=None, kw_only=False)
    supplementary_demos_dir: str | None = setting(default=None, kw_only=False)
    target_agent_demos_dir: str | None = setting(default=None, kw_only=False)
    num_agent_demos_to_save: NonNegativeInt = setting(default=10, kw_only=False)
    initial_reward_threshold: Annotated[float | None, check_threshold] = setting(default=None, kw_only=False)
    save_demos_every: PositiveInt = setting(default=10, kw_only=False)
    demo_dtypes: Dtypes = setting(default=None, kw_only=False)
    annealing: Schedule = "linear"
    cut_after_reward: bool = True
    ends: End = "recorded"
    log_prob: LogProb = "deterministic"
    save_value_demos: Boolean = False
    human_share: Fraction = 0.0
    shared_demos: Boolean = False
    _frame_skip: PositiveInt | None = setting(alias="frame_skip", default=None)

    def __post_init__(self) -> None:  # type: ignore[override]  # init variables go to the base's constructor
        super().__post_init__()
        self._check_effects()
        self.demonstrations = DemonstrationStorage(self.total_buffer_demo_capacity)
        self.demonstration_sampler = DemonstrationSampler(
            self._rho,
            self._phi,
            self._alpha,
            self.generator,
            human_share=self.human_share,
        )
        self.demonstration_writer = DemonstrationWriter(
            self.demonstrations,
            reward_threshold=self.initial_reward_threshold,
            cut_after_reward=self.cut_after_reward,
            annealing=self.annealing,
            sampler=self.demonstration_sampler,
        )
        self.hooks: DemonstrationHooks = DemonstrationHooks(
            self, self.demonstration_writer, self.demonstration_sampler, self._frame_skip
        )

    def _check_effects(self) -> None:
        """Check that each changed demonstration setting has an effect; raise ValueError otherwise."""
        saves, capacity = self.target_agent_demos_dir is not None, self.total_buffer_demo_capacity
        for name in ("num_agent_demos_to_save", "save_demos_every", "save_value_demos"):
            self.require_effect(name, saves, "target_agent_demos_dir")
        self.require_effect("target_agent_demos_dir", self.num_agent_demos_to_save, "num_agent_demos_to_save above 0")
        for name in ("alpha", "annealing", "save_value_demos"):
            self.require_effect(name, self._phi, "phi above 0")
        # One place is for a reward demonstration. alpha has an effect only with two or more value demonstrations.
        for name, minimum in (("alpha", 3), ("annealing", 2), ("save_value_demos", 2), ("human_share", 2)):
            self.require_effect(name, capacity >= minimum, f"total_buffer_demo_capacity of at least {minimum}")
        for name in ("human_share", "ends", "log_prob"):
            self.require_effect(name, self._rho or self._phi, "rho or phi above 0")

    # ---- the demonstrations ------------------------------------------------------------------------------------------

    @property
    def rho(self) -> float:
        """Current probability of a reward demonstration. Setting it changes the initial probability."""
        return self.demonstration_sampler.probabilities(self.demonstrations)[0]

    @rho.setter
    def rho(self, rho: float) -> None:
        self.demonstration_sampler.set_probabilities(rho=rho)

    @property
    def phi(self) -> float:
        """Current probability of a value demonstration. Setting it changes the initial probability."""
        return self.demonstration_sampler.probabilities(self.demonstrations)[1]

    @phi.setter
    def phi(self, phi: float) -> None:
        self.demonstration_sampler.set_probabilities(phi=phi)

    @property
    def alpha(self) -> float:
        """Exponent in the probability of a value demonstration."""
        return self.demonstration_sampler.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self.demonstration_sampler.set_probabilities(alpha=alpha)

    @property
    def reward_demos(self) -> tuple[Demonstration, ...]:
        """The reward demonstrations ``D_R``, human demonstrations first."""
        return self.demonstrations.reward_demonstrations

    @property
    def value_demos(self) -> tuple[Demonstration, ...]:
        """The value demonstrations ``D_V``."""
        return self.demonstrations.value_demonstrations

    @property
    def reward_threshold(self) -> float:
        """Current reward threshold: an episode with at least this return is a success."""
        return self.demonstration_writer.threshold

    @property
    def frame_skip(self) -> int | None:
        """Number of frames in one step; None before :meth:`attach` if the environment determines it."""
        return self.hooks.frame_skip

    def attach(self, env: Any = None, num_envs: int | None = None) -> None:
        """Prepare the replay in an environment, and read the directories.

        Args:
            env: id, recipe, factory or instance, as for a DataModule; None uses ``envs``.
            num_envs: number of parallel environments; None uses the number in ``envs``.

        Raises:
            DemonstrationFault: A directory of initial demonstrations is missing or lacks demonstrations of this
                environment, the demonstrations exceed the capacity, or ``demo_dtypes`` cannot represent the saved
                values.
            ValueError: ``demo_dtypes`` is set, but nothing is saved.
        """
        env, num_envs = self.envs if env is None else env, self.num_envs if num_envs is None else num_envs
        if env is None or num_envs is None:
            raise ValueError("attach() needs an environment and num_envs, or a buffer that was built with envs=.")
        self.hooks.attach(env, num_envs)

    def load_demo(self, demo_path: str | Path) -> Demonstration:
        """Read and return a demonstration without storing it, and check that it fits the environment.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file is damaged or from another environment; the message names it.
        """
        return self.hooks.read(demo_path)

    def load_initial_demos(self) -> None:
        """Replace all stored demonstrations by the demonstrations in the initial directories; see :meth:`attach`."""
        self.hooks.load_initial()

    def load_supplementary_demos(self) -> None:
        """Load new demonstrations from the supplementary directory; skip returns below the threshold."""
        self.hooks.load_supplementary()

    def save_demos(self) -> None:
        """Save the agent's best demonstrations into the target directory, in place of the previous save.

        ``reward_demo_1.safetensors`` has the highest return. If returns are equal, the newest demonstration is first.
        With ``save_value_demos``, ``value_demo_1.safetensors`` has the highest value.
        """
        self.hooks.save()

    def sample_demo(self, env_id: int) -> Demonstration | None:
        """Return a sampled demonstration for an environment's next episode, or None, and schedule the replay.

        Raises:
            RuntimeError: :meth:`attach` was not called before.
            ValueError: ``env_id`` is out of range.
        """
        return self.hooks.choose(env_id)

    def track_potential_demos(self, sample: TensorDictBase | Mapping[str, Any] | None = None) -> None:
        """Track the episodes of a rollout or step, and add finished episodes as demonstrations.

        Args:
            sample: a rollout ``[N, T]`` with values that continues the previous rollout, or a dict of one step. The
                dict has the documented names, entries ``[N, ...]`` and optional successors. None uses the stored
                rollout.
        """
        if sample is None:
            sample = self.hooks.collected(self.rollout, self.stream.value)
        if not isinstance(sample, TensorDictBase):
            sample = self._read(sample, 1).unsqueeze(0).refine_names("time", None)
        self.hooks.mine(time_major(sample, None))

    def check_demo_buffer_capacity(self) -> None:
        """Drop demonstrations above the capacity: first the lowest values, then the agent's longest demonstrations."""
        self.demonstration_writer.make_room()

    def anneal_parameters(self) -> None:
        """Move probability from value to reward demonstrations, as if the agent had one more success."""
        self.demonstration_writer.anneal()
