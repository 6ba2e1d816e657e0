"""The JSON of block configs by which megatron-core 0.19 builds layers that differ in width, heads or halves:
written, and read back from the flags that name it. Pure.

Its parser holds flags against the JSON and wants scaled rotary positions (arguments.py:212): a factor of 1
leaves them as they are. It wants one number of heads in each group of all layers, which its layers do not
look at where a number of groups stands beside it (heterogeneous_config.py).
"""

from __future__ import annotations

import json

from mist_megatron.errors import InputError
from mist_megatron.formats.block_configs import Block, read_blocks
from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.targets.megatron_layers import by_block_configs

FILE = "layers.json"
"""Its name in an emitted folder."""
PATH, TEXT = "heterogeneous-layers-config-path", "heterogeneous-layers-config-encoded-json"


def block_flags(model: ModelSpec) -> Flags:
    """That there is one, and what else the parser wants to be said."""
    if not by_block_configs(model):
        return ()
    scaled = model.constants.rotary_scaling == "llama3"
    return (
        flag("--use-rotary-position-embeddings"),
        *when(not scaled, flag("--use-rope-scaling"), flag("--rope-scaling-factor", 1.0)),
        flag(f"--{PATH}", FILE),
    )


def block_text(model: ModelSpec) -> str:
    """The JSON; `model` says of its own shape what flags do."""
    constants = model.constants
    layers = [_entry(model.kinds[place], model) for place in model.kind_of_layer]
    document = {
        "hidden_act": "silu",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": constants.rotary_base,
        "rope_scaling": {"factor": constants.rotary_factor if constants.rotary_scaling == "llama3" else 1.0},
    }
    rows = ",\n".join(f"    {json.dumps(layer)}" for layer in layers)
    head = json.dumps(document, indent=2).removesuffix("\n}")
    return f'{head},\n  "block_configs": [\n{rows}\n  ]\n}}\n'


def _entry(kind: LayerSpec, model: ModelSpec) -> dict[str, dict[str, object]]:
    attention: dict[str, object] = {"no_op": not kind.attends, "replace_with_linear": False}
    mlp: dict[str, object] = {"no_op": not kind.has_mlp, "replace_with_linear": False}
    groups = {"num_query_groups": kind.kv_heads} if kind.attends else {}
    return {
        "attention": {
            "n_heads_in_group": model.heads // model.kv_heads if groups else None,
            **groups,
            **attention,
        },
        "ffn": {"ffn_hidden_size": kind.ffn_hidden if kind.has_mlp else None, **mlp},
    }


def blocks_of(read: Reader, model: ModelSpec) -> list[Block]:
    """What each layer has, where flags name such a JSON; those of the model's own shape elsewhere."""
    own = [Block(model.kv_heads, model.ffn_hidden)] * model.layers
    if not read.has(PATH):
        return own
    if not read.has(TEXT):
        raise InputError(
            f"{read.where}: --{PATH} names {cut(read.text(PATH))!r}, which is not beside it",
            details=("the layers stand there, and are needed to price the run",),
        )
    where = f"{read.where}: {cut(read.text(PATH)).rpartition('/')[2]}"
    blocks = read_blocks(document_of(read.text(TEXT), where), where, model.heads, model.hidden)
    if len(blocks) != model.layers:
        raise InputError(
            f"{where}: block_configs has {len(blocks)} layers and --num-layers is {model.layers}; wanted as "
            "many"
        )
    return list(blocks)


def document_of(text: str, where: str) -> dict[str, object]:
    """The mapping that the JSON holds."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        told = "is empty" if not text.strip() else f"is no JSON: {error}"
        raise InputError(f"{where} {told}; wanted a mapping with block_configs") from None
    if not isinstance(document, dict):
        raise InputError(f"{where} is no mapping; wanted one with block_configs")
    return document
