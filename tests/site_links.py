"""Check that each link of a built site leads to one of its files or headings: ``python tests/site_links.py SITE``."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the links and the anchors of a tag."""
        for name, value in attrs:
            if value is not None and name in ("href", "src"):
                self.links.append(value)
            elif value is not None and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Return a line for each broken link within the site."""
    site = site.resolve()
    # The 404 page is served at any depth, so its links are relative to the site's address.
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{path.relative_to(site)} links to {link}, which is no file of the site")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.relative_to(site)} links to {link}, which is no heading of that page")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(broken_links(Path(sys.argv[1]))) or None)
