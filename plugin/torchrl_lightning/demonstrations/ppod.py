"""The on-policy buffer of PPO with demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tensordict import TensorDictBase

from torchrl_lightning.demonstrations.annealing import Schedule
from torchrl_lightning.demonstrations.hooks import DemonstrationHooks
from torchrl_lightning.demonstrations.replay import End, LogProb
from torchrl_lightning.demonstrations.sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.saved_dtypes import FIELDS, Dtype, saved_dtypes
from torchrl_lightning.demonstrations.storage import DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.demonstrations.writer import DemonstrationWriter, check_threshold
from torchrl_lightning.ranges import integer
from torchrl_lightning.rollout import GAEBuffer
from torchrl_lightning.rollout.buffer import RolloutBuffer
from torchrl_lightning.rollout.names import DOCUMENTED
from torchrl_lightning.rollout.writer import time_major
from torchrl_lightning.settings import Count, Fraction, NotNegative, Switch, setting
from torchrl_lightning.state import Child

Whole = Annotated[int, lambda value, name: integer(value, name, 0)]
Dtypes = Annotated[Mapping[str, Dtype] | None, lambda value, name: saved_dtypes(value)]


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
        phi: probability of a value demonstration, before the first success; with 0, none is kept.
        gae_lambda: λ.
        alpha: how much more likely value demonstrations of higher values are: ``P ~ max(v, 0) ** alpha``.
        total_buffer_demo_capacity: most demonstrations of both kinds.
        initial_human_demos_dir: demonstrations that are always kept.
        initial_agent_demos_dir: demonstrations that give way to better ones, such as those of an earlier run.
        supplementary_demos_dir: looked into before each update for demonstrations that come while training runs; those
            whose return reaches the threshold are taken. They give way to better ones, those of a human too. Made if it
            is missing.
        target_agent_demos_dir: where the agent's best demonstrations are saved; nowhere if None.
        num_agent_demos_to_save: how many of them, of those of highest return, and of highest value.
        initial_reward_threshold: lowest return of a success; that of the worst reward demonstration, if higher or None.
            Where neither is above 0 and no demonstration has a positive reward, failures may count as successes, and a
            warning says so; a threshold below 0 that is given is taken at its word.
        save_demos_every: rollouts between two savings.
        demo_dtypes: dtypes of what is saved, by the documented names ``Observation``, ``Action`` and ``Reward``; those
            of the environment where none is named. Rewards are rounded to theirs.
        annealing: how successes move probability from value to reward demonstrations, see
            :class:`DemonstrationAnnealing`.
        cut_after_reward: whether the agent's demonstrations end with the last positive reward.
        ends: how a replayed demonstration ends, see :class:`DemonstrationReplay`.
        log_prob: log-probability of replayed actions, see :class:`DemonstrationReplay`; with continuous actions
            ``current``, as a warning says once.
        save_value_demos: save value demonstrations too, which there are with ``phi`` above 0.
        human_share: least share of the draws of reward demonstrations that goes to human ones, which the agent's own
            would else drown; with 0 all are alike. A warning says if there are no human ones.
        shared_demos: whether all ranks keep the same demonstrations, mined by any of them; else each keeps its own.
            Then the first one alone saves; else the others save to folders ``rank_1``, ... below the target.
        frame_skip: frames of one step, which demonstrations must have too; that of the environment's recipe if None.
        gamma: as in :class:`VanillaOnPolicyBuffer`, here and below.

    Raises:
        ValueError: A probability is outside ``[0, 1]``, their sum too, another argument is out of range, or a setting
            has no effect with the others, such as ``save_demos_every`` without ``target_agent_demos_dir``.

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
    """The documented names of what rollouts hold."""
    demos_data_fields: ClassVar[tuple[str, ...]] = FIELDS
    """The documented names of what demonstrations hold."""
    changeable = (*GAEBuffer.changeable, "rho", "phi", "alpha", "num_agent_demos_to_save", "save_demos_every")

    STATE = {**RolloutBuffer.STATE, "demonstrations": Child(at="hooks")}

    _rho: Fraction = setting(alias="rho", default=0.1, kw_only=False)
    _phi: Fraction = setting(alias="phi", default=0.3, kw_only=False)
    gae_lambda: Fraction = setting(default=0.95, kw_only=False)
    _alpha: NotNegative = setting(alias="alpha", default=10, kw_only=False)
    total_buffer_demo_capacity: Count = setting(default=51, kw_only=False)
    initial_human_demos_dir: str | None = setting(default=None, kw_only=False)
    initial_agent_demos_dir: str | None = setting(default=None, kw_only=False)
    supplementary_demos_dir: str | None = setting(default=None, kw_only=False)
    target_agent_demos_dir: str | None = setting(default=None, kw_only=False)
    num_agent_demos_to_save: Whole = setting(default=10, kw_only=False)
    initial_reward_threshold: Annotated[float | None, check_threshold] = setting(default=None, kw_only=False)
    save_demos_every: Count = setting(default=10, kw_only=False)
    demo_dtypes: Dtypes = setting(default=None, kw_only=False)
    annealing: Schedule = "linear"
    cut_after_reward: bool = True
    ends: End = "recorded"
    log_prob: LogProb = "deterministic"
    save_value_demos: Switch = False
    human_share: Fraction = 0.0
    shared_demos: Switch = False
    _frame_skip: Count | None = setting(alias="frame_skip", default=None)

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
        """Validate that no setting of demonstrations is left without effect by another one."""
        saves, capacity = self.target_agent_demos_dir is not None, self.total_buffer_demo_capacity
        for name in ("num_agent_demos_to_save", "save_demos_every", "save_value_demos"):
            self.require_effect(name, saves, "target_agent_demos_dir")
        self.require_effect("target_agent_demos_dir", self.num_agent_demos_to_save, "num_agent_demos_to_save above 0")
        for name in ("alpha", "annealing", "save_value_demos"):
            self.require_effect(name, self._phi, "phi above 0")
        # One place is kept for a reward demonstration, and alpha decides between two value demonstrations.
        for name, least in (("alpha", 3), ("annealing", 2), ("save_value_demos", 2), ("human_share", 2)):
            self.require_effect(name, capacity >= least, f"total_buffer_demo_capacity of at least {least}")
        for name in ("human_share", "ends", "log_prob"):
            self.require_effect(name, self._rho or self._phi, "rho or phi above 0")

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
        self.demonstration_sampler.set_probabilities(alpha=alpha)

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
    def frame_skip(self) -> int | None:
        """Frames of one step; None before :meth:`attach`, where that is up to the environment."""
        return self.hooks.frame_skip

    def attach(self, env: Any = None, num_envs: int | None = None) -> None:
        """Prepare to replay demonstrations in an environment, and read the directories.

        Args:
            env: id, recipe, factory or ready environment, as a DataModule takes it; ``envs`` if None.
            num_envs: how many are stepped side by side; as many as ``envs`` has if None.

        Raises:
            DemonstrationFault: A directory of initial demonstrations is missing or holds none that can be used in this
                environment, there are more than the capacity, or ``demo_dtypes`` cannot hold what is saved.
            ValueError: ``demo_dtypes`` is given, but nothing is saved.
        """
        env, num_envs = self.envs if env is None else env, self.num_envs if num_envs is None else num_envs
        if env is None or num_envs is None:
            raise ValueError("attach() needs an environment and num_envs, or a buffer that was built with envs=.")
        self.hooks.attach(env, num_envs)

    def load_demo(self, demo_path: str | Path) -> Demonstration:
        """Read a demonstration, and refuse it if it does not fit the environment; it is not kept.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is damaged, or was recorded in another environment; the message names it.
        """
        return self.hooks.read(demo_path)

    def load_initial_demos(self) -> None:
        """Keep what the initial directories hold in the place of all that was kept; see :meth:`attach`."""
        self.hooks.load_initial()

    def load_supplementary_demos(self) -> None:
        """Take what came into the supplementary directory, if its return reaches the threshold."""
        self.hooks.load_supplementary()

    def save_demos(self) -> None:
        """Save the agent's best demonstrations into the target directory, in the place of those saved before.

        ``reward_demo_1.safetensors`` has the highest return, the newest of equals comes first; with
        ``save_value_demos``, ``value_demo_1.safetensors`` has the highest value.
        """
        self.hooks.save()

    def sample_demo(self, env_id: int) -> Demonstration | None:
        """Draw what an environment plays in its next episode, and insert it: a demonstration, or its own if None.

        Raises:
            RuntimeError: Before :meth:`attach`, no environment is known.
            ValueError: There is no such environment.
        """
        return self.hooks.choose(env_id)

    def track_potential_demos(self, sample: TensorDictBase | Mapping[str, Any] | None = None) -> None:
        """Follow the episodes of a rollout or step, and offer those that end as demonstrations.

        Args:
            sample: a rollout ``[N, T]`` that follows the one before, with values; or a dict with the documented names
                of one step, ``[N, ...]``, whose successors may be left out; what is stored if None.
        """
        if sample is None:
            sample = self.hooks.collected(self.rollout, self.stream.value)
        if not isinstance(sample, TensorDictBase):
            sample = self._read(sample, 1).unsqueeze(0).refine_names("time", None)
        self.hooks.mine(time_major(sample, None))

    def check_demo_buffer_capacity(self) -> None:
        """Drop what exceeds the capacity, as is done with each that comes: of lowest value, then the longest."""
        self.demonstration_writer.make_room()

    def anneal_parameters(self) -> None:
        """Move probability from value to reward demonstrations, as with each success."""
        self.demonstration_writer.anneal()
