"""Writes docs/commands.md from the parsers of the commands.

    python tests/cli/commands_page.py

A test holds that the page is what this program writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mist_megatron.cli.app import load_command
from mist_megatron.cli.commands import COMMANDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
HEAD = """# Commands

Written by `python tests/cli/commands_page.py` from the program itself. Exit codes: 2 bad input, 3 no plan
fits, 4 a hardware profile cannot be used, 5 the target cannot run the plan, 130 and 143 interrupted. Every
command takes `--json`.
"""


def page() -> str:
    parts = [HEAD]
    for entry in COMMANDS:
        command = load_command(entry.name)
        subcommands = getattr(command, "commands", None) or {"": command}
        for name, one in subcommands.items():
            parts.append(section(f"{entry.name} {name}".strip(), one))
    return "\n".join(parts)


def section(name: str, command: Any) -> str:
    arguments = " ".join((p.name or "").upper() for p in command.params if p.param_type_name == "argument")
    lines = [f"## {name}", "", (command.help or "").split("\f")[0].strip(), ""]
    lines += [f"`mist-megatron {name} {arguments}`".replace(" `", "`"), ""]
    options = [p for p in command.params if p.param_type_name == "option" and p.help and p.name != "help"]
    lines += ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in options:
        names = ", ".join(f"`{opt}`" for opt in (*option.opts, *option.secondary_opts))
        default = (
            "" if option.default in (None, False, True) or callable(option.default) else f"{option.default}"
        )
        lines.append(f"| {names} | {default} | {option.help.replace('|', ' or ')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
