"""docs/api.md says what the code says; if not: python tests/api_page.py."""

from __future__ import annotations

import api_page


def test_the_page_of_the_api_is_current() -> None:
    assert api_page.PAGE.read_text("utf-8") == api_page.page()
