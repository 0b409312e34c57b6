"""The base class of all DataModules: environment, collector, frame counter, evaluation, state and shutdown."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from gymnasium.vector import VectorEnv
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs import EnvBase

from torchrl_lightning._core.errors import autocast_dtype, check_precision, check_stream
from torchrl_lightning._core.protocols import CollectorApi
from torchrl_lightning._core.ranks import all_gather, state_of_rank
from torchrl_lightning._core.settings import Boolean, Positive, PositiveInt, Settings, choices, setting
from torchrl_lightning._core.state import (
    Attribute,
    Child,
    bounded_integer,
    check_state,
    flag,
    generator,
    mapping,
    sequence,
)
from torchrl_lightning._core.torch_defaults import check_default_device
from torchrl_lightning._core.validators import budget, optional
from torchrl_lightning.collectors import play_episodes
from torchrl_lightning.collectors.video import record_video
from torchrl_lightning.datamodules._run.arguments import (
    check_buffer_factory,
    check_fingerprint,
    check_frames,
    check_frozen,
    check_normalization,
    environment_name,
    run_fingerprint,
)
from torchrl_lightning.datamodules._run.assignments import LateAssignments
from torchrl_lightning.datamodules._run.collection import (
    build_default_collector,
    call_with_policy,
    clips_by_default,
    collector_options,
    envs_of_rank,
    envs_per_worker,
)
from torchrl_lightning.datamodules._run.collector_stream import CollectorStream
from torchrl_lightning.datamodules._run.discounts import build_buffer
from torchrl_lightning.datamodules._run.due_evaluation import DueEvaluation
from torchrl_lightning.datamodules._run.environments import RunEnvironments
from torchrl_lightning.datamodules._run.episode_statistics import FinishedEpisodes
from torchrl_lightning.datamodules._run.evaluation import checked_rollouts, view_of_collector
from torchrl_lightning.datamodules._run.frames import FrameClock
from torchrl_lightning.datamodules._run.loaders import LoadersDataModule
from torchrl_lightning.datamodules._run.normalization import Normalization
from torchrl_lightning.datamodules._run.rebuilding import UNSTORED_ARGUMENTS, RebuildableDataModule, RunState
from torchrl_lightning.datamodules._run.trainer_checks import check_surroundings
from torchrl_lightning.datamodules.networks import build_learner
from torchrl_lightning.environments import EnvironmentSpecs, spawn_seed
from torchrl_lightning.environments.autocast import with_autocast
from torchrl_lightning.environments.normalization import EPSILON
from torchrl_lightning.environments.seeds import check_seed
from torchrl_lightning.environments.specs import specs_state
from torchrl_lightning.environments.workers.threads import preserve_num_threads

logger = logging.getLogger(__name__)

STATE_VERSION, STATE = 2, {"fingerprint": mapping, "ranks": sequence, "normalization": mapping}


class ExperienceDataModule(LateAssignments, RebuildableDataModule, Settings, LoadersDataModule):
    """Own the environment, the collector and the count of environment frames of a run.

    The LightningModule owns policy, losses and optimizers. It has a ``policy`` (a TensorDict module that writes the
    action), a ``critic`` if the buffer estimates values, and optionally ``annotate(rollout)``. It builds its networks
    in ``configure_model`` from ``trainer.datamodule.specs``. Collection runs policy and critic under the autocast of
    the trainer's precision, like the training step.

    Args:
        env: an environment id, a factory of one Gymnasium or TorchRL environment, or a ready environment: a
            :class:`gymnasium.vector.VectorEnv`, or any ``EnvBase``.
        num_envs: parallel environments on each rank. A batched TorchRL environment has its own number. With collectors
            on a cluster, ``num_envs`` counts the environments of all ranks.
        frames_per_batch: frames of a rollout on each rank, a multiple of the number of environments. If the collector
            has workers, this is the size of one worker's rollout.
        total_frames: training stops after this number of frames of all ranks (also as ``1e5``), or after this number of
            replayed steps without a new frame; -1 for no limit. The last rollout may exceed the number.
        collector: a callable that takes the policy and returns any TorchRL collector; by default a
            :class:`~torchrl_lightning.GymnasiumCollector` over ``env``, or TorchRL's own for a TorchRL environment. If
            the callable has parameters ``seed`` and ``reset_at_each_batch``, they receive the rank's seed and the
            argument below. Several ranks require ``seed``. If ``frames_per_batch`` is not bound yet, the callable also
            receives environment and sizes. Workers then share ``num_envs``, and ranks share ``num_collectors``.
        reset_at_each_batch: begin each rollout with a seeded reset, which cuts episodes; rollouts need several steps.
            A resumed run then equals an uninterrupted run bit for bit, although checkpoints store no environments.
        eval_env: the environment of evaluation episodes, in a form that ``env`` accepts; by default a new ``env``. It
            must be the same environment as in collection. Different wrappers only log a warning.
        eval_episodes: number of complete episodes in an evaluation.
        eval_num_envs: parallel environments of an evaluation.
        eval_mode: ``deterministic`` takes the mode of the policy's distribution as action, ``sampled`` takes a sample.
        normalize_observation: standardise observations for policy and module by running moments over all environments
            and ranks. True selects all entries, a list selects by name. Rollouts are normalised on collection, with the
            moments of earlier rollouts. Replay buffers store raw steps, and each drawn batch is normalised.
        normalize_reward: divide rewards, except in metrics, by the running standard deviation of their discounted sum.
        normalize_clip: largest absolute value of a normalised entry.
        normalize_epsilon: added to the variances. Use 1e-4 if hindsight replaces nearly constant goals.
        freeze_statistics: keep the moments that :meth:`load_normalization` loads, and never update them.
        seed: seed of the run, from which each rank's parts get their seeds. None draws a seed from torch's generator.

    Raises:
        ValueError: A size is not positive, or ``frames_per_batch`` does not fit ``num_envs`` and the resets.
    """

    CONFIG_NAME: ClassVar[str | None] = None
    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("freeze_statistics",)
    make_buffer: Any  # each subclass declares it as a setting
    env: Any = setting(kw_only=False)
    num_envs: PositiveInt = 8
    frames_per_batch: PositiveInt = 1024
    total_frames: Annotated[int, budget] = -1
    make_collector: Callable[..., Iterable[TensorDictBase]] | None = setting(default=None, alias="collector")
    reset_at_each_batch: bool = False
    eval_env: Any = None
    eval_episodes: PositiveInt = 10
    eval_num_envs: PositiveInt = 10
    eval_mode: Annotated[str, choices("deterministic", "sampled")] = "deterministic"
    normalize_observation: bool | Sequence[NestedKey] = False
    normalize_reward: bool = False
    normalize_clip: Positive = 10.0
    normalize_epsilon: Positive = EPSILON
    freeze_statistics: Boolean = False
    seed: int | None = None

    buffer_class: ClassVar[type] = object
    stream_kind: ClassVar[str | None] = None  # must equal the stream_kind of a learner
    suggested_model: ClassVar[str] = ""
    drops_reset_rows: ClassVar[bool] = False  # if true, vector environments in mode NEXT_STEP are accepted
    RUN_STATE: ClassVar[Mapping[str, Attribute]] = {
        "frames": Attribute(bounded_integer(), "_clock.frames"),
        "replayed": Child(attribute="_clock"),
        "num_evaluations": Attribute(bounded_integer(), "_due_evaluation.count"),
        "rng": Attribute(generator("cpu"), "_stream.rng"),
        "episodes": Child(attribute="_episodes"),
        "normalization": Child(attribute="_normalization"),
        "collector": Attribute(optional(mapping), "_stream.collector_state"),
        "evaluation_due": Attribute(flag, "_due_evaluation.is_due"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_default_device()
        self._store_settings()
        check_buffer_factory(self.make_buffer, self)
        self._run_state = RunState(self)
        check_frames(self.frames_per_batch, self.envs_per_worker, self.reset_at_each_batch)
        eval_options = self.eval_env, self.drops_reset_rows, clips_by_default(self.make_collector)
        self._environments = RunEnvironments(self.env, self.num_envs, *eval_options)
        self.eval_env = self._environments.eval_env
        self.buffer: Any = None
        self._clock = FrameClock(self)
        self.num_evaluations = 0
        self._due_evaluation = DueEvaluation(self)
        self._episodes = FinishedEpisodes(self.num_envs)
        entries = self.normalize_observation, self.normalize_reward
        check_normalization(self, *entries)
        bounds = self.normalize_clip, self.normalize_epsilon
        self._normalization = Normalization(*entries, *bounds, frozen=self.freeze_statistics)
        self._stream = CollectorStream(self._episodes, self._normalization)
        self._metrics: dict[str, float] = {}

    @property
    def specs(self) -> EnvironmentSpecs:
        """Specs of action and observation, normalised if configured, and the number of environments."""
        return self._normalization.specs(self._environments.specs)

    @property
    def frames(self) -> int:
        """Frames of the environment that all ranks have collected."""
        return self._clock.frames

    @cached_property
    def envs_per_worker(self) -> int:
        """Number of environments of each worker; ``num_envs`` if the collector does not have workers."""
        return envs_per_worker(self.make_collector, self.num_envs)

    @property
    def envs_of_rank(self) -> int:
        """Environments of this rank's collector."""
        return envs_of_rank(self.make_collector, self.num_envs, self.world_size)

    @property
    def collector(self) -> Any:
        """The collector; None before the first rollout and after a fit."""
        return self._stream.collector

    @property
    def build_options(self) -> dict[str, Any]:
        """Arguments of a learner's ``build`` in addition to the specs."""
        return {}

    @property
    def clock(self) -> tuple[int, str]:
        """Count and unit for loggers and progress bars."""
        return self.frames, "frames"

    def metrics(self) -> dict[str, float]:
        """Return this rank's metrics of the last rollout or epoch: episode means, seconds, and the parts' metrics."""
        return {**self._clock.metrics(), **self._stream.api.metrics(), **self._metrics}

    def setup(self, stage: str) -> None:
        """Build the environment and the buffer, and draw a seed if it is missing; later calls change nothing.

        Raises:
            ValueError: The learner, the environment and the parts do not fit each other.
        """
        super().setup(stage)
        if self.trainer is not None:
            check_precision(self.trainer)
        vars(self)["seed"] = check_seed(self.seed)
        if stage == "fit":
            check_surroundings()
            self._user_collector_options()  # validates the user's collector before anything is built
            self._environments.get_or_build()
            if self.make_collector is None and self.trainer is not None:
                self._clock.announce(self.frames_per_batch * self.world_size, self.trainer)
                self._environments.check_evaluation()
            self._build_parts()
            self._is_set_up = True
            self._restore_pending_state()
            list(self.check_fit(self._learner))
            if self.trainer is not None:
                self._due_evaluation.attach(self.trainer)
                build_learner(self._learner, self)

    def check_fit(self, learner: Any = None) -> Iterator[str]:
        """Check one by one that the parts fit the environment, the learner and each other.

        Parts that are not built yet are built only for this check. The command and :meth:`setup` call this method.

        Yields:
            The name of each argument before its check.

        Raises:
            IncompatibleError: A part does not fit: see :func:`~torchrl_lightning._core.errors.check_compatible`.
        """
        yield "env"
        check_stream(learner, self)
        _ = self.specs  # builds the environment
        yield "collector"
        self._user_collector_options()
        self._environments.check_clipping()
        yield "freeze_statistics"
        check_frozen(self)
        yield "frames_per_batch"
        self._environments.check_memory(self.frames_per_batch)
        yield "buffer"
        self.fingerprint(learner)

    def teardown(self, stage: str) -> None:
        """Close collector and environment after a fit; a validation between two fits leaves them open."""
        super().teardown(stage)
        if stage == "fit":
            self._stream.save_state()  # for a checkpoint that is written after the fit
            self.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close collector and environment: after an exception Lightning does not call :meth:`teardown`."""
        super().on_exception(exception)
        self.close()

    def close(self) -> None:
        """Close the collector, its worker processes and the environment. Call this at any time, also repeatedly."""
        self._learner_api_cache = None
        try:
            self._stream.close()
        finally:
            self._environments.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the full state of all ranks for a resumed run, as tensors and scalars."""
        if self._pending_state is not None:
            return dict(self._pending_state)
        return {
            "schema_version": STATE_VERSION,
            UNSTORED_ARGUMENTS: list(self._unstored_arguments),
            "seed": self.seed,
            "fingerprint": self.fingerprint(),
            "specs": specs_state(self._environments.specs),
            "normalization": self._normalization.statistics(),
            "ranks": all_gather({**self._run_state.state_dict(), **self._parts_state()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counters, generators and a stored buffer; the collector is restored when it is first built.

        Before ``setup("fit")``, this method restores only counters and normalisation statistics, and ``setup`` restores
        the rest. An evaluation restores only the frame count and the statistics, on any number of ranks.

        Raises:
            ValueError: The state comes from another environment, buffer, number of ranks or state version.
            FileNotFoundError: The buffer was stored outside of the checkpoint, and its files no longer exist.
        """
        evaluates = self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING)
        if not (self._is_set_up or evaluates):
            check_state(state, STATE, "experience", STATE_VERSION)
            self._defer_state(state, ExperienceDataModule.fingerprint(self))
            return
        self.check_state(state)
        for load, statistics in self._statistics_loaders(state):
            copy.deepcopy(load)(statistics)  # errors occur in the copy, before anything changes
        if evaluates:
            self._clock = FrameClock(self, self.state_frames(state))
        else:
            rank_state = state_of_rank(state["ranks"], self._rank, self.world_size)
            run_state = self._run_state.validate_state(rank_state)
            self._load_parts(rank_state)
            self._run_state.apply_state(run_state)
            self._post_load(rank_state)
        self._environments.restore_clipping(state.get("specs", {}), evaluates=evaluates)
        self.load_statistics(state)

    def load_statistics(self, state: dict[str, Any]) -> None:
        """Restore only the normalisation statistics of observations and rewards."""
        for load, statistics in self._statistics_loaders(state):
            load(statistics)

    def load_normalization(self, statistics: Mapping[str, Any], *, trial: bool = False) -> None:
        """Begin with the normalisation statistics of another run.

        Args:
            statistics: The entry ``normalization`` of the other run's state.
            trial: Only check that the statistics fit; change nothing.

        Raises:
            ValueError: The statistics do not fit the normalised entries of this run.
        """
        _ = self.specs  # builds the normaliser
        (copy.deepcopy(self._normalization) if trial else self._normalization).load_normalization(statistics)

    def _statistics_loaders(self, state: dict[str, Any]) -> list[tuple[Callable[[Any], Any], Any]]:
        """Return a pair for each normaliser: its load function, and its state, which is the same on all ranks."""
        return [(self._normalization.load_statistics, state["normalization"])]

    def check_state(self, state: dict[str, Any], learner: Any = None) -> None:
        """Check that a state was written with the same settings; the ValueError names the first difference."""
        check_state(state, STATE, "experience", STATE_VERSION)
        check_fingerprint(state["fingerprint"], self.fingerprint(learner))

    @staticmethod
    def state_frames(state: dict[str, Any]) -> int:
        """Return the number of environment frames in a state."""
        return int(state["ranks"][0]["frames"])

    def fingerprint(self, learner: Any = None) -> dict[str, Any]:
        """Return the settings that must be equal in a checkpoint and a run; None uses the trainer's learner."""
        return run_fingerprint(self)

    def _get_or_build_buffer(self, learner: Any = None, *, trial: bool = True) -> Any:
        """Return the buffer, or build one. With ``trial``, a built buffer is temporary: ranks may be forked later."""
        if self.buffer is not None:
            return self.buffer
        return build_buffer(self.make_buffer, learner or self._learner, trial=trial, **self._buffer_sizes)

    @property
    def _buffer_sizes(self) -> dict[str, int]:
        """Sizes that the buffer factory receives."""
        return {"num_envs": self.envs_of_rank}

    def _build_parts(self) -> None:
        """Build the buffer, once, and the other parts of the subclass."""

    def _parts_state(self) -> dict[str, Any]:
        """Return the states of buffer and source."""
        return {}

    def _load_parts(self, rank_state: dict[str, Any]) -> None:
        """Restore the states of buffer and source; a part that cannot be restored stays unchanged."""

    def _post_load(self, rank_state: dict[str, Any]) -> None:
        """Update dependent attributes after a rank's state was loaded."""
        if not self.reset_at_each_batch:  # the new environments begin new episodes
            self._episodes.forget_unfinished()
            self._normalization.forget_unfinished()

    def _spawn_seed(self, purpose: str, *numbers: int) -> int:
        """Derive the seed of one part of this rank's run."""
        return spawn_seed(self.seed or 0, purpose, self._rank, *numbers)

    def _collector_options(self) -> dict[str, Any]:
        """Return the DataModule's arguments for a collector."""
        options = {"num_envs": self.envs_per_worker, "frames_per_batch": self.frames_per_batch}
        return {**options, "seed": self._spawn_seed("collector"), "reset_at_each_batch": self.reset_at_each_batch}

    def _user_collector_options(self) -> dict[str, Any]:
        """Return the arguments for the user's collector, if there is one."""
        options = {"env": self.env, **self._collector_options()}
        return collector_options(self.make_collector, self.world_size, **options) if self.make_collector else {}

    def _wrap_env(self, env: VectorEnv | EnvBase) -> Any:
        """Return the collection environment, with a wrapper if the buffer needs one."""
        return env

    def _wrap_policy(self, policy: Any) -> Any:
        """Return the collection policy, with a wrapper if the buffer needs one."""
        return policy

    def _open_collector(self, policy: Any) -> None:
        """Build the collector; the weights must already be restored and on their device."""
        if self.make_collector is None:
            self._stream.open(lambda: self._build_default_collector(policy))
        else:  # some TorchRL collectors reduce this process's number of threads
            self._stream.open(lambda: self._build_user_collector(policy), policy=policy, context=preserve_num_threads())

    def _build_default_collector(self, policy: Any) -> tuple[CollectorApi, Iterator[TensorDictBase]]:
        env = self._wrap_env(self._environments.get_or_build())
        policy = self._normalizing_policy(self._wrap_policy(policy))
        collector = CollectorApi.of(build_default_collector(env, policy, **self._collector_options()))
        return collector, self._rollouts(collector)

    def _build_user_collector(self, policy: Any) -> tuple[CollectorApi, Iterator[TensorDictBase]]:
        assert self.make_collector is not None
        policy = self._normalizing_policy(self._wrap_policy(policy))
        collector = CollectorApi.of(call_with_policy(self.make_collector, policy, **self._user_collector_options()))
        self._environments.adopt_clipping(collector)
        self._clock.check_end(self.trainer, collector.total_frames)
        if self.trainer is not None and (view := view_of_collector(collector)) is not None:
            self._environments.check_evaluation(view)
        return collector, checked_rollouts(self._rollouts(collector), self._environments.specs, self.trainer)

    def _normalizing_policy(self, policy: Any) -> Any:
        """Wrap the policy so that it accepts raw observations and runs under the training step's autocast."""
        _ = self.specs  # builds the normaliser
        return self._normalization.policy(self._with_training_autocast(policy))

    def _with_training_autocast(self, module: Any) -> Any:
        """Return a policy or critic under the autocast of the training step."""
        return with_autocast(module, autocast_dtype(self.trainer))

    def _rollouts(self, collector: CollectorApi) -> Iterator[TensorDictBase]:
        """Return an iterator over a collector's rollouts."""
        return iter(collector.part)

    def _collect(self, policy: Any) -> TensorDictBase | None:
        """Return the next rollout ``[N, T]``; None when the collector has ended."""
        if self._stream.collector is None:
            self._open_collector(policy)
        with self._stream.interruptible():
            rollout = self._next_rollout()
        return None if rollout is None else self._stream.with_env_ids(rollout)

    def _next_rollout(self) -> TensorDictBase | None:
        """Return the next rollout as the open collector delivers it; None when the collector has ended."""
        rollout = self._stream.next()
        if rollout is None:
            logger.warning("the collector ended after %d frames; training stops.", self.frames)
            self._stop()
        return rollout

    def evaluate(self, policy: Any, episodes: int | None = None, *, deterministic: bool | None = None) -> TensorDict:
        """Play complete episodes in separate environments, with seeds that training never uses.

        Args:
            policy: the policy to evaluate; its observations are normalised as in training.
            episodes: number of complete episodes; ``eval_episodes`` if None.
            deterministic: play the mode of the policy's distribution instead of a sample; ``eval_mode`` if None.

        Returns:
            The result of :func:`~torchrl_lightning.play_episodes`.
        """
        self.num_evaluations += 1
        episodes = self.eval_episodes if episodes is None else episodes
        deterministic = self.eval_mode == "deterministic" if deterministic is None else deterministic
        num_envs = min(self.eval_num_envs, self.eval_episodes, episodes)
        seed = self._spawn_seed("evaluation", self.num_evaluations)
        options = {"deterministic": deterministic, "clip_actions": self._environments.clips(policy)}
        policy = self._normalizing_policy(policy)
        return play_episodes(self.eval_env, policy, episodes, num_envs=num_envs, seed=seed, **options)

    def record_video(self, policy: Any, path: Path) -> None:
        """Play one evaluation episode and write it as a video; all videos of a run begin in the same state."""
        options = {"deterministic": self.eval_mode == "deterministic", "clip_actions": self._environments.clips(policy)}
        record_video(self.eval_env, self._normalizing_policy(policy), path, seed=self._spawn_seed("film"), **options)

    def _evaluation(self) -> Iterator[TensorDictBase]:
        yield self.evaluate(self._learner_api().policy)

    def __str__(self) -> str:
        # Lightning's version iterates the loaders, which would step the environments.
        return (
            f"{type(self).__name__}(env={environment_name(self.env)}, num_envs={self.num_envs}, "
            f"frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames}, frames={self.frames})"
        )

    __repr__ = __str__
