"""Every failure a user can meet, in one place.

The tree, with the exit code of the command line:

* MistError
  x InputError        2  something that was typed or read is wrong
  x NoFeasiblePlan    3  the question is fine, no plan answers it
  x ProfileError      4  a hardware profile cannot be used
  x EmitError         5  a target cannot run what it is asked to

Anything else that escapes is a bug of ours (exit 1, traceback, "please report"). A signal ends a command with
128 and its number, as shells expect.

A message is one line: what, where, got, wanted. `details` are further short lines, shown indented
below it: the closest miss, the largest part, what to try.
"""

from __future__ import annotations

import unicodedata
from typing import ClassVar

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after SIGINT (2) and SIGTERM (15)."""


def visible(text: str) -> str:
    """Text with control characters, lone surrogates and invisible formatting written as escapes.

    Messages quote files and command lines; what these hold must neither break the one line of a message
    nor command the terminal that shows it.
    """
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    if text.isascii() and text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in hidden else c for c in text)


class MistError(Exception):
    """A failure that is explained to the user in one line, without a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, details: tuple[str, ...] = ()) -> None:
        super().__init__(visible(message))
        self.message = visible(message)
        self.details = tuple(visible(line) for line in details)

    def __str__(self) -> str:
        return "\n".join((self.message, *(f"  {line}" for line in self.details)))


class InputError(MistError):
    """Something that was typed or read is wrong: a flag, a file, a key, a number."""

    exit_code = 2


class NoFeasiblePlan(MistError):
    """Every configuration was ruled out for an understood reason."""

    exit_code = 3


class ProfileError(MistError):
    """A hardware profile is damaged, incomplete, or of another device."""

    exit_code = 4


class EmitError(MistError):
    """The target framework cannot run this plan; the message names the rule and a target that can."""

    exit_code = 5
