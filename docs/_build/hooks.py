"""What MkDocs calls when it builds the site: pages whose text comes from the code, and a check of the result.

A line `<!-- from the code: NAME -->` in a page is replaced by the text that TEXTS has for NAME. The reference of the
Python names needs no hook: mkdocstrings reads the docstrings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from from_code import TEXTS  # it needs both paths

_MARK = re.compile(r"^<!-- from the code: (\w+) -->$", re.MULTILINE)

_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)\s*=\s*["']?(?:https?:)?//[^>]*>|@import|url\(["']?(?:https?:)?//""",
    re.IGNORECASE,
)
"""What a browser loads from another machine: a link of a reader's is none of these."""

_ALLOWED = ('rel="canonical"', "rel=canonical")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the texts from the code into a page."""
    return _MARK.sub(lambda mark: TEXTS[mark[1]](), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page would load something from another machine: the site must work without a network."""
    found = [
        f"{path}: {match[0]}"
        for path in sorted(Path(config.site_dir).rglob("*"))
        if path.suffix in (".html", ".css")
        for match in _ELSEWHERE.finditer(path.read_text())
        if not any(each in match[0] for each in _ALLOWED)
    ]
    if found:
        raise SystemExit("The site would load from other machines:\n" + "\n".join(found))
