"""How ranks that split sequences attend to each other's tokens: written, read and linted. Pure.

Sources: A = megatron/training/arguments.py, TC = core/transformer/transformer_config.py of 0.19, TE =
attn_forward_func_with_cp of Transformer Engine 2.5, which Megatron's parser asks nothing of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.frameworks.findings import Finding, Level
from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.spec.kinds import CONTEXT_EXCHANGES
from mist_megatron.spec.plan import Execution

KIND, SIZES = "cp-comm-type", "hierarchical-context-parallel-sizes"


def exchange_flags(execution: Execution) -> Flags:
    """Another exchange than the ring, which is Megatron's own; of one in two levels the ranks of each."""
    kind = execution.context_exchange or "p2p"
    return (
        *when(kind != "p2p", flag(f"--{KIND}", kind)),
        *when(execution.context_inner is not None, flag(f"--{SIZES}", *level_sizes(execution))),
    )


def exchange_fields(execution: Execution) -> dict[str, object]:
    """The same as fields of Megatron's configurations: a ring is said by nothing."""
    kind = execution.context_exchange
    sizes = list(level_sizes(execution)) or None
    return {"cp_comm_type": None if kind == "p2p" else kind, "hierarchical_context_parallel_sizes": sizes}


def level_sizes(execution: Execution) -> tuple[int, ...]:
    """Ranks that share out heads, and groups of them that rings join."""
    inner = execution.context_inner
    return () if inner is None else (inner, execution.context_parallel // inner)


def with_exchange(read: Reader, execution: Execution) -> Execution:
    """What a command line says of the exchange. Without ranks that split sequences it says nothing; with a
    single rank on one of its levels one in two is what the other level does (TE)."""
    name, cp = read.word(KIND), execution.context_parallel
    kind = next((one for one in CONTEXT_EXCHANGES if one == name), None)
    if cp == 1 or kind in (None, "p2p"):
        return execution
    if kind != "a2a+p2p":
        return replace(execution, context_exchange=kind)
    sizes = _sizes(read)
    if len(sizes) != 2 or math.prod(sizes) != cp:
        raise InputError(
            f"{read.where}: --{SIZES} is {cut(' '.join(read.options.get(SIZES, ()))) or 'missing'}; wanted "
            f"two numbers whose product is the {cp} ranks that split sequences (A:564)"
        )
    if 1 in sizes:
        return replace(execution, context_exchange="a2a" if sizes[1] == 1 else None)
    return replace(execution, context_exchange="a2a+p2p", context_inner=sizes[0])


def _sizes(read: Reader) -> tuple[int, ...]:
    """Numbers of ranks of each level; empty where they are none."""
    words = read.options.get(SIZES, ())
    whole = all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words)
    return tuple(map(int, words)) if whole else ()


def context_findings(read: Reader) -> Iterator[Finding]:
    """What the parser rejects, or Transformer Engine when training starts."""
    cp, kinds = read.number("context-parallel-size", 1) or 1, read.options.get(KIND, ())
    sizes, layers = _sizes(read), read.number("num-layers")
    if SIZES in read.options and math.prod(sizes) != cp:
        yield _say("rejected", SIZES, f"its product is not the context-parallel size {cp} (A:564)")
    if "a2a+p2p" in kinds and SIZES not in read.options:
        yield _say("rejected", KIND, f"a2a+p2p needs --{SIZES} (A:565)")
    if cp > 1 and len(kinds) > 1 and layers is not None and len(kinds) != layers:
        yield _say("rejected", KIND, f"{len(kinds)} kinds for {layers} layers (TC:2780)")
    if cp == 1:
        return
    if unknown := [kind for kind in kinds if kind not in CONTEXT_EXCHANGES]:
        yield _say(
            "rejected",
            KIND,
            f"Transformer Engine knows no {cut(unknown[0])}, only {', '.join(CONTEXT_EXCHANGES)}",
        )
    if "a2a+p2p" in kinds and len(sizes) > 2:
        yield _say("rejected", SIZES, f"Transformer Engine has two levels, not {len(sizes)}")


def _say(level: Level, name: str, message: str) -> Finding:
    return Finding(level=level, key=f"--{name}", message=message)
