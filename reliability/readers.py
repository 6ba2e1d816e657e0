"""Every reader of files that people bring, with a sound sample of what it reads.

Each reader takes a text to its end: what a command would make of it, short of pricing. Tests hold that every
sample is read; `fuzz.py` damages them.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "patches"))
from mist_patches.core.node_order import ordered
from mist_patches.core.stage_arguments import read_stages
from mist_patches.core.stage_guards import check

from mist_megatron.ask.replay import in_order
from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.importing import read_output
from mist_megatron.calibrate.links import matrices_of, read_links
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.errors import InputError
from mist_megatron.formats.document import parse
from mist_megatron.formats.gpu_yaml import gpu_from_mapping
from mist_megatron.formats.huggingface import model_from_huggingface
from mist_megatron.formats.links_yaml import links_from_text, links_to_text
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.formats.profile_yaml import profile_from_text
from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.frameworks.deepspeed.schema import schema_from_text
from mist_megatron.frameworks.file_kinds import kind_of, mapping_of
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.frameworks.megatron.command import read_command_line
from mist_megatron.frameworks.megatron.lint import lint_command
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.frameworks.trainer_yaml import adapter_findings, filled, named_config
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.recording import record
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.traces.reader import read_trace

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = schema_from_text((ROOT / "launch" / "deepspeed_schema.json").read_text("utf-8"))
KNOWN = frozenset(json.loads((ROOT / "launch" / "megatron_flags.json").read_text("utf-8"))["flags"])
CLUSTER = ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=2, gpus_per_node=8)
SAMPLES = ROOT / "reliability" / "samples"
PROFILES = ROOT / "calibration" / "profiles"


@dataclass(frozen=True)
class Reader:
    """One kind of file."""

    read: Callable[[str], object]
    samples: tuple[Path, ...]


def script(text: str) -> None:
    """`lint` of a launch script."""
    command = read_command_line(text, "run.sh")
    lint_command(command, "run.sh", KNOWN)
    plan_of(command.options, (), CLUSTER, "run.sh")


def deepspeed(text: str) -> None:
    """`lint` and `convert` of a DeepSpeed configuration."""
    reading = read_config(read_loose(text, "ds.json"), SCHEMA)
    assert isinstance(reading.stage, int)
    reading.moves("offload_optimizer"), reading.moves("offload_param"), reading.ratio, reading.wide_grads
    json.dumps([finding.message for finding in reading.findings]).encode()


def trainer(text: str) -> None:
    """`lint` of an Accelerate, LLaMA-Factory or axolotl file."""
    kind_of(text)
    document = mapping_of(text, "accelerate.yaml")
    adapter_findings(document)
    named = named_config(document, "accelerate.yaml")
    read_config(read_loose(json.dumps(filled(named.config, named.fills), default=str), "x"), SCHEMA)


def _output(text: str) -> object:
    return read_output(text, "output", Hints(date="2026-11-21"))


def _profile(text: str) -> object:
    """Without the hash, for which every damaged profile would be refused."""
    text = "\n".join(line for line in text.split("\n") if not line.startswith("content_hash:"))
    return profile_from_text(text, "profile", lambda name: (PROFILES / Path(name).name).read_bytes())


def _samples(pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(SAMPLES.glob(pattern)))


def trace(text: str) -> None:
    """`replay` of a trace, played again as it was."""
    source = io.BytesIO(text.encode("utf-8", "surrogatepass"))
    traces, _ = in_order([read_trace(source, "trace.json")])
    recording = record(traces, None)
    play(recording.graph)


def links(text: str, where: str) -> None:
    """`calibrate import` of links, written and read again."""
    matrices, _ = matrices_of(read_links(text, where, Hints(date="2026-11-21")).links)
    links_from_text(links_to_text(matrices), "links.yaml")


def stages(text: str) -> None:
    """What a training job reads before anything starts; it refuses by leaving with one line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            check(read_stages(path))
        except SystemExit as left:
            raise refused(left) from left


def refused(left: SystemExit) -> InputError:
    """The patches stand alone, so nothing but they themselves makes foreign words fit for a terminal."""
    assert str(left.code).isprintable(), left.code
    return InputError(str(left.code))


def hosts(text: str) -> None:
    """The nodes of a job, first what the plan names and then what the job got, a line each."""
    planned, _, got = text.partition("\n\n")
    try:
        ordered(planned.split(), got.split())
    except SystemExit as left:
        raise refused(left) from left


READERS: Mapping[str, Reader] = {
    "plan": Reader(
        lambda text: plan_from_text(text, "plan.yaml"),
        (ROOT / "recipes" / "gpt3-22b-4x8-l4" / "plan.yaml", *_samples("plan*.yaml")),
    ),
    "model": Reader(lambda text: model_from_mapping(parse(text, "m"), "m"), _samples("model*.yaml")),
    "huggingface": Reader(
        lambda text: model_from_huggingface(parse(text, "config.json"), "config.json"),
        _samples("huggingface*.json"),
    ),
    "profile": Reader(_profile, (PROFILES / "h200-sxm-141gb.yaml",)),
    "script": Reader(script, _samples("script*.sh")),
    "deepspeed": Reader(deepspeed, _samples("deepspeed*.json")),
    "trainer": Reader(trainer, _samples("trainer*.yaml")),
    "measured rows": Reader(lambda text: read_rows(text, "rows.csv"), _samples("rows*.csv")),
    "nccl-tests": Reader(_output, _samples("nccl*")),
    "mpigraph": Reader(_output, _samples("mpigraph*")),
    "kineto": Reader(_output, _samples("kineto*.json")),
    "trace": Reader(trace, _samples("trace*.json")),
    "links": Reader(
        lambda text: links(text, "links.log"), (*_samples("links*.yaml"), *_samples("mpigraph*"))
    ),
    "table of links": Reader(lambda text: links(text, "links.csv"), _samples("links*.csv")),
    "stages": Reader(stages, tuple((ROOT / "recipes").glob("gpt3-22b-4x8-l4/stages.json"))),
    "hosts": Reader(hosts, _samples("hosts*")),
    "gpu": Reader(lambda text: gpu_from_mapping(parse(text, "gpu.yaml"), "gpu.yaml"), _samples("gpu*.yaml")),
    "table of runs": Reader(lambda text: read_rows(text, "runs.csv"), _samples("runs*.csv")),
    "raw measurements": Reader(_output, _samples("raw*.jsonl")),
}
