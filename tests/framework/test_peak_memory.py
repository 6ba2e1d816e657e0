"""Peak memory of whole small models against torch's own tracker, under fake tensors.

The models are plain torch, as DeepSpeed users train them; weights and gradients are there, the optimizer is
not (its bytes are held against DeepSpeed itself in test_states.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from short_form import one_of

pytest.importorskip("transformers", reason="needs the test framework environment")
import warm_start_server
from plain_values import value_of

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.memory import stage_memory
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.mesh import StageRole
from mist_megatron.targets.deepspeed import MEMORY

SHAPES = one_of(
    2,
    [
        # hidden, ffn, heads, layers, vocab, batch, seq, and 1 for GPT-2's positions and activation
        (512, 2048, 8, 4, 1000, 2, 512, 0),
        (512, 2048, 8, 4, 32000, 2, 512, 0),
        (1024, 4096, 16, 2, 500, 1, 1024, 0),
        (1024, 4096, 16, 6, 50304, 4, 1024, 0),
        (768, 3072, 12, 12, 50257, 8, 512, 0),
        (2048, 8192, 16, 3, 4096, 1, 2048, 0),
        (1024, 4096, 16, 2, 500, 2, 1024, 1),
        (512, 2048, 8, 4, 32000, 2, 512, 1),
    ],
)
PROGRAM = Path(__file__).parent / "track_peak.py"


@pytest.fixture(scope="module")
def tracked() -> dict[tuple[int, ...], int]:
    """All shapes in one process: torch's default type and tracker hooks stay out of this one."""
    arguments = [",".join(map(str, shape)) for shape in SHAPES]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=warm_start_server.environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(SHAPES, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_peak_within_two_percent(shape, tracked):
    hidden, ffn, heads, layers, vocab, batch, seq, gpt2 = shape
    model = model_from_mapping(
        {
            "family": "gpt", "layers": layers, "hidden": hidden, "ffn_hidden": ffn, "heads": heads,
            "vocab": vocab, "linear_bias": False, "tied_embeddings": False,
            "rotary": not gpt2, "learned_positions": gpt2 * seq,
        },
        "model",
    )  # fmt: skip
    # LayerNorm on CPU keeps its statistics in the precision of its input.
    memory = stage_memory(model, LayerOptions(norm_statistics_bytes=4), MEMORY, StageRole.ONLY)
    numbers = {
        s.B: batch, s.S: seq, s.TP: 1, s.CP: 1, s.DP: 1, s.INSTANCES: 1, s.SP: 0,
        s.RECOMPUTE["selective"]: 0, s.LAYERS: layers,
        s.CKPT: 0, s.IN_FLIGHT: 1, s.Z1: 0, s.Z2: 0, s.Z3: 0, **dict.fromkeys(s.OFFLOAD.values(), 0),
        s.HIDDEN: hidden, s.FFN: ffn, s.HEADS: heads, s.KV_HEADS: heads, s.HEAD_DIM: hidden // heads,
        s.VOCAB: vocab,
    }  # fmt: skip
    absent = sum(float(value_of(memory.terms[name], numbers)) for name in ("optimizer", "framework"))
    moments = {name: float(value_of(e, numbers)) for name, e in memory.peaks.items() if name != "step"}
    assert max(moments.values()) - absent == pytest.approx(tracked[shape], rel=0.02)
