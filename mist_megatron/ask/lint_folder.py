"""Files that `emit` wrote, each alone or in its folder: which one says what a run does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_mapping, read_text
from mist_megatron.frameworks.deepspeed.arguments import DEEPSPEED_ARRAYS
from mist_megatron.frameworks.megatron.block_configs import FILE, PATH, TEXT
from mist_megatron.frameworks.megatron.command import OPEN_VALUE, Options
from mist_megatron.frameworks.stages_json import check_stages

_NAMES = ("args.sh", "ds_config.json", "ds_config.stage0.json", "train.sh")
"""By how much they say."""
_STARTERS = frozenset(
    {
        *("train.sh", "env.sh", "stages.json", "slurm.sbatch", "deepspeed_launcher.sh", "pytorchjob.yaml"),
        *("trainjob.yaml", "trainjob-2.1.yaml", "skypilot.yaml", "plan.yaml", FILE),
    }
)
"""Emitted files that start what others say, or hold what people fill in."""
_SOURCES = re.compile(r"^[ \t]*(?:source|\.)[ \t]+\"?(?:[^\s\"]*/)?([\w.-]+)\"?[ \t]*$", re.M)
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+\S*\bargs\.sh\"?\s*$", re.M)


def said_by(path: Path) -> Path:
    """The file that says most of a folder which `emit` wrote, for the folder and for what only starts it."""
    folder = path if path.is_dir() else path.parent
    if folder == path or (path.name in _STARTERS and path.is_file() and (folder / "stages.json").is_file()):
        if (folder / "args.sh").is_file() and _is_megatron(folder):
            return folder / "train.sh"
        spec_file = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
        if spec_file is None and folder == path and (folder / "plan.yaml").is_file():
            raise InputError(
                f"{path}: its plan is no job of Megatron or DeepSpeed, whose files lint reads",
                details=(f"try: mist-megatron predict {shlex.quote(str(folder / 'plan.yaml'))}",),
            )
        if spec_file is None and folder == path:
            raise InputError(
                f"{path} is a folder without {', '.join(_NAMES[:-1])} or {_NAMES[-1]}",
                details=("try: name the launch script or the DeepSpeed JSON in it",),
            )
        return spec_file or path
    return path


def _is_megatron(folder: Path) -> bool:
    """Whether a script of the folder starts Megatron with args.sh."""
    script = folder / "train.sh"
    return script.is_file() and '"${MEGATRON_ARGS[@]}"' in read_text(script)


def with_sourced(text: str, file: Path) -> str:
    """A script with those in the places where it sources them that lie beside it."""

    def there(match: re.Match[str]) -> str:
        beside = file.parent / match.group(1)
        return read_text(beside) if beside.is_file() else match.group()

    return _SOURCES.sub(there, text)


def refuse_alone(text: str, file: Path) -> None:
    """Files of ours whose arguments stand in another, which is not there."""
    if _SOURCED.search(text) and not (file.parent / "args.sh").is_file():
        told = "it starts what args.sh says, which is not beside it"
    elif "USER_ARGS=(" in text and "MEGATRON_ARGS=(" not in text and "_ARGS[@]" not in text:
        told = "values that people fill in; the arguments stand in args.sh, which is not beside it"
    else:
        return
    raise InputError(f"{file}: {told}", details=("try: lint the folder that emit wrote, or its args.sh",))


def stages_alone(text: str, where: str) -> dict[str, Any] | None:
    """A stages.json that is read without the arguments that its stages share."""
    if '"stages"' not in text or '"framework"' not in text:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return check_stages(document, where) if isinstance(document, dict) else None


def stages_beside(file: Path, start: str) -> dict[str, Any] | None:
    """stages.json beside a file that has the name of an emitted one."""
    beside = file.parent / "stages.json"
    if not file.name.startswith((start, "train.sh")) or not beside.is_file():
        return None
    return check_stages(load_mapping(beside), str(beside))


def with_layers(options: Options, file: Path) -> Options:
    """The flags with the text of the JSON of block configs that they name, as Megatron's parser adds it. What
    a script leaves open of its folder is that of the script."""
    named = options.get(PATH, ())
    if not named or not named[0] or TEXT in options:
        return options
    mark = OPEN_VALUE.match(named[0])
    name = named[0] if mark is None else named[0][mark.end() :].lstrip("/")
    here = mark is None or "BASH_SOURCE" in mark.group() or (file.parent / name).is_file()
    if OPEN_VALUE.search(name) or not here:
        return options
    return {**options, PATH: (name,), TEXT: (read_text(file.parent / name),)}


def config_beside(text: str, file: Path) -> Path | None:
    """The JSON beside arguments that were emitted for DeepSpeed, which say nothing without it."""
    if not any(f"{name}=(" in text for name in DEEPSPEED_ARRAYS):
        return None
    config = file.parent / "ds_config.json"
    if not config.is_file():
        config = file.parent / "ds_config.stage0.json"
    if not config.is_file():
        raise InputError(
            f"{file}: arguments of a DeepSpeed plan, without the ds_config.json that belongs beside them",
            details=("try: lint it in its folder, or lint ds_config.json itself",),
        )
    return config
