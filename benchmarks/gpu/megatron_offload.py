"""Offload of every kind in Megatron-core on one GPU: time, peak memory, and what copies run beside.

    python benchmarks/gpu/megatron_offload.py --out offload.jsonl [--budget-s 400]
    python benchmarks/gpu/megatron_offload.py --out trial.jsonl --device cpu

Needs torch, megatron-core and this repository. A GPT of Megatron's own layers is trained with this project's
own patches: fractions 0, 0.25, 0.5 and 1 of weights, gradients, optimizer states and activations in host
memory, then half of everything with decoupled steps; then layers whose attention and MLP are side by side
(patch `parallel_block`), of Megatron's modules and, where it is installed, of Transformer Engine's. One JSON
line per case, written as it is measured; cases that the file holds are not measured again. `compare.py` holds
predictions against the lines.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.util
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "tests" / "framework"), str(Path(__file__).parent)]

import training_steps  # noqa: E402
from trace_overlap import overlap_of, read_trace  # noqa: E402

KINDS = ("weights", "grads", "optimizer", "activations")
FRACTIONS = (0.25, 0.5, 1.0)
_HANGS_S = 120.0
"""A case that takes longer, a fifth of all the time there is, hangs."""
FAILED, UNUSABLE = 1, 3
"""Exit status: some case failed; the GPU takes no more work from this process, another one may go on."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and what of it lives on the host."""

    framework: str = "megatron"
    hidden: int = 2048
    ffn_hidden: int = 5632
    layers: int = 16
    heads: int = 16
    vocab: int = 50304
    seq: int = 1024
    micro_batch: int = 4
    grad_accum: int = 2
    ckpt: int = 4
    weights: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    decoupled: bool = False
    norms: int = 0
    """Attention and MLP side by side, with so many norms ..."""
    engine: bool = False
    """... of Transformer Engine's modules."""


def cases(tiny: bool) -> list[Case]:
    """0.9 billion parameters with a quarter of the layers recomputed; the case without offload first."""
    first = Case()
    if tiny:
        first = Case(hidden=32, ffn_hidden=64, layers=4, heads=2, vocab=128, seq=16, micro_batch=2, ckpt=1)
    single = [replace(first, **{kind: fraction}) for kind in KINDS for fraction in FRACTIONS]
    together = replace(first, **dict.fromkeys(KINDS, 0.5), decoupled=True)
    beside = [replace(first, norms=norms) for norms in (1, 2)]
    engines = [
        replace(case, engine=True) for case in beside if importlib.util.find_spec("transformer_engine")
    ]
    return [first, replace(first, decoupled=True), *single, together, *beside, *engines]


def start(device: str) -> None:
    """One process that is a whole Megatron job."""
    import megatron_cpu

    if device == "cpu":
        megatron_cpu.install(two_devices=True)
    megatron_cpu.import_megatron()
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer_config
    from megatron.core.utils import get_te_version

    if get_te_version() is None:  # comparing an absent version with a number raises TypeError
        optimizer_config.is_te_min_version = lambda *a, **k: False

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    parallel_state.initialize_model_parallel()


def build_model(case: Case) -> tuple[Any, Any]:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=case.ffn_hidden,
        num_attention_heads=case.heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        recompute_granularity="full" if case.ckpt else None,
        recompute_method="block" if case.ckpt else None,
        recompute_num_layers=case.ckpt or None,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1)
    model = GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if case.engine
        else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        case.vocab,
        case.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return config, DistributedDataParallel(config, ddp, Float16Module(config, model.cuda()))


def build_optimizer(case: Case, model: Any) -> Any:
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    offloaded = case.optimizer > 0.0
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=offloaded,
            optimizer_offload_fraction=case.optimizer,
            use_torch_optimizer_for_cpu_offload=True,
            use_precision_aware_optimizer=offloaded,
            overlap_cpu_optimizer_d2h_h2d=offloaded,
        ),
        [model],
    )


def apply_patches(case: Case, tiny: bool, undone: list[Callable[[], None]]) -> None:
    """What stages.json would name for a plan with these fractions; `undone` gets what takes it back."""
    from mist_patches.core.activation_offload import MIN_BYTES
    from mist_patches.megatron.activation_offload import offload_block_activations
    from mist_patches.megatron.decoupled_step import decoupled_steps
    from mist_patches.megatron.optimizer_fraction import exact_optimizer_fraction
    from mist_patches.megatron.parallel_block import parallel_block
    from mist_patches.megatron.state_offload import offload_states

    if case.norms:
        undone.append(parallel_block(case.norms))
    if case.optimizer:
        undone.append(exact_optimizer_fraction(case.optimizer))
    if case.decoupled:
        undone.append(decoupled_steps())
    if case.activations:
        undone.append(offload_block_activations(case.activations, 0 if tiny else MIN_BYTES))
    if case.weights or case.grads:
        undone.append(offload_states(case.weights, case.grads))


def stepper(case: Case) -> tuple[Callable[[], Any], Any, Any]:
    """The training step, which gives the loss; the model and the optimizer."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    config, model = build_model(case)
    optimizer = build_optimizer(case, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    shape = (case.grad_accum, case.micro_batch, case.seq + 1)
    data = torch.randint(0, case.vocab, shape, generator=torch.Generator().manual_seed(3)).cuda()
    positions = torch.arange(case.seq).cuda()[None].expand(case.micro_batch, -1)
    mask = torch.triu(torch.ones(1, 1, case.seq, case.seq, dtype=torch.bool), 1).cuda()

    def forward(iterator: Any, module: Any) -> Any:
        tokens = next(iterator)
        output = module(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return output, lambda x: (x.float().mean(), {"loss": x.detach().float().mean()})

    def step() -> Any:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(data),
            model=model,
            num_microbatches=case.grad_accum,
            seq_length=case.seq,
            micro_batch_size=case.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        return sum(r["loss"] for r in results) / len(results)  # not read here: the host would wait for it

    return step, model, optimizer


def shares(model: Any, optimizer: Any) -> dict[str, float]:
    """What fraction of each kind really is on the host."""
    units = getattr(getattr(model, "mist_chunk", None), "units", ())
    found = {}
    for kind, width in (("weights", 2), ("grads", 4)):
        whole = [width * sum(p.numel() for p in u.parameters) for u in units]
        away = [size for u, size in zip(units, whole, strict=True) if getattr(u, kind) is not None]
        found[kind] = sum(away) / sum(whole) if whole else 0.0
    patch = getattr(model.module.module.decoder, "mist_activation_offload", None)
    found["activations"] = patch.counts.fraction if patch is not None else 0.0
    inner = optimizer.chained_optimizers[0].optimizer
    groups = [getattr(inner, f"{where}_param_groups", ()) for where in ("cpu", "gpu")]
    host, device = (sum(p.numel() for group in one for p in group["params"]) for one in groups)
    found["optimizer"] = host / (host + device) if host else 0.0
    return found


def measured(case: Case, tiny: bool, steps: int) -> dict[str, Any]:
    """Times and peak of a step after two others, and the overlap of one more under the profiler."""
    import torch
    from mist_patches.megatron.decoupled_step import flush_pending_steps

    undone: list[Callable[[], None]] = []
    faulthandler.dump_traceback_later(_HANGS_S)  # where it hangs, if it does
    try:
        before = torch.cuda.memory_allocated()
        apply_patches(case, tiny, undone)
        step, model, optimizer = stepper(case)
        losses = [step() for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(step())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        found: dict[str, Any] = {
            "seconds": statistics.median(seconds),
            "spread": statistics.pstdev(seconds) / statistics.fmean(seconds),
            "steps": steps,
            "host_share": shares(model, optimizer),
            "left_before_bytes": before,
        }
        found["losses"] = [float(loss) for loss in losses]
        if not tiny:
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["overlap"] = profiled(step)
        flush_pending_steps()
        return found
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    except Exception as error:  # what one patch does here must not keep the others from being measured
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
        for undo in reversed(undone) if is_usable() else ():
            undo()


def is_usable() -> bool:
    """Whether the GPU still takes work: after some errors it takes none from this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def profiled(step: Callable[[], Any]) -> dict[str, float]:
    """Of a step: how long copies between host and device took, and how much of it beside kernels."""
    import torch

    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return overlap_of(read_trace(path))


def run(path: Path, chosen: Sequence[Case], more: Callable[[], bool], steps: int, tiny: bool) -> int:
    import torch

    def measure(case: Case) -> dict[str, Any]:
        found = measured(case, tiny, steps)
        gc.collect()
        if is_usable():
            torch.cuda.empty_cache()
        return found

    here = training_steps.machine(torch.device("cpu" if tiny else "cuda"))
    plain: dict[int, list[float]] = {}
    for line in training_steps.lines_of(path, here):
        plain.setdefault(line["case"]["norms"], line.get("losses", []))
    may_go_on = lambda: more() and is_usable()  # noqa: E731
    for changed, found in training_steps.recorded(path, here, chosen, may_go_on, measure):
        norms = changed.get("norms", 0)
        print(f"{changed or 'nothing offloaded'}: {said(found, plain.get(norms, ()))}", flush=True)
        plain.setdefault(norms, found.get("losses", []))
    if not is_usable():
        return UNUSABLE
    return FAILED if any("failed" in line for line in training_steps.lines_of(path, here)) else 0


def said(found: dict[str, Any], plain: Sequence[float]) -> str:
    """`plain` are the losses of the same model without patches; side by side, of Megatron's own modules."""
    if "seconds" not in found:
        return str(found.get("failed", "out of memory"))
    overlap, gib = found["overlap"], found.get("peak_bytes", 0) / 2**30
    text = f"{found['seconds']:.3f} s, {gib:.2f} GiB"
    if overlap["copies_s"]:
        text += f", copies {overlap['copies_s']:.3f} s, {overlap['beside_compute']:.0%} beside kernels"
    if not plain:
        return text
    apart = [abs(mine / theirs - 1.0) for mine, theirs in zip(found["losses"], plain, strict=True)]
    return f"{text}, losses {max(apart):.1e} from those without patches"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Offload of every kind in Megatron-core, measured.")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny model")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no case after it")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.budget_s
    try:
        import torch

        if options.device == "cuda" and not torch.cuda.is_available():
            print("error: torch sees no CUDA device; try: --device cpu", file=sys.stderr)
            return 2
        start(options.device)
    except ModuleNotFoundError as error:
        print(f"error: {error}; needs torch and megatron-core", file=sys.stderr)
        return 2
    tiny = options.device == "cpu"
    return run(options.out, cases(tiny), lambda: time.monotonic() < end_s, options.steps, tiny)


if __name__ == "__main__":
    sys.exit(main())
