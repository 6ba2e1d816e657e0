"""Runs the transcripts (`console` blocks) of the documents again and writes what is printed now, and the page
of the cost model.

    python tests/refresh_documents.py

For when the cost model moved; read the difference before committing it.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from cost_model_page import PAGE, page
from test_documents import DOCUMENTS, ROOT, parts, run, shown_in

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def refreshed(block: str, folder: Path) -> str:
    lines = []
    for item in shown_in(f"```console\n{block}```"):
        printed = "".join(run(part, folder) for part in parts(item.command))
        lines += [f"$ {item.command}", *(line.rstrip() for line in printed.rstrip().splitlines())]
    return "```console\n" + "\n".join(lines) + "\n```"


for name in DOCUMENTS:
    path = ROOT / name
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        text = BLOCK.sub(lambda found, here=here: refreshed(found.group(1), here), path.read_text("utf-8"))
    path.write_text(text, "utf-8")
PAGE.write_text(page(), "utf-8")
