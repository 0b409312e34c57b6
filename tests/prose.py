"""Check that the package's docstrings and comments and the guide's pages are plain English: ``python tests/prose.py``.

It counts the sentences that match a pattern of stilted English. In a package with at least 100 sentences at most 5 %
may match one pattern and 0.5 % two; elsewhere at most 5 sentences may match. On a page at most 5 % or 2 sentences may
match. A match is a hint: a sentence that reads well may stay. ``--list`` prints the matches with file and line.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "plugin" / "torchrl_lightning"
PAGES = (PROJECT / "README.md", *sorted((PROJECT / "examples" / "guide").glob("*.md")))
MANY, FEW = 100, 5  # sentences of a package that is judged by shares; matches that other packages may have
FEW_OF_PAGE = 2
ONE_PATTERN, TWO_PATTERNS = 0.05, 0.005
SHORTEST_SENTENCE, SHORTEST_COMMENT = 26, 20
PATTERNS = {  # pattern: the plain form
    r"\b[Ww]hat (?!is the|are the|if)\w+": "name the thing: 'the stored rows'",
    r"\b(whose|of which|by which|in which|of whom|for which|with which|over which)\b": "write two sentences",
    r"\b(that|those) (of|that|in|with|which|behind|before|from)\b": "repeat the noun",
    r"(?<![#`])\b[Ww]here (it|they|one|there|a|an|no|some|nothing|nobody|several|what|that|this|both|all|these|those"
    r"|we|its|the)\b": "'if' for a condition, 'when' for a time",
    r"\balone\b": "'only'",
    r"\b(is|are|be|has|have|holds?|gives?|knows?) (no|none)\b": "'is not a', 'does not have', 'without'",
    r"\b(tells?|told|says?|said|hears?|shows?|shown|asks?|asked)\b": "objects return, store, log, raise, configure",
    r"\b(lies?|lying|lay|laid|stands? (for|in)|goes on|go on|gone on|going on|hands? (over|on|back)|handed|lets? go"
    r"|anew|at once)\b": "'is stored', 'replaces', 'continues', 'pass', 'release', 'again'",
    r"\b([Ss]o many|as many|so much|such (a|an)|no such)\b": "give the number or the condition",
    r", too\b": "'also', before the verb",
    r"^(Of|To whom|To processes|By (the|what|its)|In the place|Beside|Behind)\b": "subject first",
    r"\b([Nn]obody|[Ww]hoever|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b": "name the component",
    r"\b(is|are|was|were) (meant|wanted|meant by|asked for|seen so|there|gone|over)\b": "say who does what",
}


def sentences(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the sentences of docstrings and comments with their lines."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            docstring := ast.get_docstring(node)
        ):
            yield from ((node.body[0].lineno, sentence) for sentence in _of_docstring(docstring))
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(text := _text(after), str):
                    yield from ((after.lineno, sentence) for sentence in _of_docstring(text))
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            comment = token.string.lstrip("# ").strip()
            is_prose = not comment.startswith(("type:", "noqa", "pragma", "--", "http"))
            if token.type == tokenize.COMMENT and is_prose and len(comment) >= SHORTEST_COMMENT:
                yield token.start[0], comment


def page_sentences(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a Markdown page with the lines of their paragraphs, without code, tables and headings."""
    is_code, paragraph, start = False, list[str](), 0
    for number, line in enumerate([*page.read_text().splitlines(), ""], 1):
        is_fence = line.startswith("```")
        is_code ^= is_fence
        text = "" if is_fence or is_code or line.startswith(("|", "!", "#", "<", "    ")) else line.strip()
        if paragraph and (not text or text.startswith(("* ", "- ", "1."))):
            yield from ((start, sentence) for sentence in _of_docstring(" ".join(paragraph)))
            paragraph = []
        if text:
            start = start if paragraph else number
            paragraph.append(re.sub(r"\]\([^)]*\)", "]", text).lstrip("*- "))


def _text(node: ast.stmt) -> object:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value
    return None


def _of_docstring(docstring: str) -> Iterator[str]:
    for paragraph in map(str.strip, docstring.split("\n\n")):
        if ">>>" in paragraph or "====" in paragraph:
            continue
        content = re.sub(r"^(Args|Returns|Raises|Yields|Attributes|Examples?):\s*", "", paragraph)
        for item in re.split(r"\n\s*(?=\*{0,2}\w+: )", content):
            text = re.sub(r"\s+", " ", re.sub(r"^\s*\*{0,2}\w+: ", "", item)).strip()
            parts = re.split(r"(?<=[.;:])\s+(?=[A-Z`(])", text)
            yield from (sentence for sentence in parts if len(sentence) >= SHORTEST_SENTENCE)


def main() -> int:
    """Print a line for each package and page; return 1 if one has too many matches."""
    count, one, two = Counter[str](), Counter[str](), Counter[str]()
    for file in (*sorted(PACKAGE.rglob("*.py")), *PAGES):
        is_page = file in PAGES
        folder = file.name if is_page else file.relative_to(PACKAGE).parts[0] if file.parent != PACKAGE else "."
        for line, sentence in page_sentences(file) if is_page else sentences(file):
            advice = [plain for pattern, plain in PATTERNS.items() if re.search(pattern, sentence)]
            count[folder] += 1
            one[folder] += bool(advice)
            two[folder] += len(advice) > 1
            if advice and "--list" in sys.argv:
                sys.stdout.write(f"{file}:{line}: {sentence}\n    {'; '.join(advice)}\n")
    failed = False
    for folder, total in sorted(count.items()):
        is_large, is_page = total >= MANY, folder.endswith(".md")
        few = FEW_OF_PAGE if is_page else FEW
        bad = one[folder] > (max(ONE_PATTERN * total, few) if is_large or is_page else few) or (
            is_large and two[folder] > TWO_PATTERNS * total
        )
        failed |= bad
        shares = f"{one[folder] / total:.1%} match a pattern, {two[folder] / total:.1%} two"
        sys.stdout.write(f"{folder}: {total} sentences, {shares}{': too many' if bad else ''}\n")
    if failed:
        sys.stdout.write("Write these sentences in plain English; python tests/prose.py --list prints them.\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
