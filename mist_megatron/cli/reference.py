"""`reference`: every key of a plan, a model or a profile, written from the code that reads it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from mist_megatron.cli.output import OutputOptions, emit_json
from mist_megatron.errors import InputError

EXAMPLE = """\
schema: 1
model: gpt3-1.3b
training: {global_batch: 32, seq_len: 2048, precision: fp16, flash_attention: false}
cluster: {gpu: l4-24gb, nodes: 1, gpus_per_node: 4}
target: megatron+patches
grad_accum: 8
stages:
  - {layers: 13, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 2, ckpt: 5, offload: {optimizer: 0.5}}
  - {layers: 11, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 2}
"""
"""A plan that is read by a test, so that the page cannot show one that is refused."""


MODEL_EXAMPLE = """\
family: llama
layers: 16
hidden: 1536
heads: 12
kv_heads: 4
ffn_hidden: 4096
vocab: 32000
"""
"""A model that is read by a test, as that plan is."""

Of = Literal["plan", "model", "profile"]


def reference(
    of: Annotated[str, typer.Argument(metavar="[plan|model|profile]", help="Of which file.")] = "plan",
    *,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print its JSON Schema, for editors and other programs."),
    ] = False,
    output: OutputOptions,
) -> None:
    """Describes every key of plan.yaml, and what each target runs; or of a model's file, or a profile."""
    if of not in get_args(Of):
        raise InputError(f"reference: got {of!r}, wanted one of {', '.join(get_args(Of))}")
    if schema:
        emit_json(_schema(of))
        return
    output.finish({"sections": [_section_document(*section) for section in _sections(of)]})
    if not output.json:
        # As it is: `mist-megatron reference > docs/plan.md` writes the page of the repository.
        print(reference_page(of), end="")  # noqa: T201


def _schema(of: str) -> dict[str, Any]:
    from mist_megatron.formats import model_yaml, plan_yaml, profile_yaml

    if of == "model":
        return model_yaml.json_schema()
    return plan_yaml.json_schema() if of == "plan" else profile_yaml.json_schema()


def reference_page(of: str = "plan") -> str:
    """The whole page."""
    heads = {"plan": _HEAD.format(example=EXAMPLE), "model": _MODEL_HEAD.format(example=MODEL_EXAMPLE)}
    parts = [heads.get(of, _PROFILE_HEAD)]
    parts += [_section_text(title, note, kind) for title, note, kind in _sections(of)]
    return "\n".join([*parts, *([_targets_text()] if of == "plan" else [])])


def _sections(of: str) -> list[tuple[str, str, type[Any]]]:
    return {"plan": _plan_sections, "model": _model_sections, "profile": _profile_sections}[of]()


def _profile_sections() -> list[tuple[str, str, type[Any]]]:
    from mist_megatron.formats.profile_yaml import ProfileDocument, TableReference
    from mist_megatron.spec import profile
    from mist_megatron.spec.learned_memory import LearnedMemory

    return [
        ("The document", "", ProfileDocument),
        ("`sources.NAME`", "", profile.Source),
        ("A figure", "As in `{value: 0.62, source: NAME}`.", profile.Quantity),
        ("`kernels`", "", profile.KernelCurves),
        ("`links`", "", profile.LinkCurves),
        ("`host`", "Between a GPU and the memory of its node.", profile.HostLink),
        ("`collectives[]`", "", profile.CollectiveCurve),
        ("`interference[]`", "", profile.InterferenceSet),
        ("`learned_memory[]`", "Written by `calibrate fit-memory`.", LearnedMemory),
        ("`tables[]`", "", TableReference),
    ]


def _plan_sections() -> list[tuple[str, str, type[Any]]]:
    from mist_megatron.formats.plan_yaml import ClusterDocument, PlanDocument
    from mist_megatron.spec.cluster import LinkOverrides
    from mist_megatron.spec.kinds import Offload
    from mist_megatron.spec.plan import Execution, StagePlan
    from mist_megatron.spec.strategies import LayerRun
    from mist_megatron.spec.training import TrainingSpec

    return [
        ("The document", "", PlanDocument),
        ("`training`", "", TrainingSpec),
        ("`cluster`", "", ClusterDocument),
        ("`cluster.links`", "Bytes per second in one direction.", LinkOverrides),
        ("`stages[]`", "nodes * gpus_per_node = dp * tp * context_parallel.", StagePlan),
        ("`stages[].strategies[]`", "Only target torch runs layers that differ.", LayerRun),
        ("`stages[].offload`", "Fractions from 0 to 1.", Offload),
        ("`execution`", "null takes what the target does by default.", Execution),
    ]


def _model_sections() -> list[tuple[str, str, type[Any]]]:
    from mist_megatron.formats.model_yaml import GroupDocument, ModelDocument
    from mist_megatron.spec.adapter import Adapter
    from mist_megatron.spec.constants import ModelConstants
    from mist_megatron.spec.entry import EncoderOutput, Entry
    from mist_megatron.spec.experts import ExpertSpec, LatentAttention
    from mist_megatron.spec.recurrent import DeltaNet, Mamba

    return [
        ("The document", "", ModelDocument),
        ("`groups[]`", "Such as `{layers: 6, pattern: [window, full]}`, of keys of `kinds`.", GroupDocument),
        ("`kinds.NAME.entry`", "Of a layer between groups of other widths or tokens.", Entry),
        ("`kinds.NAME.cross_attention`", "An encoder's output, behind an entry.", EncoderOutput),
        ("`adapter`", "", Adapter),
        ("`experts`", "", ExpertSpec),
        ("`latent_attention`", "", LatentAttention),
        ("`mamba`", "", Mamba),
        ("`delta_net`", "", DeltaNet),
        ("`constants`", "What no shape tells and decides what is trained.", ModelConstants),
    ]


_HEAD = """# plan.yaml

A plan says who computes which layers, how, and what that is predicted to cost. `mist-megatron tune --out DIR`
writes one; `predict`, `simulate`, `emit` and `explain` read it, as YAML or as JSON with the same keys.
Unknown keys, wrong sums and impossible divisions are errors. `mist-megatron reference` prints this page; the
keys of a model that is a mapping are those of its file (`mist-megatron reference model`).

```yaml
{example}```
"""


_MODEL_HEAD = """# A model of your own

A shape in YAML or JSON, for `--model FILE`. Most need no more than this; what is left out follows from the
family, as in its models. A Hugging Face `config.json` does as well. `mist-megatron reference model` prints
this page.

```yaml
{example}```
"""

_PROFILE_HEAD = """# A hardware profile

A profile says how fast a GPU, its links and its host are, and where each figure comes from. `mist-megatron
calibrate` measures and fits one; `--gpu FILE` takes it. `mist-megatron reference profile` prints this page.
"""


def _section_text(title: str, note: str, kind: type[Any]) -> str:
    rows = [
        f"| `{row['key']}` | {row['type']} | {row['default']} | {row['meaning']} |".replace("|  |", "| |")
        for row in _rows(kind)
    ]
    lines = [f"## {title}", "", *([note, ""] if note else [])]
    return "\n".join([*lines, "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _section_document(title: str, note: str, kind: type[Any]) -> dict[str, Any]:
    return {"title": title.replace("`", ""), "note": note, "keys": _rows(kind)}


def _rows(kind: type[Any]) -> list[dict[str, str]]:
    hints, meanings = get_type_hints(kind), _meanings(kind)
    return [
        {
            "key": item.name,
            "type": _type_words(hints[item.name]),
            "default": _default_words(item),
            "meaning": meanings.get(item.name, ""),
        }
        for item in fields(kind)
    ]


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The text under each field of a dataclass, in one line; what it has of another stands there."""
    meanings: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        meanings |= _own_meanings(base)
    return meanings


def _own_meanings(kind: type[Any]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    meanings: dict[str, str] = {}
    name = ""
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            meanings[name] = " ".join(str(node.value.value).split())
            name = ""
    return meanings


_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null"}


def _type_words(hint: Any) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if get_origin(inner) is Literal:
            return f"list of {_type_words(inner)}"
        return "list of whole numbers" if inner is int else "list of mappings"
    if get_origin(hint) in (dict, Mapping) or is_dataclass(hint):
        return "mapping"
    return " or ".join(_type_words(part) for part in get_args(hint))


def _default_words(item: Field[Any]) -> str:
    if item.default is MISSING:
        return "required" if item.default_factory is MISSING else "none"
    if item.default is None:
        return "null"
    if isinstance(item.default, bool):
        return str(item.default).lower()
    if item.default == ():
        return "none"
    return "none of them" if is_dataclass(item.default) else str(item.default)


def _targets_text() -> str:
    from mist_megatron.targets.facts import Capability
    from mist_megatron.targets.table import TARGETS

    names = list(TARGETS)
    meanings = _meanings(Capability)
    rows = []
    for item in fields(Capability):
        label = item.name.replace("_", " ")
        if item.name in meanings:
            label += f": {meanings[item.name]}"
        cells = [_capability_words(getattr(TARGETS[name].capability, item.name)) for name in names]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "## What each target runs",
            "",
            "`tune` searches only this, and `predict` and `emit` refuse the rest. `mist` is the execution",
            "engine of the Mist paper, priced for comparison: no files are written for it. `torch` is",
            "PyTorch alone (FSDP2, DTensor, pipelining), with files where layers have `strategies`.",
            "",
            f"| | {' | '.join(names)} |",
            "| --- |" + " --- |" * len(names),
            *rows,
            "",
        ]
    )


def _capability_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or callable(value):
        return "no" if value is None else "yes"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if is_dataclass(value):
        parts = {item.name: str(getattr(value, item.name)).replace("_", " ") for item in fields(value)}
        return (
            "; ".join(f"{name} {words}" for name, words in parts.items() if words.lower() != "none") or "none"
        )
    return str(value)
