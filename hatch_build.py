"""What hatchling runs when it builds the package: the page for PyPI is the README, as it can be read there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def for_pypi(readme: str, source: str | None) -> str:
    """Return the README with absolute links to files of the repository at `source`, and to the raw pictures.

    source  the address of the repository; None while it has none: then links become their texts, and pictures go
    """
    if source is None:
        return _LINK.sub(lambda link: "" if link[1] else link[2], readme)
    page, raw = f"{source}/blob/main/", f"{source}/raw/main/"
    return _LINK.sub(lambda link: f"{link[1]}[{link[2]}]({raw if link[1] else page}{link[3]})", readme)


class CustomMetadataHook(MetadataHookInterface):
    """Sets the field `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text. The address of the repository is that of project.urls, where there is one."""
        text = (Path(self.root) / "README.md").read_text()
        readme = for_pypi(text, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
