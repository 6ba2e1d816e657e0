"""The one door through which tests outside tests/cli type commands; for Python there is `ask`."""

from __future__ import annotations

from mist_megatron.cli.app import run

__all__ = ["run"]
