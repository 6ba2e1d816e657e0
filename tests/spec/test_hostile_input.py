"""Names, paths and numbers that nobody means, or that somebody means ill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mist_megatron.errors import InputError, MistError
from mist_megatron.formats.document import MOST_JSON, MOST_YAML, parse
from mist_megatron.formats.files import load_mapping, load_model, load_plan, read_text
from mist_megatron.formats.huggingface import model_from_huggingface
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.formats.plan_yaml import plan_from_mapping, plan_from_text
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, cluster_of

PLAN = """
schema: 1
model: gpt3-1.3b
training: {global_batch: 32, seq_len: 2048}
cluster: {gpu: a100-sxm-80gb, nodes: 2, gpus_per_node: 4}
target: mist
grad_accum: 8
stages:
  - {layers: 12, nodes: 1, gpus_per_node: 4, dp: 4, tp: 1, micro_batch: 1}
  - {layers: 12, nodes: 1, gpus_per_node: 4, dp: 4, tp: 1, micro_batch: 1}
"""
HALVES = PLAN.replace("nodes: 1, gpus_per_node: 4, dp", "nodes: 2, gpus_per_node: 2, dp")


def refused(call, *words: str) -> str:
    with pytest.raises(InputError) as caught:
        call()
    message = caught.value.message
    assert message.isprintable(), repr(message)
    for word in words:
        assert word in message
    return message


@pytest.mark.parametrize("reader", [load_plan, load_mapping, load_model, read_text])
@pytest.mark.parametrize(
    "path",
    [
        "x/" + "a" * 5000,
        "a" * 300 + ".yaml",
        "x\0y.yaml",
        "/",
        "./",
        "/dev/null",
        "missing.yaml",
        "\udcff/\x1b[31m",
        "",
    ],
)
def test_paths_that_cannot_be_read(reader, path):
    refused(lambda: reader(path))


def test_a_name_that_is_too_long_for_a_file_is_no_preset():
    refused(lambda: load_model("a" * 5000), "unknown model preset")


@pytest.mark.parametrize("text", ["a: 1\n" * (MOST_YAML // 4), '{"a": [' + "1," * (MOST_JSON // 2) + "1]}"])
def test_documents_that_would_take_minutes_are_refused_by_their_size(text):
    refused(lambda: parse(text, "plan"), "characters", "at most")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_without_a_writer_does_not_hold_the_program(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    code = f"from mist_megatron.formats.files import load_plan; load_plan({str(tmp_path / 'pipe.yaml')!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert "is a pipe or a device; wanted a file" in done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may read everything")
def test_a_file_without_read_permission(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    path.chmod(0)
    refused(lambda: load_plan(path), "cannot be read: Permission denied")


def test_a_model_folder_is_read_by_its_config(tmp_path):
    values = {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_model(str(tmp_path)).parameters == 124_439_808


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("-3", -3), ("0", 0), ("1e3", 1000.0), ("0.50", 0.5), ("007.5", 7.5), ("1:30", "1:30"),
        ("1_000", "1_000"), ("0x10", "0x10"), ("0b11", "0b11"), ("0o17", "0o17"), ("yes", "yes"),
        ("on", "on"),
        ("No", "No"), ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        ("2001-01-01", "2001-01-01"), (".inf", float("inf")), ("'010'", "010"), ("1٢", "1٢"),
        ("=", "="), ("<<", "<<"),
    ],
)  # fmt: skip
def test_words_of_yaml_mean_what_they_look_like(text, value):
    found = parse(f"a: {text}", "x")["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["010", "-010", "+017", "00", "0755"])
def test_octal_is_not_guessed(text):
    refused(lambda: parse(f"# one\na: {text}", "x"), "x: line 2", f"write {int(text)}")


@pytest.mark.parametrize(
    "old,new", [("global_batch: 32", "global_batch: 040"), ("dp: 4", "dp: 0b100"), ("dp: 4", "dp: 0:4")]
)
def test_plans_with_odd_numbers_are_refused(old, new):
    refused(lambda: plan_from_text(PLAN.replace(old, new), "plan.yaml"), "plan.yaml")


ODD_NAMES = ["a\nb", "a\x1b[31mb", "a\0b", "a\u202eb", "a\u2028b", "", "  ", "x" * 300, "\ud800"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_one_visible_line(name):
    shape = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    with pytest.raises(MistError):
        model_from_mapping({**shape, "name": name}, "model.yaml")
    config = {"model_type": "gpt2", "_name_or_path": f"org/{name}x"}
    if name.strip() and len(name) < 200:
        refused(lambda: model_from_huggingface(config, "config.json"), "invisible character")
    if len(name) < 200:
        refused(lambda: ClusterSpec(gpu=gpu("l4-24gb"), nodes=1, gpus_per_node=1, profile=name))


def test_other_scripts_are_names():
    shape = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    assert model_from_mapping({**shape, "name": "モデル é"}, "m").name == "モデル é"


@pytest.mark.parametrize(
    "text",
    [
        'a: 1\n"x\\e[31m\\n": 2',
        PLAN.replace("gpt3-1.3b", '"gpt3\\e]0;title\\a"'),
        PLAN.replace("target: mist", '"tar\\nget": mist'),
        PLAN.replace("target: mist", 'target: "mi\\u202est"'),
        '{"model_type": "\\u001b[2J"}',
    ],
)
def test_messages_show_control_characters_as_escapes(text, tmp_path):
    path = tmp_path / "file\x1b[1m.yaml"
    path.write_text(text)
    for reader in (load_plan, lambda p: load_model(str(p))):
        refused(lambda reader=reader: reader(path), "\\x1b[1m")


def test_details_are_made_visible_too():
    assert MistError("a\tb", details=("c\r",)).details == ("c\\r",)
    assert MistError("Größe ≥ 1").message == "Größe ≥ 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PLAN.replace("nodes: 1, gpus_per_node: 4, dp", "nodes: 4, gpus_per_node: 1, dp", 1),
         "stages[0].nodes is 4; the cluster (2 x 4) has 2"),
        (PLAN.replace("nodes: 2, gpus_per_node: 4", "nodes: 4, gpus_per_node: 2"),
         "stages[0].gpus_per_node is 4; the cluster (4 x 2) has 2"),
        (HALVES, "parts of nodes of 4"),
        (PLAN.replace("nodes: 2", "nodes: 3"), "use 8 GPUs together; the cluster has 12"),
    ],
)  # fmt: skip
def test_stages_lie_on_nodes_that_exist(text, words):
    refused(lambda: plan_from_text(text, "plan.yaml"), words)


def test_a_map_may_spread_a_stage_over_parts_of_nodes():
    assert plan_from_text(HALVES + "rank_map: [0, 1, 4, 5, 2, 3, 6, 7]\n").stages[0].nodes == 2


def test_clusters_have_whole_nodes():
    refused(lambda: cluster_of(gpu("l4-24gb"), 12, 8), "not whole nodes")


HUGE = 10**20


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seq_len: 2048", f"seq_len: {HUGE}", ("training: seq_len", "wanted at most 1000000000")),
        ("global_batch: 32", f"global_batch: {HUGE}", ("training: global_batch", "wanted at most")),
        ("nodes: 2, gpus", f"nodes: {HUGE}, gpus", ("cluster: nodes", "wanted at most 1000000")),
        ("nodes: 2, gpus_per_node: 4", "nodes: 2, gpus_per_node: 600000", ("cluster: gpus is 1200000",)),
    ],
)
def test_numbers_that_nothing_has_are_refused(old: str, new: str, words: tuple[str, ...]) -> None:
    assert plan_from_text(PLAN, "plan.yaml")
    refused(lambda: plan_from_text(PLAN.replace(old, new, 1), "plan.yaml"), *words)


@pytest.mark.parametrize(
    "key", ["layers", "hidden", "ffn_hidden", "heads", "vocab", "head_dim", "learned_positions"]
)
def test_models_that_nobody_could_train_are_refused(key: str) -> None:
    shape = {
        "family": "gpt",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "vocab": 100,
        "head_dim": 16,
        "kv_heads": 1,
    }
    assert model_from_mapping(shape, "model")
    message = refused(lambda: model_from_mapping({**shape, key: HUGE}, "model"), f"{key} is {HUGE}")
    assert "wanted at most" in message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("prediction", {"iteration_s": "fast"}, "prediction.iteration_s is 'fast'; wanted a number above 0"),
        ("prediction", {"mfu": True}, "prediction.mfu is True"),
        ("prediction", {"tokens_per_s": -1}, "prediction.tokens_per_s is -1"),
        ("provenance", {"placement": [1]}, r"provenance.placement is \[1\]; wanted a mapping"),
        ("provenance", {"placement": {"spares": [5]}}, "wanted a list of host names"),
    ],
)
def test_what_was_told_of_a_plan_is_of_its_kinds(key, value, words):
    with pytest.raises(InputError, match=words):
        plan_from_mapping({**parse(PLAN, "plan"), key: value})
