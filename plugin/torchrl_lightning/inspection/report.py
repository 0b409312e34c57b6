"""Look inside a buffer, from Python."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from torchrl_lightning.fitting import Fault
from torchrl_lightning.inspection.content import Content, contents_in, unreadable
from torchrl_lightning.inspection.findings import findings
from torchrl_lightning.inspection.summary import Summary, summarize
from torchrl_lightning.inspection.tables import tables
from torchrl_lightning.ranges import integer, optional
from torchrl_lightning.untrusted import printable


class NoBufferError(Fault):
    """There is nothing to look at."""


@dataclass(frozen=True)
class Inspection:
    """What one or several buffers hold: prints as tables, and shows itself as a page in a notebook.

    Attributes:
        summaries: One for each buffer.
        unreadable: One line for each buffer that cannot be shown.
    """

    summaries: tuple[Summary, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def findings(self) -> list[str]:
        """What looks wrong."""
        return [finding for summary in self.summaries for finding in findings(summary)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(tables, self.summaries)
        for line in self.unreadable:
            yield Text(f"! {line}", style="bold red")

    def _repr_html_(self) -> str:
        from torchrl_lightning.inspection.page import fragment

        return fragment(self.summaries, self.unreadable)

    def write_html(self, path: str | Path) -> None:
        """Write one page that needs no other file: the tables, pictures, and episodes to leaf through.

        Raises:
            OSError: It cannot be written; a file of that name stays as it was.
        """
        from torchrl_lightning.inspection.page import write_page

        write_page(self.summaries, Path(path), self.unreadable)

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def inspect_buffer(buffer: Any, *, name: str | None = None, last: int | None = None) -> Inspection:
    """Look inside a buffer, or a storage: what it holds, its episodes, ages and priorities, and what looks wrong.

    It is read in pieces, as it stands; nothing is copied as a whole.

    Args:
        buffer: A buffer or a storage of ours, or what its ``state_dict()`` returned.
        name: What it is called; as its class by default.
        last: Look at its newest cells alone, about so many; None for all.

    Raises:
        ValueError: It is none of ours, it holds more cells than are looked at, or ``last`` is not positive.

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
    given = isinstance(buffer, dict)
    if not given and not callable(getattr(buffer, "state_dict", None)):
        path = "; torchrl-lightning-inspect PATH reads what lies there" if isinstance(buffer, str | Path) else ""
        raise Fault(
            f"A {type(buffer).__name__} is no buffer; pass one of ours, or what its state_dict() returned{path}."
        )
    name = name or ("state" if given else type(buffer).__name__)
    with getattr(buffer, "locked", nullcontext)():
        try:
            state = buffer if given else buffer.state_dict(copy=False)
        except TypeError as error:
            raise Fault(f"A {type(buffer).__name__} is none of our buffers: {error}.") from error
        return inspect_state(state, name, last=last)


def inspect_state(state: Any, name: str | Path, *, last: int | None = None) -> Inspection:
    """Look inside the buffers of a state, which may be nested.

    Raises:
        Fault: There is none in it, or one is not as its counters say.
    """
    return inspect_contents(contents_in(state, str(name), last), name)


def inspect_contents(contents: Iterable[Content | str], name: str | Path) -> Inspection:
    """Look inside buffers; a text is the line that says why one of them cannot be shown.

    Raises:
        Fault: None can be shown.
    """
    summaries: list[Summary] = []
    lines: list[str] = []
    for content in contents:
        if isinstance(content, str):
            lines.append(content)
            continue
        try:
            summaries.append(summarize(content))
        except Exception as error:  # numbers may be anything
            lines.append(unreadable(content.name, error))
    if not summaries and lines:
        others = f"; {len(lines) - 1} more cannot be shown either" if len(lines) > 1 else ""
        raise Fault(f"{lines[0]}{others}.")
    if not summaries:
        mend = "name a run that keeps one in its checkpoints, or a folder of a buffer"
        raise NoBufferError(f"{printable(name)} holds no buffer; {mend}.")
    return Inspection(tuple(summaries), tuple(lines))
