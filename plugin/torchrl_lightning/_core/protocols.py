"""Optional members of objects that users may write themselves: learners, collectors, DataModules and sources.

Each class is a typed view of one kind of object and lists all members that the package uses. A missing member has its
default value. ``of`` reads the fields once; properties are read at each use, because they change during a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:  # commands without training also import this file
    from pathlib import Path

    from tensordict import TensorDictBase
    from tensordict.utils import NestedKey


T = TypeVar("T")


def no_keys(batch: TensorDictBase) -> Sequence[NestedKey]:
    """Return an empty sequence, for a learner that rewrites no entries."""
    return ()


def do_nothing(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class _View:
    part: Any

    @classmethod
    def of(cls, part: Any) -> Self:
        """Read the members of an object; for None, all members have their default values."""
        return cls(part, **{member.name: getattr(part, member.name, member.default) for member in fields(cls)[1:]})

    def _current(self, name: str, default: T) -> T:
        value: T = getattr(self.part, name, default)
        return value


@dataclass(frozen=True)
class LearnerApi(_View):
    """A LightningModule that our DataModules serve; only ``policy`` and ``training_step`` are required.

    Attributes:
        part: The LightningModule.
        build: Build the networks once, for the specs of an environment; ``configure_model`` calls this method.
        annotate: Add entries to a time-major rollout ``[T, N]`` before its advantages are estimated.
        rewritten_keys: Return the keys that the learner has rewritten in a replayed batch; these entries are stored.
        fit_dynamics: Fit a world model to transitions ``[N]`` and validate it on other transitions ``[V]``.
        imagine: Return transitions ``[N]`` of imagined rollouts from observations ``[R]``, up to a maximum length.
        check_transitions: Validate all stored transitions ``[N]`` before ``begin_fit``.
        begin_fit: Start a fit of a model; the argument is the :class:`~torchrl_lightning.dynamics.DynamicsTargets`.
        apply_schedules: Set learning rates and coefficients from the progress of the run.
        stream_kind: The name of the learner's stream, as in ``stream_kind`` of a DataModule; None for any stream.
        suggested_data: A stream to suggest in error messages.
        gamma: The discount, if the learner owns it.
        gamma_intrinsic: The discount of intrinsic rewards, if the learner owns it.
        supports_several_ranks: Whether a run of several ranks can train the learner.
        evaluation_metrics: All metrics that an evaluation logs.
        training_metrics: The names of all ``train/...`` metrics; empty unless all names are known.
    """

    build: Callable[..., Any] | None = None
    annotate: Callable[[TensorDictBase], None] | None = None
    rewritten_keys: Callable[[TensorDictBase], Sequence[NestedKey]] = no_keys
    fit_dynamics: Callable[[TensorDictBase, TensorDictBase], None] | None = None
    imagine: Callable[[TensorDictBase, int], TensorDictBase] | None = None
    check_transitions: Callable[[TensorDictBase], None] | None = None
    begin_fit: Callable[[Any], None] | None = None
    apply_schedules: Callable[[], None] | None = None
    stream_kind: str | None = None
    suggested_data: str = ""
    gamma: Any = None
    gamma_intrinsic: Any = None
    supports_several_ranks: bool = True
    evaluation_metrics: tuple[str, ...] = ()
    training_metrics: tuple[str, ...] = ()

    @property
    def is_built(self) -> bool | None:
        """Whether the networks exist; None if ``configure_model`` is not known to build them."""
        return None if self.build is None else self._current("is_built", None)

    @property
    def policy(self) -> Any:
        """The TensorDict module that writes the action; None without one."""
        return self._current("policy", None)

    @property
    def can_imagine(self) -> bool:
        """Whether the learner has a world model."""
        return self.fit_dynamics is not None and self.imagine is not None

    @property
    def critic(self) -> Any:
        """The critic; None without one."""
        return self._current("critic", None)

    @property
    def collection_policy(self) -> Any:
        """The policy that also writes the critic's values at little extra cost; None without one."""
        return self._current("collection_policy", None)

    @property
    def fit_is_over(self) -> bool:
        """Whether the fit of the model ends with this epoch."""
        return self._current("fit_is_over", False)

    @property
    def network(self) -> Any:
        """The description of the network from which the learner builds its layers; None without one."""
        return self._current("network", None)

    @property
    def has_memory(self) -> bool:
        """Whether the network's description is recurrent; known before the network is built."""
        return bool(getattr(self.network, "recurrent", False))


@dataclass(frozen=True)
class PolicyApi(_View):
    """A policy or critic: a TensorDict module, or any function of a TensorDict.

    Attributes:
        part: The policy.
        in_keys: The entries that the policy reads, if known.
        out_keys: The entries that the policy writes, if known.
        get_dist: Return the distribution over actions in a TensorDict.
        clip_actions: Whether actions are clipped to the bounds of the action space before the environments are stepped.
        set_worker: Set the policy's worker number and the number of workers of the collector.
    """

    in_keys: Sequence[NestedKey] = ()
    out_keys: Sequence[NestedKey] | None = None
    get_dist: Callable[[TensorDictBase], Any] | None = None
    clip_actions: bool = False
    set_worker: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class SamplerApi(_View):
    """A sampler of a replay buffer, from this package or TorchRL.

    Attributes:
        part: The sampler.
        supports_uneven_rings: Whether the sampler supports unevenly filled rings.
        batch_length: The number of steps in a window; None for single steps.
        episode_ends: The treatment of an episode's end in a window: ``"inside"``, ``"across"`` or ``"pad"``.
        follows_episodes: Whether the sampler reads the episode index, so that the buffer must keep it.
        num_earliest_frames_ignored: The number of oldest steps of each environment that are not drawn.
        traj_key: The entry that holds ids of trajectories.
    """

    supports_uneven_rings: bool = False
    batch_length: int | None = None
    episode_ends: str = "inside"
    follows_episodes: bool = False
    num_earliest_frames_ignored: int = 0
    traj_key: NestedKey | None = None


@dataclass(frozen=True)
class EnvsApi(_View):
    """The vector environment of a documented buffer, from Gymnasium or another library.

    Attributes:
        part: The environment; None without one.
        num_envs: The number of environments.
        env_kwargs: The arguments of each environment.
        frame_stack: The number of stacked frames in an observation.
    """

    num_envs: int | None = None
    env_kwargs: Mapping[str, Any] | None = None
    frame_stack: int | None = None


@dataclass(frozen=True)
class CollectorApi(_View):
    """A collector of this package, of TorchRL or of the user: it iterates over rollouts and has a method ``shutdown``.

    Attributes:
        part: The collector.
        marks_trajectory_starts: Whether ``is_init`` and ``done`` mark the start of each trajectory.
        replays: Whether recorded steps are replayed in some environments.
        clip_actions: Whether actions are clipped to the bounds of the action space; None if it is unknown.
        num_workers: The number of processes that step environments.
        total_frames: The number of frames after which the collector ends; -1 for never.
        yields_shared_memory: Whether ``reused_rows`` yields the same steps in the layout of a replay buffer.
        yields_owned_rollouts: Whether each rollout has its own memory.
        service: The replay service to which other processes write rollouts.
        lost_envs: Environments that have lost their unfinished episode; the reader empties the list.
        update_policy_weights_: Copy the learner's weights into the policy that acts.
        load_state_dict: Restore a state; a collector without this method is stateless.
        metrics: Return the collector's metrics.
    """

    marks_trajectory_starts: bool = False
    replays: bool = False
    clip_actions: bool | None = None
    num_workers: int = 1
    total_frames: int = -1
    yields_shared_memory: bool = False
    yields_owned_rollouts: bool = False
    service: Any = None
    lost_envs: list[int] | None = None
    update_policy_weights_: Callable[[], None] | None = None
    load_state_dict: Callable[[Mapping[str, Any]], Any] | None = None
    metrics: Callable[[], dict[str, float]] = dict

    @property
    def env(self) -> Any:
        """The environment of the collector; None if it is not accessible."""
        return self._current("env", None)

    @property
    def specs(self) -> Any:
        """The specs of its environments; None if they are unknown."""
        return self._current("specs", None)

    @property
    def policy_version(self) -> int | None:
        """The number of times that weights were published; None if it is not counted."""
        return self._current("policy_version", None)


@dataclass(frozen=True)
class SourceApi(_View):
    """A source of batches; only the methods of a ``BatchSource`` are required.

    Attributes:
        part: The source.
        buffers: The buffers from which the source samples, first the buffer of collected steps; None if unknown.
        prepare: Prepare the next batch with the LightningModule, e.g. by imagining rows.
        samples_per_insert: The number of times that each row is sampled, if the source controls this number.
        extend: Write steps like the buffer's ``extend``, if the source stores rows itself; the buffer then stays empty.
        cut: End the running trajectories of environments in the rows that the source stores.
        can_draw: Return whether the source has enough rows for a batch of a size, if the source can lose rows.
        metrics: Return metrics of the stored rows.
        shutdown: End the processes of the source; may be called repeatedly.
    """

    buffers: Sequence[Any] | None = None
    prepare: Callable[[Any], None] | None = None
    samples_per_insert: float | None = None
    extend: Callable[..., Any] | None = None
    cut: Callable[[Any], None] | None = None
    can_draw: Callable[[int], bool] | None = None
    metrics: Callable[[], dict[str, float]] | None = None
    shutdown: Callable[[], None] | None = None

    @property
    def stores_rows(self) -> bool:
        """Whether the source stores rows itself; if True, the source also has ``accepts_shared_rows`` and a length."""
        return None not in (self.extend, self.metrics, self.shutdown)


@dataclass(frozen=True)
class DataApi(_View):
    """A DataModule of this package or of the user, with the members that learners and callbacks use.

    Attributes:
        part: The DataModule; None without one.
        stream_kind: The name of the stream that the DataModule serves.
        suggested_model: A learner to suggest in error messages.
        total_frames: The number of frames after which training stops; -1 for never.
        seed: The seed of the run.
        supports_several_ranks: Whether several ranks can collect for a run.
        buffer: The buffer, once it is built.
        make_collector: The setting ``collector``; False without this setting.
        frames_per_batch: The setting ``frames_per_batch``.
        num_mini_batch: The setting ``num_mini_batch``.
        resolved_updates_per_epoch: The number of updates in an epoch.
        dataset_share: The setting ``dataset_share``.
        terminated: The setting ``terminated``.
        eval_env: The environment of evaluations.
        record_video: Write a video of one episode of a policy in ``eval_env``.
        has_imagined_rows: Return whether batches contain rows that a learner's world model imagines.
        check_state: Validate a state of a checkpoint before it is loaded.
        metrics: Return the metrics of this rank's last rollout or epoch.
        episode_metrics: The names of metrics that exist from the first finished episode on.
    """

    stream_kind: str | None = None
    suggested_model: str = ""
    total_frames: int | None = None
    seed: int | None = None
    supports_several_ranks: bool = True
    buffer: Any = None
    make_collector: Callable[..., Any] | Literal[False] | None = False
    frames_per_batch: int | None = None
    num_mini_batch: int | None = None
    resolved_updates_per_epoch: int | None = None
    dataset_share: float | None = None
    terminated: Any = False
    eval_env: Any = None
    record_video: Callable[[Any, Path], None] | None = None
    has_imagined_rows: Callable[[Any], bool] | None = None
    check_state: Callable[[Any], None] = do_nothing
    metrics: Callable[[], Mapping[str, float]] = dict
    episode_metrics: tuple[str, ...] = ()

    @classmethod
    def of_run(cls, trainer: Any) -> Self:
        """Read the members of a trainer's DataModule."""
        return cls.of(getattr(trainer, "datamodule", None))

    @property
    def frames(self) -> int | None:
        """The number of collected frames; None if they are not counted."""
        return self._current("frames", None)

    @property
    def clock(self) -> tuple[int, str] | None:
        """The count that loggers use as their step, and its unit; None if nothing is counted."""
        return self._current("clock", None if self.frames is None else (self.frames, "frames"))

    @property
    def specs(self) -> Any:
        """The specs of one environment; None if they are unknown."""
        return self._current("specs", None)

    @property
    def build_options(self) -> Mapping[str, Any]:
        """The arguments of a learner's ``build`` in addition to the specs."""
        return self._current("build_options", {})

    @property
    def advantages_standardized_by(self) -> str | None:
        """The name of the buffer that standardises advantages over each rollout, or None."""
        return self._current("advantages_standardized_by", None)
