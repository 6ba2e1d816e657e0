"""What Megatron rejects, leaves out or breaks on later, of layers that a JSON of block configs says.

Sources are file:line of megatron-core 0.19.2: A = megatron/training/arguments.py, AU =
megatron/training/argument_utils.py, MG = megatron/training/models/gpt.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.errors import InputError
from mist_megatron.frameworks.findings import Finding, Level
from mist_megatron.frameworks.megatron.block_configs import PATH, TEXT, document_of
from mist_megatron.frameworks.megatron.reader import Reader

_WANTED = (
    "swiglu",
    "group-query-attention",
    "use-rope-scaling",
    "use-rotary-position-embeddings",
)
"""Switches without which the parser stops (A:212)."""
_BESIDE: tuple[tuple[str, Level, str], ...] = (
    ("multi-latent-attention", "rejected", "excludes --heterogeneous-layers-config-path (AU:296)"),
    ("num-experts", "ignored", "layers of --heterogeneous-layers-config-path are built as mixtures (MG:81)"),
    ("mtp-num-layers", "unpriced", "beside --heterogeneous-layers-config-path"),
    ("num-layers-per-virtual-pipeline-stage", "rejected", "its layers know no chunks of a stage (MG:90)"),
    ("num-virtual-stages-per-pipeline-rank", "rejected", "its layers know no chunks of a stage (MG:90)"),
    ("cuda-graph-impl", "unpriced", "graphs of layers of --heterogeneous-layers-config-path were not tried"),
)
"""Flags beside it, and what comes of them."""
_SIZES = {
    "num-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "rotary-base": "rope_theta",
}
"""Flags that the parser holds against the JSON."""


def layer_findings(read: Reader) -> Iterator[Finding]:
    """Of a command line that names such a JSON."""
    if not read.has(PATH):
        if read.has(TEXT):
            told = f"without --{PATH} layers are built as if it were not there (AU:295)"
            yield _say("ignored", TEXT, told)
        return
    for name in _WANTED:
        if not read.has(name):
            yield _say("rejected", PATH, f"needs --{name} (A:212)")
    if read.word("normalization") != "RMSNorm":
        yield _say("rejected", PATH, "needs --normalization RMSNorm (A:214)")
    for name, level, why in _BESIDE:
        if read.has(name) and read.word(name) != "none":
            yield _say(level, name, why)
    yield from _against(read)


def _against(read: Reader) -> Iterator[Finding]:
    """Where flags and the JSON differ; what is wrong with the JSON itself is said where it is priced."""
    text = read.word(TEXT)
    if text is None:
        return
    try:
        document = document_of(text, PATH)
    except InputError as error:
        yield _say("rejected", PATH, error.message)
        return
    for name, key in _SIZES.items():
        said = read.number(name)
        if said is not None and key in document and document[key] != said:
            yield _say("rejected", name, f"is {said}; {key} of --{PATH} is {str(document[key])[:40]} (A:212)")
    yield from _groups(read, document)
    tied = not read.has("untie-embeddings-and-output-weights")
    if document.get("tie_word_embeddings") is not tied:
        told = f"tie_word_embeddings of --{PATH} is {str(document.get('tie_word_embeddings'))[:40]} (A:223)"
        yield _say("rejected", "untie-embeddings-and-output-weights", told)


def _groups(read: Reader, document: dict[str, object]) -> Iterator[Finding]:
    """One number of heads in each group of all layers, whatever a number of groups beside it says."""
    blocks = document.get("block_configs")
    layers = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    parts = [part for layer in layers if isinstance(part := layer.get("attention"), dict)]
    if any("n_heads_in_group" not in part for part in parts):
        told = "n_heads_in_group is missing, which the parser asks for beside num_query_groups (A:207)"
        yield _say("rejected", PATH, told)
    sizes = [size for part in parts if (size := part.get("n_heads_in_group")) is not None]
    if any(size != sizes[0] for size in sizes):
        yield _say("rejected", PATH, "n_heads_in_group must be the same of all layers that attend (A:210)")
    heads, groups = read.number("num-attention-heads"), read.number("num-query-groups")
    if parts and not sizes:
        yield _say("rejected", PATH, "none of its layers attends (A:226)")
    elif sizes and heads and groups and isinstance(sizes[0], int) and heads != groups * sizes[0]:
        told = f"is {groups}; the {heads} heads in groups of {sizes[0]} of --{PATH} are others (A:226)"
        yield _say("rejected", "num-query-groups", told)


def _say(level: Level, flag: str, message: str) -> Finding:
    return Finding(level=level, key=f"--{flag}", message=message)
