"""Lint rejects what Megatron's own parser and configurations refuse, and says of what they take and then do
not carry out that it is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import megatron_parser

from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.read import constants_of
from mist_megatron.frameworks.megatron.reader import Reader

LAUNCH = Path(__file__).parents[2] / "launch"
KNOWN = frozenset(json.loads((LAUNCH / "megatron_flags.json").read_text("utf-8"))["flags"])
SHAPE = """
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --micro-batch-size 1
    --max-position-embeddings 4096 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 32000
"""
MOVED = "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
REFUSED = {
    "--recompute-granularity full": True,
    "--recompute-granularity selective --recompute-method uniform": True,
    "--optimizer-cpu-offload": True,
    "--use-precision-aware-optimizer": True,
    "--overlap-param-gather --overlap-grad-reduce": True,
    "--overlap-param-gather --use-distributed-optimizer": True,
    "--distribute-saved-activations": True,
    "--cpu-offloading-num-layers 2 --recompute-granularity selective": True,
    "--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2": True,
    "--use-megatron-fsdp": True,
    "--recompute-granularity full --recompute-method block --recompute-num-layers 0": False,
    "--recompute-granularity full --recompute-method block --recompute-num-layers 40": False,
    "--recompute-num-layers 2": False,
    "--data-parallel-sharding-strategy optim": False,
    "--optimizer-offload-fraction 0.5": False,
    f"{MOVED} --optimizer-offload-fraction 2.0": False,
    f"{MOVED} --exp-avg-dtype bf16": False,
}
"""Flags -> whether Megatron refuses them; those that it takes act on nothing."""

# Megatron's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("flags", REFUSED)
def test_lint_and_megatron_agree(flags: str) -> None:
    megatron_parser.shim().import_megatron()
    words = [*SHAPE.split(), *flags.split()]
    told = {one.level for one in lint_megatron(options_of(words), "", "x", KNOWN)} & {"rejected", "ignored"}
    try:
        megatron_parser.parse(words, world=8, environment={})
        refused = False
    except (AssertionError, ValueError):
        refused = True
    assert refused == REFUSED[flags]
    assert told == {"rejected" if refused else "ignored"}


def test_what_no_flag_says_is_megatrons_default() -> None:
    megatron_parser.shim().import_megatron()
    words = [*SHAPE.split(), "--position-embedding-type", "rope", "--no-rope-fusion"]
    parsed = megatron_parser.parse(words, world=8, environment={})
    read = constants_of(Reader(options=options_of(words), where="x"), rotary=True)
    wanted = parsed.config
    assert (read.norm_epsilon, read.init_std) == (wanted.layernorm_epsilon, wanted.init_method_std)
    assert (read.hidden_dropout, read.attention_dropout) == (wanted.hidden_dropout, wanted.attention_dropout)
    assert (read.rotary_base, read.rotary_share) == (parsed.args.rotary_base, parsed.args.rotary_percent)
