"""The page of an inspection is well-formed and self-contained, and repeats the tables."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from tensordict import TensorDict

from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, RingStorage, inspect_buffer
from torchrl_lightning._core.palette import PALETTE
from torchrl_lightning.inspection.page import pixels, selected_episodes, write_page
from torchrl_lightning.inspection.pictures import COLOURS, DARK_COLOURS, bars, histogram, lines
from torchrl_lightning.inspection.tables import description_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VOID = {"meta", "img", "path"}


class Dom(HTMLParser):
    """A parser that stores elements, attributes and text, and fails if elements are not nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def buffer():
    """Build a buffer of two wrapped rings; each pixel is the number of its step in an episode of five steps."""
    buffer = ExperienceBuffer(storage=RingStorage(48), num_envs=2, sampler=PrioritizedSampler(48))
    step = torch.arange(40)
    steps = TensorDict({"pixels": (step % 5).to(torch.uint8).expand(1, 16, 18, 40).permute(3, 0, 1, 2)}, [40])
    steps["<b>"] = step[:, None].float()
    steps["next", "reward"] = step[:, None].float()
    steps["next", "done"] = steps["next", "terminated"] = (step % 5 == 4)[:, None]
    buffer.extend(steps[:, None].expand(40, 2).clone(), torch.arange(2), time_dim=0)
    return buffer


def test_page_is_well_formed_self_contained_and_repeats_the_tables(buffer, tmp_path):
    inspection = inspect_buffer(buffer)
    inspection.write_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    dom, text = Dom(page), page.replace("data:image/png;base64,", "")
    assert "http" not in text
    assert "<script" not in page
    assert "<b>" not in page  # keys are escaped
    assert {"&lt;b&gt;", "pixels"} <= {cell for cell in page.replace("<td>", "</td>").split("</td>") if cell in text}
    assert {"ExperienceBuffer", description_of(inspection.summaries[0])} <= set(dom.text)
    assert set(inspection.findings) <= set(dom.text)
    assert [attrs["title"] for attrs in dom.all("img")][:5] == [f"step {number}" for number in range(5)]
    assert base64.b64decode(dom.all("img")[0]["src"].split(",")[1]).startswith(b"\x89PNG")
    assert len(dom.all("details")) == len(selected_episodes(inspection.summaries[0].episodes))
    assert len(dom.all("svg")) > 5
    assert inspection._repr_html_() in page


def test_page_does_not_depend_on_the_users_style_of_matplotlib(buffer):
    inspection = inspect_buffer(buffer)
    style = {"path.sketch": (2, 100, 2), "patch.linewidth": 9, "lines.color": "red", "text.usetex": True}
    with matplotlib.rc_context(style):
        styled = inspection._repr_html_()
        assert matplotlib.rcParams["path.sketch"] == style["path.sketch"]
    assert styled == inspection._repr_html_()


def test_pictures_use_css_colours_and_no_ids(buffer):
    page = inspect_buffer(buffer)._repr_html_()
    figures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    colours = re.findall(r"(?:fill|stroke): ([^;\"]+)", figures)
    assert set(colours) <= {"none", "var(--colour-0)", "var(--colour-1)"}
    assert len(colours) > 20
    light, dark = page.partition("</style>")[0].split("prefers-color-scheme: dark")
    for name in set(re.findall(r"var\((--[\w-]+)\)", page)):
        assert f"{name}: #" in light
        assert f"{name}: #" in dark
    assert " id=" not in page


def axis_labels(picture: str) -> list[str]:
    """Return low end, name and high end of the y axis, then of the x axis."""
    return re.findall(r"<span>([^<]*)</span>", picture)


def test_axes_of_pictures_have_names_and_numbers():
    assert axis_labels(histogram(np.array([1, 1, 1, 4]), "x", x="return", y="episodes")) == [
        *("0", "episodes", "3"),
        *("1", "return", "4"),
    ]
    assert axis_labels(bars([0.25, 0.75], 0, 12000.4, "x", y="share")) == ["0", "share", "0.75", "0", "value", "12,000"]
    assert axis_labels(bars([0, 0], 0, 0, "x")) == ["0", "steps", "", "0", "value", ""]
    two = lines(np.array([[0.5, -2.0], [1e9, 3.0], [1.0, 3.0]]), "x")
    assert axis_labels(two) == ["-2", "value", "1e+09", "0", "step", "2"]
    assert re.findall(r"var\(--colour-(\d)\)\">(\d)<", two) == [("0", "0"), ("1", "1")]  # numbers of the columns
    assert "colour" not in lines(np.zeros((2, 1)), "x").partition("<svg")[0]


def test_page_has_a_short_title_and_scales_to_the_window(buffer, tmp_path):
    for buffers, name, title in ((1, "a/b/last.ckpt", "last.ckpt"), (2, "a/b/last.ckpt", "2 buffers")):
        summaries = inspect_buffer(buffer, name=name).summaries * buffers
        write_page(summaries, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert f"<title>{title}</title>" in page
        assert page.count("<h1>last.ckpt</h1><p>a/b/last.ckpt</p>") == buffers
        dom = Dom(page)
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in dom.all("meta")
        assert page.count('<div class="table"><table') == page.count("<table") > 0  # wide tables scroll


def test_colours_are_those_of_all_pictures():
    assert set(PALETTE) <= set(COLOURS)
    assert len(COLOURS) == len(DARK_COLOURS) == len({*COLOURS}) == len({*DARK_COLOURS})


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_browser_shows_the_page(buffer, tmp_path):
    page = tmp_path / "page.html"
    inspect_buffer(buffer).write_html(page)
    page.write_text(page.read_text().replace("<details", "<details open", 1))
    quiet = ("background-networking", "component-update", "sync", "quic", "gpu")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--no-first-run",
        *(f"--disable-{feature}" for feature in quiet),
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars", "--window-size=900,2000"]

    def run_chromium(*options):
        done = subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    dom, expected = Dom(run_chromium("--dump-dom")), Dom(page.read_text())
    for tag in ("table", "tr", "td", "svg", "path", "img"):
        assert dom.all(tag) == expected.all(tag), tag
    assert len(dom.all("details")) == len(expected.all("details"))
    run_chromium(f"--screenshot={tmp_path / 'page.png'}")
    pixels_of_page = (imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert pixels_of_page.shape == (2000, 900, 3)
    assert (pixels_of_page == [*bytes.fromhex(COLOURS[0][1:])]).all(-1).sum() > 1000  # bars
    shades = [(pixels_of_page == shade).all(-1).sum() for shade in range(1, 5)]  # pixels of step numbers
    assert min(shades) > 100 * 100


def test_episode_rows_are_correct_after_the_ring_wraps(buffer):
    summary = inspect_buffer(buffer).summaries[0]
    view, episodes = summary.view, summary.episodes
    for number in range(len(episodes)):
        env, begin, length = (int(column[number]) for column in (episodes.env, episodes.begin, episodes.length))
        rows = view.steps(view.leaves["<b>",], env, begin, begin + length)
        assert rows.ravel().tolist() == list(range(begin, begin + length))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((20, 18), (20, 18)),
        ((3, 20, 18), (20, 18, 3)),
        ((20, 18, 1), (20, 18)),
        ((4, 20, 18), (20, 18)),
        ((4, 20, 18, 3), (20, 18, 3)),
    ],
)
def test_images_of_any_layout(shape, expected):
    image = torch.randint(256, shape, dtype=torch.uint8)
    assert pixels(image).shape == expected
    if shape == (4, 20, 18):
        np.testing.assert_array_equal(pixels(image), image[-1])


def points_of_paths(picture: str) -> list[np.ndarray]:
    """Return the points ``[n, 2]`` of each path of a picture; y is 0 at the top and 80 at the bottom."""
    paths = (re.findall(r"[ML] ([\d.]+) ([\d.]+)", path["d"]) for path in Dom(picture).all("path"))
    return [np.array(points, np.float64) for points in paths]


def test_pictures_of_empty_single_and_non_finite_values():
    nan = np.array([np.nan])
    assert histogram(nan, "none") == ""
    (one,) = points_of_paths(histogram(np.r_[nan, np.ones(3)], "one"))
    assert one.tolist() == [[0, 80], [0, 0], [216, 0], [216, 80]]
    assert [line.tolist() for line in points_of_paths(lines(np.full((1, 2), np.inf), "a < b"))] == [
        [[0, 79], [240, 79]]
    ] * 2
    peaks = np.zeros((5000, 1))
    peaks[[7, 4001]] = 1.0
    (line,) = points_of_paths(lines(peaks, "x"))
    assert len(line) == 120
    assert (line[:, 1] == 1).sum() == 2  # y is 1 at the top
    (empty,) = points_of_paths(bars([0, 0], 0, 1, "empty"))
    assert (empty[:, 1] == 80).all()


@pytest.mark.parametrize(
    "values",
    [[1e30, -1e30, 0.5], [1.7e308, -1.7e308], [1e30] * 3, [1e-45, 2e-45], [np.inf, 1.0], [2.0**60, 2.0**60 + 512]],
)
def test_numbers_of_any_size_stay_inside_their_picture(values):
    numbers = np.array(values)
    with np.errstate(all="raise"):
        for picture in (histogram(numbers, "x"), lines(numbers[:, None], "x")):
            for points in points_of_paths(picture):
                assert len(points)
                assert (points >= 0).all()
                assert (points <= (240, 80)).all()


def test_failed_write_of_the_page_leaves_no_file(buffer, tmp_path):
    with pytest.raises(FileNotFoundError):
        inspect_buffer(buffer).write_html(tmp_path / "none" / "page.html")
    assert list(tmp_path.iterdir()) == []
