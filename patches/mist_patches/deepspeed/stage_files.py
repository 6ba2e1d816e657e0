"""One JSON of DeepSpeed for each pipeline stage: which is this rank's, and whether they fit each other.

Why: `offload_optimizer` and recomputation stand in DeepSpeed's JSON, and a launcher gives one to all ranks.
DeepSpeed reads each rank's own and never compares them: with other batch sizes or levels on some stages
training would hang, or train a wrong model.

What: stages.json names the file of each stage; before torch is imported the files of all stages are read and
held against each other and against stages.json, and the rank's own is handed out. Standard library only.

Tested with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mist_patches.core.stage_arguments import _once, apply_stage_arguments, read_stages

OWN = (
    "_mist",
    "zero_optimization.offload_optimizer",
    "pipeline.activation_checkpoint_interval",
)
"""Keys in which the stages of a pipeline may differ."""
_NUMBERED = re.compile(r"ds_config\.stage(\d+)\.json")
Config = dict[str, Any]


def stage_config(path: str | os.PathLike[str]) -> str:
    """The JSON of this rank's pipeline stage, once the files of all stages are known to fit each other.

    `path` is the stages.json beside them. For `deepspeed.initialize(config=...)` in a script that is started
    without train_deepspeed.py.
    """
    document = read_stages(path)
    stage = apply_stage_arguments(document, where=path)
    config = config_of_stage(document, stage, path)
    if config is None:
        raise SystemExit(
            f"mist: {path}: its stages name no `config`; wanted a DeepSpeed plan with a pipeline"
        )
    return config


def config_of_stage(
    document: Mapping[str, Any], stage: Mapping[str, Any], path: str | os.PathLike[str]
) -> str | None:
    """The same for a document that was read; None where the stages have no JSON of their own."""
    if not any("config" in other for other in document["stages"]):
        return None
    folder = Path(path).parent
    for problem in file_problems(document, folder):
        raise SystemExit(f"mist: {problem}")
    return str(folder / stage["config"])


def add_config(argv: list[str], config: str) -> None:
    """Put --deepspeed_config behind a command line that does not name a file of its own."""
    for number, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag in {"--deepspeed_config", "--deepspeed-config"}:
            given = value or "".join(argv[number + 1 : number + 2])
            raise SystemExit(
                f"mist: the command line says {flag} {given}; wanted none: each rank gets its stage's"
            )
    argv += ["--deepspeed_config", config]


def file_problems(document: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Everything wrong with the files of the stages, worst first; each names its file."""
    stages = document["stages"]
    without = [stage["stage"] for stage in stages if "config" not in stage]
    if without:
        yield f"stages.json names a `config` for some stages, but none for stage {without[0]}"
        return
    for path in sorted(folder.glob("ds_config.stage*.json")):
        number = _NUMBERED.fullmatch(path.name)
        if number and int(number[1]) >= len(stages):
            yield f"{path} is another plan's: this one has {len(stages)} stages; wanted it away"
            return
    configs: list[Config] = []
    for stage in stages:
        file = folder / stage["config"]
        try:
            configs.append(_read(file))
        except ValueError as error:
            yield f"{file}: {error}"
            return
    for stage, config in zip(stages, configs, strict=True):
        file = folder / stage["config"]
        yield from (f"{file}: {problem}" for problem in _contradictions(document, stage, config))
    first = flat(configs[0])
    for stage, config in zip(stages, configs, strict=True):
        for key, mine, other in differences(first, flat(config)):
            name, its = folder / stage["config"], stages[0]["config"]
            yield f"{name}: {key}: got {other}, {its} has {mine}; it must be the same in all stages"


def _read(file: Path) -> Config:
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; wanted the JSON of a stage") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"got {type(config).__name__}, wanted a mapping")
    return config


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Path -> value, without what is a stage's own."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{above}{key}"
        if path in OWN:
            continue
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys that say another thing, and what each side says."""
    for key in sorted({*one, *two}):
        mine, other = (repr(side[key]) if key in side else "nothing there" for side in (one, two))
        if mine != other:
            yield key, mine, other


def _contradictions(document: Mapping[str, Any], stage: Mapping[str, Any], config: Config) -> Iterator[str]:
    """What a stage's JSON says and stages.json does not."""
    said = config.get("_mist")
    for key, wanted in (("stage", stage["stage"]), ("stages", len(document["stages"]))):
        if isinstance(said, dict) and said.get(key, wanted) != wanted:
            yield f"_mist.{key} is {said[key]}, wanted {wanted}: it is the file of another stage or plan"
    told = {
        "train_micro_batch_size_per_gpu": stage.get("micro_batch"),
        "gradient_accumulation_steps": document.get("micro_batches"),
        "zero_optimization.stage": stage.get("zero"),
    }
    here = flat(config)
    for key, planned in told.items():
        if planned is not None and here.get(key, planned) != planned:
            yield f"{key} is {here[key]!r}, stages.json has {planned}"
    moves, share = offloads(config), stage["offload"]["optimizer"]
    if moves != (share > 0.0):
        device = "'cpu'" if moves else "'none' or not there"
        key = "zero_optimization.offload_optimizer.device"
        yield f"{key} is {device}, stages.json has offload.optimizer {share:g}"
    interval = _section(config, "pipeline").get("activation_checkpoint_interval", 0)
    if bool(interval) != (stage["recompute_layers"] > 0):
        yield (
            f"pipeline.activation_checkpoint_interval is {interval}, stages.json has recompute_layers "
            f"{stage['recompute_layers']}"
        )


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether a JSON keeps any of the optimizer on the host."""
    section = _section(_section(config, "zero_optimization"), "offload_optimizer")
    return bool(section.get("device", "none") != "none")


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key)
    return section if isinstance(section, dict) else {}
