"""Attention of measured rows whose kernels were not those of the profiles."""

import numpy as np
import pytest

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.price.attention_kernels import AttentionName, with_attention
from mist_megatron.price.prices import Attention
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of

HEADER = (
    "id,source,gpu,nodes,gpus_per_node,framework,model,family,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "seq_len,global_batch,micro_batch,dp,tp,pp,zero,recompute,precision,flash_attention,measured_s"
)
ROW = (
    "one,{source},a100-sxm-80gb,1,8,fsdp,mpt,gpt,8,2048,8192,16,16,50304,"
    "8192,8,1,8,1,1,3,none,bf16,{fused},1.5"
)


def seconds(
    gpu: str, name: AttentionName | None, *, backward: bool, wide: int = 128, capped: bool = False
) -> float:
    cluster = cluster_of(CATALOGUE[gpu], 8)
    profile = profile_of(cluster)
    assert profile is not None
    sizes = (np.array(float(size)) for size in (1, 65536, 32, 32, wide))
    work = Attention(*sizes, backward=backward, capped=capped)
    return float(prices_of(with_attention(profile, name), cluster, "bf16").of(work).seconds)


@pytest.mark.parametrize(
    ("name", "backward", "slower"),
    [
        ("triton-2023", False, 1.4),
        ("triton-2023", True, 2.0),
        ("flash-1", False, 2.0),
        ("flash-1", True, 2.0),
    ],
)
def test_old_kernels_take_longer_by_what_was_published(
    name: AttentionName, backward: bool, slower: float
) -> None:
    gpu = "a100-sxm-80gb"
    ratio = seconds(gpu, name, backward=backward) / seconds(gpu, None, backward=backward)
    assert ratio == pytest.approx(slower, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "wide", "slower"),
    [("h100-sxm-80gb", 128, (128 + 110) / (128 + 55)), ("h100-sxm-80gb", 64, (64 + 110) / (64 + 55)),
     ("h100-sxm-80gb", 256, 1.0), ("a100-sxm-80gb", 128, 1.0)],
)  # fmt: skip
def test_capped_scores_wait_for_a_tanh_more_on_hopper(gpu: str, wide: int, slower: float) -> None:
    """One more instruction of the units of which exponentials take as long as products of 55 columns. Heads
    of 256 have time for it: they are priced as no faster than those of 128."""
    capped, plain = (seconds(gpu, None, backward=False, wide=wide, capped=one) for one in (True, False))
    assert capped / plain == pytest.approx(slower, rel=1e-6)


@pytest.mark.parametrize(("wide", "rate"), [(64, 497 / 648), (128, 1.0)])
def test_narrow_heads_wait_for_exponentials_on_hopper(wide: int, rate: float) -> None:
    """FlashAttention-3's published rates (Shah et al. 2024, forward, 16k tokens)."""
    at = [wide_s / wide for wide_s, wide in (
        (seconds("h100-sxm-80gb", None, backward=False, wide=wide), wide),
        (seconds("h100-sxm-80gb", None, backward=False), 128),
    )]  # fmt: skip
    assert at[1] / at[0] == pytest.approx(rate, rel=0.02)


def test_they_use_less_of_hopper() -> None:
    a100, h100 = (
        CATALOGUE[name].fp16_flops_per_s.value * seconds(name, "triton-2023", backward=False)
        for name in ("a100-sxm-80gb", "h100-sxm-80gb")
    )
    assert a100 / h100 == pytest.approx(0.629, rel=0.01)


def test_rows_of_llm_foundry_are_priced_with_them() -> None:
    texts = [ROW.format(source=source, fused=1) for source in ("MosaicML llm-foundry benchmarking", "other")]
    texts.append(ROW.format(source="MosaicML llm-foundry benchmarking", fused=0))
    rows = [read_rows(f"{HEADER}\n{text}\n", "runs.csv")[0] for text in texts]
    assert [row.attention for row in rows] == ["triton-2023", None, None]
    predict = predictor()
    old, usual = (predict(row).iteration_s for row in rows[:2])
    assert old > 1.1 * usual
