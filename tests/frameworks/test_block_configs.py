"""Models whose dense layers differ in width, key-value heads or halves: their JSON of block configs is
written, read back as the same model, and held against the flags beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run

from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.lint import lint
from mist_megatron.ask.tune import tune
from mist_megatron.errors import EmitError, InputError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.search.search import Settings
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.layer import LayerGroup, LayerSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import job_rules, violations

SOURCES = launch_sources(probe=False)
_SHAPE = replace(
    preset("llama3-8b"), name="puzzle", layers=6, hidden=1024, ffn_hidden=4096, heads=16, head_dim=64
)


def unlike(**kinds: dict) -> ModelSpec:
    """The shape with these kinds of layers in turns."""
    pattern = tuple(_SHAPE.kind(name, **changes) for name, changes in kinds.items())
    return replace(_SHAPE, groups=(LayerGroup(layers=_SHAPE.layers, pattern=pattern),))


WIDTHS = unlike(wide={}, narrow={"ffn_hidden": 1536})
_LLAMA3 = WIDTHS.constants
MODELS = {
    "two widths": WIDTHS,
    "none of the model's own": unlike(one={"ffn_hidden": 768}, other={"ffn_hidden": 512, "kv_heads": 4}),
    "key-value heads": unlike(few={"kv_heads": 2}, more={"kv_heads": 16}),
    "left out": unlike(
        whole={}, blind={"half": "mlp", "ffn_hidden": 2048}, bare={"half": "mixer", "kv_heads": 4}
    ),
    "with a window": unlike(whole={}, near={"ffn_hidden": 1536, "window": 128}),
    "halves of two widths": unlike(
        mixer={"half": "mixer"}, wide={"half": "mlp"}, narrow={"half": "mlp", "ffn_hidden": 64}
    ),
    "not scaled": replace(WIDTHS, constants=replace(_LLAMA3, rotary_scaling="none", rotary_factor=1.0)),
    "interpolated": replace(WIDTHS, constants=replace(_LLAMA3, rotary_scaling="linear", rotary_factor=2.0)),
    "tied": replace(WIDTHS, tied_embeddings=True),
}


def planned(model: ModelSpec, *layers: int, tp: int = 1, **more) -> Plan:
    stages = tuple(
        StagePlan(layers=count, nodes=1, gpus_per_node=2 * tp, dp=2, tp=tp, micro_batch=1)
        for count in layers or (model.layers,)
    )
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=8, seq_len=1024),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=len(stages), gpus_per_node=2 * tp),
        grad_accum=4,
        stages=stages,
        **{"target": "megatron", **more},
    )


def shapes(model: ModelSpec) -> list[LayerSpec]:
    """Of all layers, without what a layer of half a block says of the half that it has not."""
    kinds = [model.kinds[place] for place in model.kind_of_layer]
    kinds = [replace(kind, name="any") for kind in kinds]
    kinds = [replace(kind, kv_heads=1, window=None) if kind.half == "mlp" else kind for kind in kinds]
    return [replace(kind, ffn_hidden=1) if kind.half == "mixer" else kind for kind in kinds]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("file", ["", "args.sh", "args.json", "args.yaml", "layers.json"])
def test_a_folder_reads_back_as_the_model(name: str, file: str, tmp_path: Path) -> None:
    written = planned(MODELS[name], 4, 2, tp=2, sequence_parallel=True)
    assert not violations(written)
    write_artifacts(tmp_path / "out", artifacts(written, SOURCES))
    linted = lint(tmp_path / "out" / file)
    assert linted.findings == () and linted.plan is not None and linted.prediction is not None
    read = linted.plan
    assert shapes(read.model) == shapes(written.model)
    assert read.model.constants == written.model.constants
    assert read.model.parameters == written.model.parameters
    assert (read.stages, read.grad_accum) == (written.stages, written.grad_accum)


def test_layers_that_are_alike_have_no_such_file() -> None:
    texts = artifacts(planned(_SHAPE), SOURCES)
    assert "layers.json" not in texts and "heterogeneous" not in texts["train.sh"] + texts["args.sh"]


def test_layers_of_other_heads_are_not_written() -> None:
    model = unlike(few={"heads": 8, "kv_heads": 4}, more={})
    with pytest.raises(EmitError, match="layers of kind few, more"):
        artifacts(planned(model), SOURCES)


def test_one_kind_of_layers_is_written_by_its_own_width() -> None:
    """What the model says of its own shape is that of none of its layers."""
    texts = artifacts(planned(unlike(only={"ffn_hidden": 1536, "kv_heads": 4})), SOURCES)
    assert "--ffn-hidden-size 1536\n" in texts["args.sh"] and "--num-query-groups 4\n" in texts["args.sh"]


@pytest.mark.parametrize(("changes", "said"), [
    ({"gated_mlp": False, "activation": "gelu"}, "wanted gated silu"),
    ({"norm": "layernorm"}, "wanted rmsnorm"),
    ({"rotary": False}, "no rotary positions"),
    ({"qk_norm": True, "qk_norm_weights": False}, "norms of query and key heads have no weights"),
])  # fmt: skip
def test_what_megatron_refuses_of_such_layers(changes: dict, said: str) -> None:
    """Before any search, of the layers and of the model."""
    kinds = {"wide": changes, "narrow": {"ffn_hidden": 1536, **changes}}
    (rule,) = job_rules(replace(unlike(**kinds), **changes), "bf16", "megatron")
    assert said in rule
    alike = replace(_SHAPE, **changes)
    assert not [rule for rule in job_rules(alike, "bf16", "megatron") if said in rule and "halves" in rule]


@pytest.mark.parametrize(("more", "said"), [
    ({"schedule": "interleaved", "vpp": 3}, "no chunks of a stage"),
    ({"execution": Execution(cuda_graphs=("attn",))}, "graphs of them were not tried"),
    ({"execution": Execution(offload_modules=("core_attn",))}, "what leaves of them was not tried"),
])  # fmt: skip
def test_what_cannot_be_had_beside_such_layers(more: dict, said: str) -> None:
    broken = planned(WIDTHS, 3, 3, **more)
    assert any(said in rule for rule in violations(broken))
    assert not any(said in rule for rule in violations(replace(broken, model=_SHAPE)))
    with pytest.raises(EmitError):
        artifacts(broken, SOURCES)


def test_plans_that_are_found_can_be_written() -> None:
    """Interleaving is not searched of them, which is faster here where layers are alike."""
    job = Job(
        model=replace(_SHAPE, layers=8, vocab=8192),
        training=TrainingSpec(global_batch=4, seq_len=4096),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=4),
        target="megatron",
    )
    settings = Settings(limits=replace(Settings().limits, fixed={"pp": 4}))
    other = replace(WIDTHS, layers=8, vocab=8192, groups=(replace(WIDTHS.groups[0], layers=8),))
    alike, found = (tune(replace(job, model=one), settings=settings).plans for one in (job.model, other))
    assert alike[0].vpp > 1 and all(plan.vpp == 1 for plan in found)
    assert all(artifacts(plan, SOURCES) for plan in found)


def folder(tmp_path: Path, text: str | None) -> Path:
    out = tmp_path / "out"
    write_artifacts(out, artifacts(planned(WIDTHS), SOURCES))
    (out / "layers.json").unlink()
    if text is not None:
        (out / "layers.json").write_text(text)
    return out


DOCUMENT = json.loads(artifacts(planned(WIDTHS), SOURCES)["layers.json"])
FIRST, *REST = DOCUMENT["block_configs"]


def with_first(**changes: dict) -> str:
    first = {part: {**said, **changes.get(part, {})} for part, said in FIRST.items()}
    return json.dumps({**DOCUMENT, "block_configs": [first, *REST]})


@pytest.mark.parametrize(("text", "said"), [
    (None, "layers.json does not exist"),
    ("", "layers.json is empty"),
    ("[]", "is no mapping"),
    ("{", "is no JSON"),
    (json.dumps({**DOCUMENT, "block_configs": REST}), "has 5 layers and --num-layers is 6"),
    (with_first(attention={"no_op": True}, ffn={"no_op": True}), "both no_op"),
    (with_first(attention={"num_query_groups": 5}), r"num_query_groups \(5\) must divide the 16 heads"),
    (with_first(ffn={"replace_with_linear": True}), "single product in its place"),
    (with_first(ffn={"ffn_hidden_size": "wide"}), "wanted a whole number"),
])  # fmt: skip
def test_a_wrong_file_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        lint(folder(tmp_path, text))


@pytest.mark.parametrize(("changes", "key", "said"), [
    ({"hidden_size": 99}, "--hidden-size", "hidden_size of"),
    ({"tie_word_embeddings": True}, "--untie-embeddings-and-output-weights", "is True"),
    ({"block_configs": [{**FIRST, "attention": {**FIRST["attention"], "n_heads_in_group": 4}}, *REST]},
     "--heterogeneous-layers-config-path", "must be the same"),
    ({"block_configs": [{**FIRST, "attention": {"num_query_groups": 8}}, *REST]},
     "--heterogeneous-layers-config-path", "n_heads_in_group is missing"),
])  # fmt: skip
def test_a_file_that_flags_contradict_is_rejected(changes: dict, key: str, said: str, tmp_path: Path) -> None:
    linted = lint(folder(tmp_path, json.dumps({**DOCUMENT, **changes})))
    assert linted.rejected and any(f.key == key and said in f.message for f in linted.findings)


def test_flags_that_go_with_it(tmp_path: Path) -> None:
    out = folder(tmp_path, json.dumps(DOCUMENT))
    text = (out / "args.sh").read_text()
    (out / "args.sh").write_text(text.replace("  --swiglu\n", "  --num-experts 8\n"))
    said = {(finding.level, finding.key) for finding in lint(out / "args.sh").findings}
    assert {("rejected", "--heterogeneous-layers-config-path"), ("ignored", "--num-experts")} <= said


def test_a_model_of_unlike_layers_from_the_command_line(tmp_path: Path, capsys) -> None:
    """A config as NVIDIA's Puzzle writes it is tuned, written and read back; what cannot be is refused."""
    config = {
        "model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"], "hidden_act": "silu",
        "hidden_size": 1024, "num_attention_heads": 12, "head_dim": 64, "num_hidden_layers": 3,
        "vocab_size": 32000, "intermediate_size": None, "num_key_value_heads": None,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.75}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": None, "no_op": True}},
        ],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = [
        *("tune", "--model", str(tmp_path / "config.json"), "--gpus", "4", "--gpu", "a100-sxm-80gb"),
        *("--global-batch", "8", "--seq", "1024", "--target", "megatron"),
    ]
    assert run([*job, "--out", str(tmp_path / "out"), "--fix", "pp=2"]) == 0
    capsys.readouterr()
    linted = lint(tmp_path / "out")
    assert linted.findings == () and linted.plan is not None
    assert [kind.name for kind in linted.plan.model.kinds] == ["kv6_ffn1024", "ffn512", "kv6"]
    assert run([*job, "--fix", "tp=4"]) == 2
    assert len(capsys.readouterr().err.splitlines()[0]) > 0
    assert run([*job, "--fix", "pp=2,vpp=2"]) == 2
    assert "no chunks of a stage" in capsys.readouterr().err
