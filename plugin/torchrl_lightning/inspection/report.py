"""Inspect a buffer from Python."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.inspection.buffer_views import BufferView, find_buffers, unreadable
from torchrl_lightning.inspection.diagnostics import findings
from torchrl_lightning.inspection.summary import Summary, summarize
from torchrl_lightning.inspection.tables import tables


class NoBufferError(UserError):
    """Raised if a state does not contain a buffer."""


@dataclass(frozen=True)
class Inspection:
    """Summaries of buffers, rendered as tables in a terminal and as HTML in a notebook.

    Attributes:
        summaries: One summary for each buffer.
        unreadable: One line for each unreadable buffer.
    """

    summaries: tuple[Summary, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def findings(self) -> list[str]:
        """One sentence for each likely mistake."""
        return [finding for summary in self.summaries for finding in findings(summary)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(tables, self.summaries)
        for line in self.unreadable:
            yield Text(f"! {line}", style="bold red")

    def _repr_html_(self) -> str:
        from torchrl_lightning.inspection.page import fragment

        return fragment(self.summaries, self.unreadable)

    def write_html(self, path: str | Path) -> None:
        """Write one self-contained page with tables, figures and an episode gallery.

        Raises:
            OSError: The file cannot be written; an existing file stays unchanged.
        """
        from torchrl_lightning.inspection.page import write_page

        write_page(self.summaries, Path(path), self.unreadable)

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def inspect_buffer(buffer: Any, *, name: str | None = None, last: int | None = None) -> Inspection:
    """Return the entries, episodes, ages, priorities and likely mistakes of a buffer or a storage.

    The data is read in pieces without a full copy.

    Args:
        buffer: A buffer or storage of this package, or its ``state_dict()``.
        name: The name in the report; the class name by default.
        last: Inspect only about this number of the newest cells; None inspects all.

    Raises:
        ValueError: The buffer has an unknown type or too many cells, or ``last`` is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(200))
        >>> steps = TensorDict({"observation": torch.rand(100, 3), "next": {"reward": torch.zeros(100, 1)}}, [100])
        >>> _ = buffer.extend(steps)
        >>> inspect_buffer(buffer).findings[0]
        'next.reward is zero in every step: there is nothing to learn from'
    """
    optional(integer)(last, "last")
    is_state = isinstance(buffer, dict)
    if not is_state and not callable(getattr(buffer, "state_dict", None)):
        path = "; torchrl-lightning-inspect PATH reads a file or folder" if isinstance(buffer, str | Path) else ""
        raise UserError(
            f"buffer must be a buffer of this package or its state_dict(), got a {type(buffer).__name__}{path}."
        )
    name = name or ("state" if is_state else type(buffer).__name__)
    with getattr(buffer, "locked", nullcontext)():
        try:
            state = buffer if is_state else buffer.state_dict(copy=False)
        except TypeError as error:
            raise UserError(
                f"buffer must be a buffer of this package, got a {type(buffer).__name__}: {error}."
            ) from error
        return inspect_state(state, name, last=last)


def inspect_state(state: Any, name: str | Path, *, last: int | None = None) -> Inspection:
    """Inspect the buffers in a nested state.

    Raises:
        UserError: The state does not contain a buffer, or none can be inspected.
    """
    return inspect_contents(find_buffers(state, str(name), last), name)


def inspect_contents(contents: Iterable[BufferView | str], name: str | Path) -> Inspection:
    """Inspect buffers; ``contents`` has an error message in place of each buffer that could not be read.

    Raises:
        UserError: None of the buffers can be inspected.
    """
    summaries: list[Summary] = []
    lines: list[str] = []
    for view in contents:
        if isinstance(view, str):
            lines.append(view)
            continue
        try:
            summaries.append(summarize(view))
        except Exception as error:  # a damaged state may raise any error
            lines.append(unreadable(view.name, error))
    if not summaries and lines:
        suffix = f"; {len(lines) - 1} more cannot be shown either" if len(lines) > 1 else ""
        raise UserError(f"{lines[0]}{suffix}.")
    if not summaries:
        remedy = "name a run with a buffer in its checkpoints, or the folder of a buffer"
        raise NoBufferError(f"{printable(name)} has no buffer; {remedy}.")
    return Inspection(tuple(summaries), tuple(lines))
