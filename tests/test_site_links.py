"""The check of the built site finds every broken link."""

from __future__ import annotations

from pathlib import Path

import pytest

from site_links import broken_links

OTHER = '<h1 id="there">There</h1>'


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("other/", False),
        ("other/index.html#there", False),
        ("#here", False),
        ("https://example.org/nowhere", False),
        ("a%20name.txt", False),
        ("missing.md", True),
        ("other/#elsewhere", True),
        ("#elsewhere", True),
        ("other/missing.png", True),
    ],
)
def test_broken_links_are_those_without_a_file_or_a_heading(tmp_path: Path, link: str, broken: bool):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text(OTHER)
    (tmp_path / "a name.txt").write_text("")
    (tmp_path / "index.html").write_text(f'<a id="here" href="{link}">link</a>')
    assert bool(broken_links(tmp_path)) is broken
