"""MkDocs hooks that use the README as home page, copy linked files and link names in docstrings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

GUIDE = Path(__file__).resolve().parent
ROOT = GUIDE.parents[1]
README = ROOT / "README.md"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README and the linked files from outside the guide."""
    pages = [GUIDE / file.src_uri for file in files.documentation_pages()]
    links = {target for page in (README, *pages) for target in targets(page.read_text(), page.parent)}
    files.append(File.generated(config, "index.md", content=linked(README.read_text(), ROOT)))
    for target in sorted(each for each in links if each.is_file() and not is_of_the_guide(each)):
        files.append(File.generated(config, place(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page to addresses in the site."""
    source = page.file.src_uri
    return markdown if source == "index.md" else linked(markdown, (GUIDE / source).parent)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Link the names of this package in docstrings to their reference pages."""
    pages = [file.content_string for file in files.documentation_pages() if file.src_uri.startswith("reference/")]
    places = {path.rpartition(".")[2]: path for text in pages for path in re.findall(r"^::: (.*)$", text, flags=re.M)}

    def named(match: re.Match[str]) -> str:
        said = f"<code>{match[1]}</code>"
        return f'<autoref identifier="{places[match[1]]}">{said}</autoref>' if match[1] in places else said

    return re.sub(r":(?:class|func|meth):<code>~?(?:\w+\.)*(\w+)</code>", named, html)


def linked(text: str, folder: Path) -> str:
    """Return the text with links relative to the top of the site; replace links to folders with their text."""

    def link(match: re.Match[str]) -> str:
        said, path, heading = match.groups(default="")
        target = (folder / path).resolve()
        return said if target.is_dir() else f"[{said}]({place(target)}{heading})"

    return LINK.sub(link, text)


def targets(text: str, folder: Path) -> set[Path]:
    return {(folder / path).resolve() for _, path, _ in LINK.findall(text)}


def place(target: Path) -> str:
    """Return the path of a repository file in the site."""
    if target == README:
        return "index.md"
    return os.path.relpath(target, GUIDE) if is_of_the_guide(target) else f"files/{target.relative_to(ROOT).as_posix()}"


def is_of_the_guide(target: Path) -> bool:
    return target == README or (target.is_relative_to(GUIDE) and target.suffix != ".py")
