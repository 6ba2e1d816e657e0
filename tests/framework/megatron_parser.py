"""Megatron's own argument parser and configuration classes, in this process, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import os
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

from mist_megatron.frameworks.megatron.write import arguments, common_flags, stage_flags
from mist_megatron.spec.plan import Plan


def shim():
    """tests/framework/megatron_cpu.py as a module, whatever pytest's import mode."""
    if "megatron_cpu" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "megatron_cpu", Path(__file__).with_name("megatron_cpu.py")
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["megatron_cpu"] = module
        spec.loader.exec_module(module)
    return sys.modules["megatron_cpu"]


@contextlib.contextmanager
def imported(*, capability: int = 9):
    """Megatron with its parser, believing in Transformer Engine on a GPU of this major capability."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron = shim()
        megatron.import_megatron()
        importlib.import_module("megatron.training.training")  # loaded before it is patched
        megatron.pretend_transformer_engine(capability=capability)
        yield


@functools.cache
def own_parser() -> argparse.ArgumentParser:
    """Of Megatron's arguments, for which it reads the source of its classes: that takes twenty times as long
    as to parse a command line, and comes to the same each time."""
    from megatron.training import arguments as A

    parser = argparse.ArgumentParser("pretrain_gpt.py", allow_abbrev=False)
    return A.add_megatron_arguments(parser)


def rank_arguments(plan: Plan, index: int) -> list[str]:
    """The whole argument list of a rank of one stage, without data, checkpoints and logging."""
    return arguments((*common_flags(plan), *stage_flags(plan, index)))


def parse(argv: list[str], *, world: int, environment: dict[str, str | None]) -> types.SimpleNamespace:
    """Everything Megatron checks before it builds a model; raises what Megatron raises.

    SystemExit of argparse becomes ValueError with argparse's words.
    """
    from megatron.training import arguments as A
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    variables = {"WORLD_SIZE": str(world), "RANK": "1"}  # a rank other than 0 keeps it quiet
    variables |= {name: value for name, value in environment.items() if value is not None}
    errors, parser = io.StringIO(), own_parser()
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv]),
        mock.patch.object(A, "add_megatron_arguments", lambda _: parser),
    ):
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                # Lists among the defaults are the parser's, and what checks the arguments may change them.
                args = A.validate_args(copy.deepcopy(A.parse_args()))
            except SystemExit as stop:
                raise ValueError(errors.getvalue().strip().splitlines()[-1]) from stop
            config = core_transformer_config_from_args(args)
            return types.SimpleNamespace(
                args=args,
                config=config,
                optimizer=get_megatron_optimizer_config(args),
                ddp=get_megatron_ddp_config(args),
            )
