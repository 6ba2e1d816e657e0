"""Published training runs as measured rows, in the layout that `mist-megatron validate` reads.

    python calibration/published_rows.py MEASURED/other/published_perf.csv --out DIR

Takes the dense runs whose every parallel setting is stated (tier A; B where said) on GPUs of the catalogue,
from sources whose framework is one that is modelled, and writes one CSV per source and GPU:
runs.SOURCE.GPU.csv. What a source does not print is what its program does by default, as said beside each
source below.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

COLUMNS = (
    "id", "source", "gpu", "nodes", "gpus_per_node", "framework", "model", "family", "layers", "hidden",
    "ffn_hidden", "heads", "kv_heads", "vocab", "tied_embeddings", "linear_bias", "seq_len", "global_batch",
    "micro_batch", "dp", "tp", "pp", "vpp", "cp", "sequence_parallel", "schedule", "zero", "recompute",
    "flash_attention", "precision", "dropout", "comm_overlap", "grad_bytes", "stages", "measured_s", "group",
    "note",
)  # fmt: skip
GPUS: Mapping[str, str] = {
    "H100-80 SXM": "h100-sxm-80gb",
    "A100-80 SXM": "a100-sxm-80gb",
    "A100-40 SXM": "a100-sxm-40gb",
    "A100-80 SXM (Selene)": "a100-sxm-80gb",
    "A100-80 SXM (Jean Zay)": "a100-sxm-80gb",
    "A100-80 SXM (NDm A100 v4)": "a100-sxm-80gb",
    "H100 SXM 80GB": "h100-sxm-80gb",
    "B200": "b200-sxm-180gb",
    "GB200 NVL72": "gb200-186gb",
    "GB300 NVL72": "gb300-288gb",
    "V100-32 SXM2": "v100-sxm-32gb",
}
NETWORK_GB_PER_S: Mapping[str, int] = {
    "8x200Gb HDR IB/node, NVLink3": 200,
    "8x200Gb HDR IB/node": 200,
    "1600Gb/node RoCE": 200,
    "4x100Gb Omni-Path/node, NVLink3": 50,
    "4x100Gb Omni-Path/node": 50,
    "NVLink2 intra; 4x100Gb Omni-Path/node (Jean Zay)": 50,
}
"""GB/s per node; the catalogue's usual network where the source is silent."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What all runs of one publication have in common."""

    begins: str
    """How its name begins."""
    short: str
    framework: str
    flash_attention: bool
    linear_bias: bool
    dropout: float
    grad_bytes: int
    vocab: str = ""
    """Where the publication does not print it."""
    tiers: tuple[str, ...] = ("A",)
    """Which of its rows are taken, by what is known of them."""
    family: str = "gpt"
    tied: bool = True
    tuned: bool = False
    """Reductions, gathers and tensor-parallel collectives overlap, sequences are split, losses are fused;
    rows of experts, of adapters, of Megatron-FSDP, of 4 bits and with recomputation are left out."""


SOURCES = (
    # MPT models: FlashAttention, no biases, no dropout; gradients reduced in 4 bytes unless marked PURE.
    Source(begins="MosaicML llm-foundry", short="llm-foundry", framework="fsdp", flash_attention=True,
           linear_bias=False, dropout=0.0, grad_bytes=4),
    # Megatron-LM of 2021: unfused attention, dropout 0.1, gradients in 4 bytes.
    Source(begins="Megatron-LM SC21", short="sc21", framework="megatron-lm", flash_attention=False,
           linear_bias=True, dropout=0.1, grad_bytes=4),
    # Megatron-DeepSpeed pipelines with ZeRO 1, the same kernels.
    Source(begins="BigScience tr11-176B", short="bigscience", framework="deepspeed-pipeline",
           flash_attention=False, linear_bias=True, dropout=0.0, grad_bytes=4),
    Source(begins="BLOOM", short="bigscience", framework="deepspeed-pipeline", flash_attention=False,
           linear_bias=True, dropout=0.0, grad_bytes=4),
    Source(begins="MT-NLG", short="mt-nlg", framework="deepspeed-pipeline", flash_attention=False,
           linear_bias=True, dropout=0.1, grad_bytes=4),
    # ZeRO 3; step times from FLOP/s with this vocabulary, most of them read off a bar chart (2 TFLOP/s). Of
    # one model on one cluster they are m * c + x for 1 to 32 sequences m a GPU: gathers and reductions hide
    # behind nothing, so no overlap is assumed.
    Source(begins="DeepSpeed on Azure", short="azure", framework="deepspeed-zero", flash_attention=False,
           linear_bias=True, dropout=0.1, grad_bytes=2, vocab="50304", tiers=("A", "B")),
    # NVIDIA's performance summaries; the flags are those of its recipes, which the tables do not print.
    Source(begins="Megatron-Bridge perf summary", short="megatron-bridge", framework="megatron-core",
           flash_attention=True, linear_bias=False, dropout=0.0, grad_bytes=2, family="llama", tied=False,
           tuned=True),
    Source(begins="Megatron-Bridge skills docs", short="megatron-bridge-docs", framework="megatron-core",
           flash_attention=True, linear_bias=False, dropout=0.0, grad_bytes=2, family="llama", tied=False,
           tuned=True),
    Source(begins="Megatron-LM examples/llama README", short="megatron-lm-llama", framework="megatron-core",
           flash_attention=True, linear_bias=False, dropout=0.0, grad_bytes=2, family="llama", tied=False,
           tuned=True),
    # Megatron-LM of 2021 on nodes of 4 V100; steps are rounded to a second of 23 to 53.
    Source(begins="BigScience tr3m", short="bigscience-v100", framework="megatron-lm", flash_attention=False,
           linear_bias=True, dropout=0.1, grad_bytes=4),
)  # fmt: skip


def converted(runs: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Rows by (source, GPU); runs that cannot be expressed are left out."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in runs:
        source = next((item for item in SOURCES if run["source"].startswith(item.begins)), None)
        gpu = GPUS.get(run["hardware"])
        if source is None or gpu is None or run["tier"] not in source.tiers:
            continue
        if source.tuned and not _plain(run):
            continue
        gpus = int(run["n_gpus"])
        per_node = min(int(run["gpus_per_node"]), gpus)
        if gpus % per_node == 0:
            row = _row(run, source, gpu, gpus // per_node, per_node)
            found.setdefault((source.short, gpu), []).append(row)
    return found


def _plain(run: Mapping[str, str]) -> bool:
    """Whether dense layers alone were trained, in 16 or 8 bits, every activation kept."""
    odd = ("LoRA" in run["model"], "FSDP" in run["zero_or_fsdp"], "nvfp4" in run["precision"])
    return not any(odd) and run["recompute"] == "none" and (run["ep"] or "1") == "1"


def _precision(printed: str) -> str:
    if "mx" in printed:
        return "fp8-mxfp8"
    if "cs" in printed or "current" in printed:
        return "fp8-tensorwise"
    return "fp8" if "fp8" in printed else "bf16" if "bf16" in printed else "fp16"


def _row(run: Mapping[str, str], source: Source, gpu: str, nodes: int, per_node: int) -> dict[str, str]:
    vpp = int(run["vpp"] or 1)
    network = NETWORK_GB_PER_S.get(run["interconnect"])
    sharded = run["zero_or_fsdp"]
    levels = {"FULL_SHARD": 3, "ZeRO-3": 3, "SHARD_G": 2, "ZeRO-1": 1, "dist-opt": 1}
    zero = next((level for name, level in levels.items() if name in sharded), 0)
    pure = "mp mode PURE" in run["note"]
    tensor = source.tuned and int(run["tp"]) > 1
    overlaps = ["grad-reduce", "param-gather", *(["tp"] if tensor else [])] if source.tuned else ["none"]
    notes = [f"({network} GB/s per node)"] if network else []
    notes += ["fused cross entropy"] if source.tuned else []
    return {
        "id": run["row_id"], "source": run["source"], "gpu": gpu, "nodes": str(nodes),
        "gpus_per_node": str(per_node), "framework": source.framework, "model": run["model"],
        "family": source.family,
        "layers": run["layers"], "hidden": run["hidden"], "ffn_hidden": run["ffn"], "heads": run["heads"],
        "kv_heads": run["kv_heads"] or run["heads"], "vocab": run["vocab"] or source.vocab,
        "tied_embeddings": str(int(source.tied)), "linear_bias": str(int(source.linear_bias)),
        "seq_len": run["seq"], "global_batch": run["gbs"], "micro_batch": run["mbs"],
        "dp": run["dp"], "tp": run["tp"], "pp": run["pp"], "vpp": str(vpp),
        "cp": run["cp"] or "1", "sequence_parallel": str(int(tensor)),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "zero": str(zero), "recompute": run["recompute"], "flash_attention": str(int(source.flash_attention)),
        "precision": _precision(run["precision"]), "dropout": str(source.dropout),
        "comm_overlap": ", ".join(overlaps), "grad_bytes": "2" if pure else str(source.grad_bytes),
        "stages": _stages(run, nodes * per_node, per_node, zero),
        "measured_s": run["step_time_s"], "group": f"{source.short} {run['model']} {run['seq']}",
        "note": "; ".join(notes),
    }  # fmt: skip


def _stages(run: Mapping[str, str], gpus: int, per_node: int, zero: int) -> str:
    """Stages of unlike size: embedding and loss count as a layer each (Llama 3.1 405B's recipes, BLOOM)."""
    layers, pp = int(run["layers"]), int(run["pp"])
    if layers % pp == 0 or (layers + 2) % pp:
        return ""
    each = min(gpus // pp, per_node)
    alike = {
        "nodes": gpus // pp // each, "gpus_per_node": each, "dp": int(run["dp"]), "tp": int(run["tp"]),
        "micro_batch": int(run["mbs"]), "zero": zero, "recompute": run["recompute"],
    }  # fmt: skip
    counts = [(layers + 2) // pp - (at == 0) - (at == pp - 1) for at in range(pp)]
    whole = run["recompute"] == "full"
    return json.dumps([{"layers": count, "ckpt": count if whole else 0, **alike} for count in counts])


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """As CSV text."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        found = converted(csv.DictReader(file))
    options.out.mkdir(parents=True, exist_ok=True)
    for (source, gpu), rows in sorted(found.items()):
        path = options.out / f"runs.{source}.{gpu}.csv"
        path.write_text(table(rows))
        print(f"{path.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
