"""Entry point: parses, runs one command, and turns failures into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from mist_megatron import __version__
from mist_megatron.cli.commands import COMMANDS
from mist_megatron.cli.expand import expand_groups
from mist_megatron.cli.help_pages import PagedCommand, PagedGroup
from mist_megatron.errors import INTERRUPTED, TERMINATED, InputError, MistError

PROGRAM = "mist-megatron"
HELP_NAMES = {"help_option_names": ["-h", "--help"]}
REPORT = "this is a bug of mist-megatron: please report it with the lines above"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, a full quota and a limit on the size of files answer to a write."""

UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""What a name that was typed answers wherever it is first looked at."""


class LazyGroup(PagedGroup):
    """Lists commands from the table and imports a command only when it runs.

    What `--help` and completion see are stand-ins that know their name and summary.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for entry in COMMANDS:
            self.add_command(TyperCommand(entry.name, help=entry.summary, rich_help_panel=entry.panel))

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in and load_command(str(name)), rest


class ListingGroup(PagedGroup):
    """Subcommands of which `list` runs when none is named: `recipes` and `recipes --json` list recipes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if "list" in self.commands and not named:
            args = ["list", *args]
        return super().parse_args(ctx, args)


def load_command(name: str) -> Any:
    """Imports the command's module and builds its parser; a mapping of functions makes subcommands."""
    entry = next(entry for entry in COMMANDS if entry.name == name)
    module, attribute = entry.target.split(":")
    command = getattr(importlib.import_module(f"mist_megatron.cli.{module}"), attribute)
    parser = typer.Typer(add_completion=False, help=entry.summary, context_settings=HELP_NAMES)
    if isinstance(command, Mapping):
        parser.callback(cls=ListingGroup)(lambda: None)
        for subcommand, function in command.items():
            parser.command(name=subcommand, cls=PagedCommand)(expand_groups(function))
    else:
        parser.command(name=name, cls=PagedCommand)(expand_groups(command))
    return typer.main.get_command(parser)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")  # noqa: T201 - the one line that --version is for
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, rich_markup_mode="rich", context_settings=HELP_NAMES)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Finds the fastest way to train a large language model on given GPUs, for Megatron-LM and DeepSpeed.

    Exit codes: 2 bad input, 3 no plan fits, 4 bad profile, 5 target cannot run it.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201 - no command given: the help is the answer


def main() -> None:
    """The `mist-megatron` script."""
    sys.stdout, sys.stderr = _lenient(sys.stdout), _lenient(sys.stderr)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    code = run(sys.argv[1:])
    if code in (INTERRUPTED, TERMINATED):
        # All is cleared and said. CPython would end by the signal, not with the code, where the interrupt met
        # the exec of a string (pythonrun.c, unhandled_keyboard_interrupt), and tell of what it then drops.
        sys.stdout.flush()
        os._exit(code)
    # The answer is out: an interrupt from here on ends the process without a word of the interpreter.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


class Terminated(BaseException):
    """A batch system ends the job: as an exception, so that half-written folders and workers are cleared."""


def _terminate(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the second ends it at once
    raise Terminated


def _lenient(stream: TextIO | None) -> TextIO:
    """A stream that takes every text: unknown characters become question marks, and one that was closed
    before the start (`>&-`) swallows all."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return stream


def _silence_stdout() -> None:
    """What is left of the answer goes nowhere: else it is flushed at exit, and fails again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_left() -> int:
    """The reader (head, less) left: nobody is there to be told."""
    _silence_stdout()
    return 0


def _disk_is_full(error: OSError) -> int:
    """The answer was sent to a file that cannot take it."""
    _silence_stdout()
    failure = InputError(f"cannot write the answer: {error.strerror}")
    _show(failure.message)
    return failure.exit_code


def check_words(arguments: list[str]) -> None:
    """An empty word is a variable of the shell that is not set; as a path it would be the current folder, as
    a GPU the default one."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word.strip() and not (word.startswith("--") and word.endswith("=")):
            continue
        option = word.strip().rstrip("=") or (before if before.startswith("-") else "an argument")
        raise InputError(f"{option} is empty; wanted a value (is a variable of the shell not set?)")


def run(arguments: list[str]) -> int:
    """Runs one command line and gives its exit code; never raises."""
    try:
        check_words(arguments)
        code = typer.main.get_command(app).main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer's answer to an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except MistError as error:
        return _told(error.message, error.details, error.exit_code, arguments)
    except TyperException as error:
        return _told(*usage_message(error, arguments), error.exit_code, arguments)
    except (KeyboardInterrupt, typer.Abort):
        _show("interrupted")
        return INTERRUPTED
    except Terminated:
        _show("terminated")
        return TERMINATED
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as left:
        # typer's answer to a broken pipe, and the end of a shell completion.
        if isinstance(left.__context__, BrokenPipeError):
            return _reader_left()
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            return _disk_is_full(error)
        if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename is not None:
            refused = InputError(f"{error.filename} cannot be used: {error.strerror}")
            _show(refused.message)
            return refused.exit_code
        traceback.print_exc()
        _show(REPORT)
        return 1


WANTED = {
    "valid integer": "a whole number",
    "valid number": "a number",
    "finite number": "a finite number",
    "valid boolean": "true or false",
}
"""Parts of what the parser says of a value -> what was wanted, in our words."""


_WHAT_IF = "simulate PLAN --scale op=matmul:0.5, or --scale link=inter:2"
ELSEWHERE = {"what-if": _WHAT_IF, "whatif": _WHAT_IF, "what_if": _WHAT_IF}
"""What is an option of a command -> how it is asked for."""


_FIXED = {
    **dict.fromkeys(("tp", "tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size"), "tp"),
    **dict.fromkeys(
        ("pp", "pipeline-parallel", "pipeline-parallel-size", "pipeline-model-parallel-size"), "pp"
    ),
    **dict.fromkeys(("dp", "data-parallel", "data-parallel-size"), "dp"),
    **dict.fromkeys(("cp", "context-parallel", "context-parallel-size"), "cp"),
    **dict.fromkeys(("ep", "expert-parallel", "expert-model-parallel-size"), "ep"),
    **dict.fromkeys(("zero", "zero-stage"), "zero"),
    **dict.fromkeys(("micro-batch", "micro-batch-size", "mbs"), "micro_batch"),
}
MEANT = {
    **{f"--{word}": f"--fix {key}=N" for word, key in _FIXED.items()},
    **dict.fromkeys(("--nodes", "--num-nodes", "--nnodes"), "--gpus, all of them, and --gpus-per-node"),
    **dict.fromkeys(("--batch", "--batch-size"), "--global-batch, or --per-device-batch"),
    **dict.fromkeys(("--per-device-train-batch-size",), "--per-device-batch"),
    **dict.fromkeys(("--context", "--context-length", "--seq-len", "--seq-length", "--max-seq-len"), "--seq"),
    **dict.fromkeys(("--qlora",), "--lora, of weights that are not quantized"),
    **dict.fromkeys(("-o", "--output", "--output-dir"), "--out"),
}
"""What other programs call an option -> ours, for commands that have it."""


def usage_message(error: TyperException, arguments: list[str]) -> tuple[str, tuple[str, ...]]:
    """A wrong command line in our words, with the nearest option and where to look."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    wrong = getattr(error, "option_name", None)
    details: list[str] = []
    typed_first = arguments[0].lower() if arguments else ""
    if typed_first in ELSEWHERE and "no such command" in message:
        return f"no such command {arguments[0]!r}; wanted {ELSEWHERE[typed_first]}", ()
    if wrong and context and "such option" in message:
        known = [name for p in context.command.params for name in (*p.opts, *p.secondary_opts)]
        message = f"no such option: {wrong}"
        meant = MEANT.get(wrong.replace("_", "-"), "")
        names = {name.lstrip("-"): name for name in known}
        nearest = [names[name] for name in get_close_matches(wrong.lstrip("-"), names, n=1, cutoff=0.6)]
        if meant and meant.split()[0].rstrip(",") in known:
            nearest = [meant]
        details += [f"did you mean {nearest[0]}?"] if nearest else []
    param = getattr(error, "param", None)
    options = getattr(param, "opts", [])
    about = getattr(param, "help", None)
    if "missing argument" in message and about:
        message = f"{message}: {about}".removesuffix(".")
    extra = re.fullmatch(r"got unexpected extra arguments? \((\S+)\)", message.replace("(s)", "", 1))
    if extra and context and any("--model" in p.opts for p in context.command.params):
        details.append(f"did you mean --model {extra.group(1)}?")
    wanted = [ours for theirs, ours in WANTED.items() if theirs in message]
    typed = _typed(options, arguments)
    if wanted and options and typed is not None:
        message = f"{options[0]} is {typed!r}; wanted {wanted[0]}"
    # An option without its value is told by the parser, which does not know whose option it is.
    command = PROGRAM if wrong is None else " ".join([PROGRAM, *arguments[:1]])
    details.append(f"try: {context.command_path if context else command} --help")
    return message, tuple(details)


def _typed(options: list[str], arguments: list[str]) -> str | None:
    """What was typed for an option, the last time."""
    typed = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name in options:
            typed = value if equals else following
    return typed


def _told(message: str, details: tuple[str, ...], code: int, arguments: list[str]) -> int:
    """The line for people, and with --json the same where the answer would have been."""
    _show(message, details)
    if "--json" in arguments:
        failure = {"error": {"message": message, "details": list(details), "exit_code": code}}
        try:
            sys.stdout.write(json.dumps(failure, indent=2) + "\n")
            sys.stdout.flush()
        except OSError:  # the reader left, or the disk is full: it failed all the same
            _silence_stdout()
    return code


def _show(message: str, details: tuple[str, ...] = ()) -> None:
    from mist_megatron.cli.output import show_error  # rich is not needed before something is shown

    show_error(message, details)
