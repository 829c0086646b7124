"""Hook of the site: links to files that are no pages become plain text, because the site has no copy of them."""

from __future__ import annotations

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with only links to pages, pictures and other sites."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        name = target.partition("#")[0]
        if "://" in target or not name:
            return match[0]
        inside = not posixpath.normpath(posixpath.join(folder, name)).startswith("..")
        return match[0] if inside and name.endswith((".md", ".svg", ".png")) else text

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)
