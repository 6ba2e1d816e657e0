"""Megatron-core on a machine with neither GPU, Transformer Engine, Apex nor Triton.

Two levels, because the second rewires torch for the whole process:

* `import_megatron()`  makes `import megatron.core` work (Python 3.11, no Triton); safe inside a pytest
  process, and enough for its argument parser and its configuration classes (`pretend_transformer_engine`).
* `install(...)`       makes "cuda" mean the CPU, so that real layers, schedules, optimizers and `pretrain()`
  run on gloo. Call it in a process of its own, before anything of Megatron is imported.

Nothing here changes arithmetic but `half_products`: every other replaced function either answers a question
about a device that is not there or does nothing (streams, events, pinning).
"""

from __future__ import annotations

import collections
import contextlib
import importlib.abc
import importlib.util
import os
import queue
import sys
import types
import typing

import half_products

KEPT: list[typing.Any] = []
"""Kernels in place of torch's, which stay as long as this does."""
_TRITON_ONLY = ("megatron.core.transformer.moe.ops.paged_stash", "megatron.core.ssm.ops.")
"""Modules that import Triton without a guard; only expert-parallel and state-space kernels use them."""
_STASH = "megatron.core.transformer.moe.paged_stash"
"""So does this one in 0.18, where its kernels are not in `ops` yet."""


class _EmptyModule(types.ModuleType):
    """Answers every public name with None: nothing that a dense model runs looks any of them up."""

    GLOBAL_BLOCK_SIZE = 1024

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return


class _TritonStand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        kernels_inside = name == _STASH and not any(os.path.isdir(f"{p}/ops") for p in path or ())
        if name == _TRITON_ONLY[0] or name.startswith(_TRITON_ONLY[1]) or kernels_inside:
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec):
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def import_megatron() -> None:
    """Make megatron.core importable here: two blockers, both outside what a dense model uses."""
    if not hasattr(typing, "override"):  # Python 3.11
        import typing_extensions

        typing.override = typing_extensions.override
    if importlib.util.find_spec("triton") is None and not any(
        isinstance(f, _TritonStand) for f in sys.meta_path
    ):
        sys.meta_path.insert(0, _TritonStand())


def pretend_transformer_engine(version: str = "2.12.0", *, capability: int = 9) -> None:
    """Let the argument checks believe in Transformer Engine `version` on a GPU of this major capability.

    For parsing and configuration classes only; no layer can be built from it.
    """
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config  # noqa: F401  (must be loaded to be patched)
    from megatron.core.transformer.moe import moe_utils
    from megatron.training import arguments
    from packaging.version import Version

    have = Version(version)

    def at_least(asked, check_equality=True):
        return have >= Version(asked) if check_equality else have > Version(asked)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron."):
            if hasattr(module, "is_te_min_version"):
                module.is_te_min_version = at_least
            if hasattr(module, "get_te_version"):
                module.get_te_version = lambda: have
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()
    for name in (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_unpermute",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
    ):
        setattr(moe_utils, name, object())

    class FusedAdam:
        """Carries the keyword names that OptimizerConfig looks for."""

        def __init__(self, master_weight_dtype=0, exp_avg_dtype=0, exp_avg_sq_dtype=0, use_decoupled_grad=0):
            pass

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam
    arguments.get_device_arch_version = lambda: capability
    torch.cuda.get_device_capability = lambda *a: (capability, 0)


def _streams_and_events(torch, cpu) -> None:
    class Event:
        def __init__(self, *a, **k):
            pass

        def record(self, *a, **k):
            pass

        wait = synchronize = record

        def query(self):
            return True

        def elapsed_time(self, other):
            return 0.0

    class Stream:
        cuda_stream, device = 0, cpu

        def __init__(self, *a, **k):
            pass

        def wait_stream(self, other):
            pass

        wait_event = wait_stream

        def record_event(self, event=None):
            return event or Event()

        def synchronize(self):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *a):
            return False

    main = Stream()
    c = torch.cuda
    c.Stream, c.Event = Stream, Event
    c.current_stream = c.default_stream = lambda *a, **k: main
    c.stream = lambda s: contextlib.nullcontext(s)


def _device_queries(torch, cpu) -> None:
    c = torch.cuda

    def nothing(*a, **k):
        return None

    def zero(*a, **k):
        return 0

    c.set_stream = c.set_device = c.synchronize = c.empty_cache = c.reset_peak_memory_stats = nothing
    c.memory_allocated = c.max_memory_allocated = c.memory_reserved = c.max_memory_reserved = zero
    c.memory_stats = lambda *a, **k: collections.defaultdict(int)
    c.mem_get_info = lambda *a: (80 << 30, 80 << 30)
    c.current_device = lambda: cpu
    c.is_available, c.device_count = (lambda: True), (lambda: 1)
    properties = types.SimpleNamespace(
        major=9, minor=0, total_memory=80 << 30, name="cpu", multi_processor_count=1
    )
    c.get_device_properties = lambda *a: properties
    c.get_device_capability, c.get_device_name = (lambda *a: (9, 0)), (lambda *a: "cpu")
    generator = torch.random.default_generator
    c.get_rng_state = lambda *a, **k: torch.get_rng_state()
    c.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    c.manual_seed = c.manual_seed_all = lambda seed: generator.manual_seed(seed)
    c.default_generators = {cpu: generator, 0: generator}
    c._lazy_call = lambda f, **k: f()
    c._lazy_init = lambda: None
    registered: dict[int, int] = {}  # address -> bytes, by the two calls that pin memory in its place
    c.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.update({address: size}) or 0,
        cudaHostUnregister=lambda address: registered.pop(address) and 0,
        registered=registered,
    )


def _creation_on_cpu(torch, cpu) -> None:
    def here(device):
        return cpu if device is not None and "cuda" in str(device) else device

    def moved(function):
        def call(*a, **k):
            if "device" in k:
                k["device"] = here(k["device"])
            if k.get("pin_memory"):
                k["pin_memory"] = False
            return function(*a, **k)

        return call

    for name in (
        "tensor",
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "arange",
        "randint",
        "as_tensor",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
    ):
        setattr(torch, name, moved(getattr(torch, name)))
    tensor = torch.Tensor
    to, kind = tensor.to, tensor.type

    def to_here(self, *a, **k):
        a = tuple(here(x) if isinstance(x, (str, torch.device)) else x for x in a)
        if "device" in k:
            k["device"] = here(k["device"])
        return to(self, *a, **k)

    def kind_of_cuda(self, *a, **k):  # optimizers dispatch on the name "torch.cuda.FloatTensor"
        return kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.", 1)

    tensor.to, tensor.type = to_here, kind_of_cuda
    tensor.cuda = tensor.pin_memory = lambda self, *a, **k: self
    tensor.record_stream = lambda self, *a, **k: None
    torch.nn.Module.cuda = lambda self, *a, **k: self


def _two_devices(torch) -> None:
    """Tell host from device by where a tensor came from: on the host only if `.cpu()` made it."""
    tensor = torch.Tensor
    cpu = tensor.cpu

    def to_host(self, *a, **k):
        copy = cpu(self)
        copy = copy.clone() if copy is self else copy
        copy._on_host = True
        return copy

    def inheriting(function):
        def call(self, *a, **k):
            result = function(self, *a, **k)
            if getattr(self, "_on_host", False):
                result._on_host = True
            return result

        return call

    for name in ("float", "detach", "clone", "pin_memory"):
        setattr(tensor, name, inheriting(getattr(tensor, name)))
    tensor.cpu = to_host
    tensor.is_cuda = property(lambda self: not getattr(self, "_on_host", False))


def _shared(dist, new_group, *, everyone: bool):
    """The same group for the same ranks, of which Megatron makes up to twenty groups.

    They keep streams of NCCL apart; in gloo each costs three threads, one of which looks around a hundred
    times a second. Groups of one rank, in which nothing is sent, are always shared; `everyone`: all are.
    """
    made: dict = {}

    def call(ranks=None, *a, **k):
        if not ranks or (len(ranks) > 1 and not everyone) or a or k.get("use_local_synchronization"):
            return new_group(ranks, *a, **k)
        if made.get("of") is not dist.group.WORLD:
            made.clear()
            made["of"] = dist.group.WORLD
        key = tuple(ranks)
        return made[key] if key in made else made.setdefault(key, new_group(ranks, **k))

    return call


def _gloo_only(torch, *, share_groups: bool) -> None:
    dist = torch.distributed
    init = dist.init_process_group

    def gloo(*a, **k):
        k.pop("device_id", None)
        k["backend"] = "gloo"
        return init(**k)

    dist.init_process_group = gloo
    dist.new_group = _shared(dist, dist.new_group, everyone=share_groups)
    for name in ("new_group", "new_subgroups_by_enumeration"):

        def call(*a, _make=getattr(dist, name), **k):  # noqa: B008
            if k.get("backend") == "nccl":
                k["backend"] = "gloo"
            return _make(*a, **k)

        setattr(dist, name, call)


def _counts_as_lists(torch) -> None:
    """Numbers of tokens of each expert come from the GPU as lists; here nothing is copied, and they stay
    tensors."""
    exchange = torch.distributed.all_to_all_single

    def exchanged(output, source, output_split_sizes=None, input_split_sizes=None, **more):
        sizes = [n.tolist() if hasattr(n, "tolist") else n for n in (output_split_sizes, input_split_sizes)]
        return exchange(output, source, *sizes, **more)

    torch.distributed.all_to_all_single = exchanged


def _cores_of_two_widths() -> None:
    """Megatron's own attention core, of which only Transformer Engine's takes values of another width."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention as Core

    def init(self, *words, k_channels=None, v_channels=None, _made=Core.__init__, **named):
        _made(self, *words, **named)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    Core.__init__ = init


def _storage_filled(target, source) -> None:
    """What was recomputed, where views of it expect it."""
    target, source = target.untyped_storage(), source.untyped_storage()
    target.resize_(source.nbytes())
    target.copy_(source)


def _megatron_pieces(torch) -> None:
    import megatron.core  # noqa: F401
    from megatron.core.optimizer import optimizer_config
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.utils import get_te_version

    # For this Megatron compiles some C++, which takes longer than any test; that shares where this copies.
    random._get_share_storage = lambda: _storage_filled

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    def norm(cls, config, hidden_size, eps=1e-5, *a, **k):
        # The plain norm refuses sequence parallelism, although all it lacks is this mark, by which
        # finalize_model_grads all-reduces the norm's gradients over tensor parallel ranks.
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        module = kind(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    torch_norm.WrappedTorchNorm.__new__ = norm
    if get_te_version() is None:  # comparing an absent version with a number raises TypeError
        optimizer_config.is_te_min_version = lambda *a, **k: False
    with contextlib.suppress(ImportError):
        # Where a writer of checkpoints leaves its results. Megatron's own is for writers that are processes:
        # one process more for each rank, which imports torch and this program once again.
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = queue.SimpleQueue()
    with contextlib.suppress(ImportError):
        import megatron.core.datasets.utils as datasets

        datasets.compile_helpers = lambda: None  # the installed package ships them compiled


def install(*, two_devices: bool = False, threads: int = 1, share_groups: bool = False) -> None:
    """Make this process train Megatron on CPU and gloo; only in a process of its own.

    `two_devices` distinguishes host tensors from device tensors, as HybridDeviceOptimizer
    (optimizer offload) needs. `share_groups`: see `_shared`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    torch.set_num_threads(threads)
    if not KEPT:
        rewire()
    if two_devices:
        _two_devices(torch)
    _gloo_only(torch, share_groups=share_groups)


def rewire() -> None:
    """The part of `install` that is the same for all, which a process may find done (`ready_frameworks`)."""
    import torch
    import torch._dynamo  # must be loaded before torch.cuda is rewired

    KEPT.append(half_products.install())
    torch.compile = lambda f=None, *a, **k: f if f is not None else (lambda g: g)
    import_megatron()
    cpu = torch.device("cpu")
    _streams_and_events(torch, cpu)
    _device_queries(torch, cpu)
    _creation_on_cpu(torch, cpu)
    _counts_as_lists(torch)
    _megatron_pieces(torch)
    _cores_of_two_widths()


def allow_activation_offload() -> None:
    """Megatron's fine-grained activation offload wants Transformer Engine and CUDA; allow CPU tensors."""
    import torch
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    transformer_engine.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    offload.ChunkOffloadHandler._can_manage_tensor_for_offload = staticmethod(
        lambda t: not isinstance(t, torch.nn.Parameter)
    )


def tiny_gpt_settings() -> dict[str, typing.Any]:
    """What the configuration of each tiny GPT says: gated, no biases, no dropout, no kernel of a GPU."""
    import torch

    return {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "batch_p2p_comm": True,
        "overlap_p2p_comm": False,
    }
