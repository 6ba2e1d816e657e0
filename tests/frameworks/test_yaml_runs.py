"""YAML files of NeMo, Megatron-Bridge and Megatron-LM, read as the flags that they stand for.

The NeMo documents are written after the schema of `megatron_gpt_config.yaml` (NeMo 1.23) and of what NeMo-Run
exports; fields of Megatron-Bridge's classes are its own list (test_bridge).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_bridge import FIELDS, MEGATRON
from test_launch import SOURCES

from mist_megatron.ask.lint import lint
from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_mapping
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.interpolation import Interpolation
from mist_megatron.frameworks.megatron.command import OPEN_VALUE, read_command_line
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.frameworks.megatron.yaml_run import yaml_run
from mist_megatron.resources import data_folder

KNOWN = frozenset(load_mapping(data_folder("launch") / "megatron_flags.json")["flags"])

NEMO_1 = """
defaults: [_self_, "optional tp_overlap@model.ub_tp_comm_overlap_cfg:"]
run: {name: llama3_8b}
trainer: {num_nodes: 2, devices: 8, accelerator: gpu, precision: bf16-mixed, accumulate_grad_batches: 1}
exp_manager: {exp_dir: null}
model:
  mcore_gpt: True
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  context_parallel_size: 2
  sequence_parallel: True
  encoder_seq_length: 8192
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: ${multiply:3.5, ${.hidden_size}}
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: rmsnorm
  bias: False
  activation: fast-swiglu
  position_embedding_type: rope
  rotary_percentage: 1.0
  rotary_base: 500000
  share_embeddings_and_output_weights: False
  apply_rope_fusion: True
  overlap_p2p_comm: True
  megatron_amp_O2: True
  gradient_accumulation_fusion: True
  transformer_engine: True
  activations_checkpoint_granularity: selective
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 0
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true, grad_sync_dtype: bf16, lr: 1e-4}
  data: {data_impl: mmap, seq_length: "${model.encoder_seq_length}", reset_attention_mask: False}
"""
SAME = """torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 128 \
--tensor-model-parallel-size 2 \
--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 --context-parallel-size 2 \
--sequence-parallel --seq-length 8192 --max-position-embeddings 8192 --num-layers 32 --hidden-size 4096 \
--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
--hidden-dropout 0 --attention-dropout 0 --normalization RMSNorm --disable-bias-linear --swiglu \
--position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights --bf16 \
--recompute-granularity selective --use-distributed-optimizer --overlap-grad-reduce --grad-reduce-in-bf16 \
--eval-interval 1000
export CUDA_DEVICE_MAX_CONNECTIONS=1
"""
NEMO_2 = """
data: {_target_: nemo.collections.llm.MockDataModule, seq_length: 8192, micro_batch_size: 1,
       global_batch_size: 128}
model:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaModel
  config: {_target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B, num_layers: 16}
optim:
  config: {optimizer: adam, bf16: true, use_distributed_optimizer: true, lr: 3.0e-4}
trainer:
  devices: 8
  num_nodes: 2
  plugins: {precision: bf16-mixed, grad_reduce_in_fp32: false,
            params_dtype: {_call_: false, _target_: torch.bfloat16}}
  callbacks:
  - {_target_: nemo.utils.exp_manager.TimingCallback}
  - {_target_: nemo.lightning.MegatronCommOverlapCallback, tp_comm_overlap: true}
  strategy:
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    context_parallel_size: 2
    sequence_parallel: true
    virtual_pipeline_model_parallel_size: null
    ddp: {grad_reduce_in_fp32: true, overlap_grad_reduce: true, average_in_collective: true}
"""


def run_of(text: str, **given: str):
    return yaml_run(yaml.safe_load(text), KNOWN, given)


def findings_of(run) -> set[tuple[str, str]]:
    found = (*run.findings, *lint_megatron(run.options, "", "x", KNOWN, run.maybe))
    return {(f.level, run.keys.get(f.key.removeprefix("--"), f.key)) for f in found if f.level != "note"}


def linted(tmp_path: Path, name: str, text: str, **words):
    path = tmp_path / name
    path.write_text(text)
    return lint(path, **words)


def test_a_nemo_configuration_is_the_plan_of_its_flags(tmp_path: Path) -> None:
    """Priced on the GPUs that its trainer names, as the command line that says the same."""
    told = linted(tmp_path, "a.yaml", NEMO_1, gpu="h100-sxm-80gb")
    same = linted(tmp_path, "a.sh", SAME, gpus=16, gpu="h100-sxm-80gb")
    assert told.findings == same.findings == ()
    assert told.plan == same.plan
    assert told.plan.cluster.gpus == 16
    assert told.prediction.iteration_s == same.prediction.iteration_s
    assert "--vocab-size" in told.defaults


@pytest.mark.parametrize(
    ("was", "now", "named"),
    [
        ("bias: False", "bias: False\n  embedding_scale_new: 3", {("unpriced", "model.embedding_scale_new")}),
        ("apply_rope_fusion: True", "", {("unpriced", "model.apply_rope_fusion")}),
        ("megatron_amp_O2: True", "", {("unpriced", "model.megatron_amp_O2")}),
        ("fast-swiglu", "geglu", {("unpriced", "model.activation")}),
        ("activations_checkpoint_num_layers: 0", "activations_checkpoint_num_layers: 2",
         {("unpriced", "model.activations_checkpoint_num_layers")}),
        ("mcore_distributed_optim", "adafactor", {("unpriced", "model.optim.name")}),
        ("bf16-mixed", "32", {("unpriced", "trainer.precision"), ("unpriced", "--bf16")}),
        ("accumulate_grad_batches: 1", "accumulate_grad_batches: 4",
         {("unpriced", "trainer.accumulate_grad_batches")}),
        ("reset_attention_mask: False", "reset_attention_mask: True",
         {("unpriced", "model.data.reset_attention_mask")}),
        ("hidden_size: 4096", "hidden_size: ???", {("open", "hidden_size")}),
        ("num_layers: 32", "num_layers: ${oc.env:LAYERS}", {("open", "LAYERS")}),
        ("_self_,", "_self_, other_config,", {("open", "defaults")}),
        ("bias: False", "bias: False\n  peft: {peft_scheme: lora}", {("unpriced", "model.peft")}),
        ("num_query_groups: 8", "num_query_groups: null", set()),
        ("overlap_p2p_comm: True", "overlap_p2p_comm: False", {("unpriced", "model.overlap_p2p_comm")}),
    ],
)  # fmt: skip
def test_what_matters_and_is_not_priced_is_named(was: str, now: str, named: set) -> None:
    assert was in NEMO_1
    run = run_of(NEMO_1.replace(was, now, 1))
    assert named <= findings_of(run)
    assert bool(named) == bool(findings_of(run))


def test_what_is_open_can_be_said() -> None:
    text = NEMO_1.replace("num_layers: 32", "num_layers: ${oc.env:LAYERS}")
    assert run_of(text, LAYERS="48").options["num-layers"] == ("48",)
    assert run_of(text.replace("LAYERS}", "LAYERS,24}")).options["num-layers"] == ("24",)


def test_apex_keeps_half_of_the_master_weights() -> None:
    options = run_of(NEMO_1.replace("mcore_distributed_optim", "distributed_fused_adam")).options
    assert {"use-distributed-optimizer", "use-precision-aware-optimizer"} <= set(options)


def test_a_nemo_2_recipe_has_the_shape_of_its_class(tmp_path: Path) -> None:
    """Overrides of the class count; the precision's word on reductions stands above that of `ddp`."""
    found = linted(tmp_path, "a.yaml", NEMO_2, gpu="h100-sxm-80gb")
    assert found.findings == ()
    model = found.plan.model
    assert (model.layers, model.hidden, model.kv_heads, model.vocab) == (16, 4096, 8, 128256)
    assert found.plan.execution.grad_bytes == 2
    assert found.plan.execution.tp_comm_overlap
    unknown = NEMO_2.replace("Llama3Config8B", "NemotronConfig22B")
    keys = {f.key for f in linted(tmp_path, "a.yaml", unknown, gpu="h100-sxm-80gb").findings}
    assert {"--hidden-size", "--num-attention-heads"} <= keys


def test_every_field_of_bridge_is_classed() -> None:
    """What Megatron-Bridge's classes have is a flag, stands in a table, or is named: nothing in between."""
    unclassed = []
    for section in ("model", "train", "ddp", "optimizer"):
        for name in FIELDS[section]:
            document = {"model": {}, "train": {}, section: {name: "something"}}
            run = yaml_run(document, KNOWN, {})
            unclassed += [name for f in run.findings if f.message.startswith("nobody knows")]
    assert unclassed == []


@pytest.mark.parametrize("name", MEGATRON)
def test_our_own_yaml_files_are_the_plan(name: str) -> None:
    """args.yaml and bridge.yaml against args.sh: bridge.yaml has stage 0's values where stages differ."""
    plan = MEGATRON[name]
    files = artifacts(plan, SOURCES)
    flags = read_command_line(files["args.sh"], "args.sh").options
    args = run_of(files["args.yaml"])
    assert dict(args.options) == dict(flags)
    stages = json.loads(files["stages.json"])["stages"]
    if any(stage["arguments"] for stage in stages) or plan.model.parallel_block:
        return
    assert "*id" not in files["bridge.yaml"], "an alias, which lint takes from nobody"
    bridge = run_of(files["bridge.yaml"])
    assert not [level for level, _ in findings_of(bridge) if level in ("rejected", "unpriced", "open")]
    told, read = (plan_of(o, (), plan.cluster, "x") for o in (flags, bridge.options))
    assert replace(read, model=replace(read.model, name=told.model.name)) == told


def test_lists_of_flags_and_what_is_no_run(tmp_path: Path) -> None:
    """MODEL_ARGS of Megatron-LM's own tests; other trainers are refused with their reason."""
    flags = {
        "--num-layers": 12,
        "--bf16": True,
        "--use-mcore-models": True,
        "--fp16": False,
        "--split": "9",
    }
    run = run_of(yaml.safe_dump({"ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1}, "MODEL_ARGS": flags}))
    assert run.options == {"num-layers": ("12",), "bf16": (), "use-mcore-models": (), "split": ("9",)}
    for text, reason in {
        "trainer: {devices: 8}\nmodel: {encoder: {feat_in: 80}}": "another model than Megatron's GPT",
        "policy: {megatron_cfg: {enabled: true}}": "reinforcement learning",
        "recipe: x\nstep_scheduler: {a: 1}\ndistributed: {}": "FSDP2",
        "apiVersion: v1\nkind: Job": "a job of Kubernetes",
    }.items():
        with pytest.raises(InputError, match=reason):
            linted(tmp_path, "a.yaml", text)


def test_references_end() -> None:
    circle = {"a": "${b}", "b": "${a}", "c": "${multiply:2,${d}}", "d": 3, "e": "${..a}x${d}"}
    told = Interpolation(circle, {})
    assert told.value("c", circle["c"]) == 6
    assert OPEN_VALUE.fullmatch(told.value("m", "${multiply:1e300,1e300}"))
    assert told.value("m.e", circle["e"]).endswith("x3")
    assert isinstance(told.value("a", circle["a"]), str)
    assert OPEN_VALUE.fullmatch(told.value("f", "${nowhere}")).group(1) == "nowhere"
