"""Links to sources of the repository lead out of the documentation: they become plain text there."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **about: Any) -> str:
    """Called by mkdocs for each page; pages in folders point up to others with the same dots."""
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"\1", markdown)
