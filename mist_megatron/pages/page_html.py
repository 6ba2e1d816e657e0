"""The page as one HTML file: styles, scripts and figures inside, nothing fetched from anywhere."""

from __future__ import annotations

import jinja2

from mist_megatron.pages.parts import Page

COLOURS = 12
"""Segments beyond these begin anew; the legend and the tables tell them apart."""


def page_html(page: Page) -> str:
    """Whatever a model, a file or a note is called, it is text on the page and never a part of it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mist_megatron.pages", "template"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(page=page, colours=COLOURS)
