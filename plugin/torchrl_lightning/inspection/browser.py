"""Episodes to leaf through: some of them, with their frames or the course of their numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.entries import Path
from torchrl_lightning.inspection.content import PIECE, Content, Ints, Leaf, Piece
from torchrl_lightning.inspection.episodes import ENDS, Episodes
from torchrl_lightning.inspection.pictures import COLOURS, lines
from torchrl_lightning.inspection.summary import Summary
from torchrl_lightning.untrusted import printable

OF_EACH = 6  # of the newest, of those with the highest and of those with the lowest return
FRAMES = 12  # of an episode
STEPS = 2000  # of an episode whose numbers are drawn
LEAST = 16  # pixels of an image's sides
FLAGS = {"done", "dones", "terminated", "truncated", "is_init", "index"}


def chosen(episodes: Episodes) -> Ints:
    """Return which episodes are shown: the newest, and of the whole ones those of the highest and lowest returns."""
    whole = np.flatnonzero(episodes.whole)
    order = whole[np.argsort(episodes.returned[whole], kind="stable")]
    newest = np.arange(len(episodes))[::-1][:OF_EACH]
    picked: Ints = np.concatenate((newest, order[::-1][:OF_EACH], order[:OF_EACH]))
    return picked[np.sort(np.unique(picked, return_index=True)[1])]


def episode_rows(content: Content, leaf: Leaf, env: int, begin: int, end: int) -> Tensor:
    """Read the steps ``begin`` to ``end`` of an environment from an entry, ``[n, ...]``."""
    step, found = max(1, PIECE // max(1, leaf[:1].nbytes) // content.num_envs), [leaf[:0]]
    while begin < end:
        stop = min(begin + step, end, begin - begin % content.length + content.length)
        valid = np.zeros((stop - begin, content.num_envs), dtype=bool)
        valid[:, env] = True
        found.append(Piece(content, begin, stop, valid).rows(leaf))
        begin = stop
    return torch.cat(found)


def browser(summary: Summary) -> Iterator[str]:
    """Yield each chosen episode, folded."""
    content, episodes = summary.content, summary.episodes
    if episodes is None:
        return
    image = next((path for path, leaf in content.leaves.items() if path[0] != "next" and is_image(leaf)), None)
    for number in chosen(episodes).tolist():
        env, begin = int(episodes.env[number]), int(episodes.begin[number])
        length = int(episodes.length[number])
        told = (
            f"{ENDS[episodes.end[number]]} after {length:,} steps, return {episodes.returned[number]:.4g} "
            f"(environment {env}, from its step {begin:,}{'' if episodes.whole[number] else ', not whole'})"
        )
        shown = "" if image is None else "".join(_frames(content, content.leaves[image], env, begin, length))
        shown += "".join(_courses(content, env, begin, min(length, STEPS)))
        yield f"<details><summary>{escape(told)}</summary><div>{shown}</div></details>"


def is_image(leaf: Leaf) -> bool:
    """Return whether an entry is an image: bytes of at least 16 x 16 pixels."""
    shape = leaf[:1].shape[1:]
    return leaf[:1].dtype is torch.uint8 and sum(side >= LEAST for side in shape) >= 2


def _frames(content: Content, leaf: Leaf, env: int, begin: int, length: int) -> Iterator[str]:
    for at in np.unique(np.linspace(0, length - 1, min(FRAMES, length)).astype(np.int64)).tolist():
        picture = pixels(episode_rows(content, leaf, env, begin + at, begin + at + 1)[0])
        data = base64.b64encode(_png(picture)).decode()
        yield f'<img alt="step {at}" title="step {at}" src="data:image/png;base64,{data}">'


def pixels(image: Tensor) -> NDArray[np.uint8]:
    """Return an image as ``[H, W]`` or ``[H, W, 3]``: of a stack the newest, of what has no three colours the last."""
    while image.ndim > 3:
        image = image[-1]
    found: NDArray[np.uint8] = image.numpy()
    if found.ndim == 2:
        return found
    if found.shape[0] < found.shape[2]:
        found = np.moveaxis(found, 0, -1)
    return found if found.shape[2] == 3 else found[..., -1]


def _png(picture: NDArray[np.uint8]) -> bytes:
    from matplotlib.image import imsave

    with io.BytesIO() as file:
        imsave(file, picture, format="png", cmap="gray", vmin=0, vmax=255)
        return file.getvalue()


def _courses(content: Content, env: int, begin: int, length: int) -> Iterator[str]:
    """Draw the numbers of an episode over its steps: what has no more of them than there are colours."""
    for path, leaf in content.leaves.items():
        width = leaf[:1].numel()
        if is_told(path) and 0 < width <= len(COLOURS) and not leaf[:1].is_complex():
            rows = episode_rows(content, leaf, env, begin, begin + length)
            yield lines(rows.reshape(length, width).double().numpy(), printable(".".join(path)))


def is_told(path: Path) -> bool:
    """Return whether an entry is drawn: no flag, and no observation a second time."""
    return (
        path[-1] not in FLAGS and "collector" not in path and (path[0] != "next" or path[-1] in ("reward", "rewards"))
    )
