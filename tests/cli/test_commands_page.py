"""docs/commands.md is what the parsers say."""

from __future__ import annotations

import commands_page


def test_the_page_of_the_commands_is_current() -> None:
    text = commands_page.page()
    assert commands_page.PAGE.read_text("utf-8") == text, "write it anew: python tests/cli/commands_page.py"
    assert "`--deadline`" in text
