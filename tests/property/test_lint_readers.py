"""Damaged launch scripts and DeepSpeed configurations: only a refusal may come out, within bounded work."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mist_megatron.errors import InputError, MistError
from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.frameworks.deepspeed.schema import schema_from_text
from mist_megatron.frameworks.file_kinds import kind_of, mapping_of
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.frameworks.megatron.command import read_command_line
from mist_megatron.frameworks.megatron.lint import lint_command
from mist_megatron.frameworks.megatron.read import parse_layout, plan_of
from mist_megatron.frameworks.trainer_yaml import adapter_findings, filled, named_config
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCHEMA = schema_from_text((LAUNCH / "deepspeed_schema.json").read_text("utf-8"))
KNOWN = frozenset(json.loads((LAUNCH / "megatron_flags.json").read_text("utf-8"))["flags"])
CLUSTER = ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=2, gpus_per_node=8)
MUTATIONS = 2000

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
set -x
TP=${TP:-2}; PP=2
GPUS=$((8 * 2)); [ -z "$NAME" ] && NAME=run
ARGS=(--num-layers 32 --hidden-size 4096 "--num-attention-heads 32" # shape
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64)
if [ "$1" = full ]; then
  ARGS+=(--recompute-granularity full --recompute-method block --recompute-num-layers 4)
else ARGS+=(--recompute-activations); fi
for n in 1 2; do LOG="$LOG ${n##*/}"; done
case $PP in 1) X=1;; 2|4) X="--pipeline-model-parallel-layout Et*16|t*16L";; esac
run() { local a=$1; shift; torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" $X \\
  --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP --bf16 --swiglu; }
cat <<EOF > ds.json
{"train_batch_size": $GPUS, "zero_optimization": {"stage": 1}}
EOF
run go 2>&1 | tee log.txt
"""
CONFIG = """{ // comment
  "train_batch_size": 64, train_micro_batch_size_per_gpu: "auto",
  'zero_optimization': {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    "sub_group_size": 1e9,
    "offload_param": {"device": "none"}, "stage3_max_live_parameters": 1_000,},
  "bf16": {"enabled": true}, "fp16": {"enabled": False, "min_loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0
}
"""
TRAINER = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
mixed_precision: bf16
"""
PIECES = (
    *(
        "${",
        "}",
        "$((",
        "))",
        "(",
        ")",
        '"',
        "'",
        "\\",
        "$",
        "`",
        "<<EOF\n",
        "fi",
        "done",
        ";;",
        "esac",
        "&&",
        "||",
    ),
    *(
        "9" * 400,
        "9" * 5000,
        "1e9999",
        "-1",
        "0",
        "[",
        "]",
        "{",
        "[" * 100,
        "\ud83d",
        "\\ud800",
        "null",
        "NaN",
    ),
    *(
        "true",
        "[1, 2]",
        "{}",
        "--",
        "--num-layers",
        "\n",
        "#",
        "=",
        "+=",
        "${X:-$X}",
        "$(",
        "E(t)*99999999L",
        "%%",
    ),
    *("auto", "\x00", "\x1b[31m", "*", "1/0", "$((1/0))", "${A[9999999999]}", "cpu", "0x", "08", "\u00e9"),
)


def damaged(text: str, random_: random.Random) -> str:
    """A few places of a text removed, doubled, exchanged, or filled with something unexpected."""
    for _ in range(random_.randint(1, 3)):
        start = random_.randint(0, len(text))
        end = min(len(text), start + random_.choice([0, 0, 1, 3, 12, 60]))
        piece = random_.choice([*PIECES, text[end : end + 30], ""])
        text = text[:start] + piece + text[end:]
    return text


def read_script_fully(text: str) -> None:
    command = read_command_line(text, "run.sh")
    lint_command(command, "run.sh", KNOWN)
    plan_of(command.options, (), CLUSTER, "run.sh")


def read_config_fully(text: str) -> None:
    reading = read_config(read_loose(text, "ds.json"), SCHEMA)
    assert isinstance(reading.stage, int)
    reading.moves("offload_optimizer"), reading.moves("offload_param"), reading.ratio, reading.wide_grads
    json.dumps([finding.message for finding in reading.findings]).encode()


def read_trainer_fully(text: str) -> None:
    document = mapping_of(text, "accelerate.yaml")
    adapter_findings(document)
    named = named_config(document, "accelerate.yaml")
    read_config(read_loose(json.dumps(filled(named.config, named.fills), default=str), "x"), SCHEMA)


@pytest.mark.parametrize(
    ("text", "reader", "times"),
    [
        (SCRIPT, read_script_fully, MUTATIONS // 2),
        (CONFIG, read_config_fully, MUTATIONS * 3 // 8),
        (TRAINER, read_trainer_fully, MUTATIONS // 8),
    ],
    ids=["script", "configuration", "trainer"],
)
def test_damaged_files_are_read_or_refused(text: str, reader, times: int) -> None:  # type: ignore[no-untyped-def]
    random_ = random.Random(7)
    start = time.process_time()
    for _ in range(times):
        changed = damaged(text, random_)
        kind_of(changed)
        try:
            reader(changed)
        except MistError as error:
            assert "\n" not in error.message
        except Exception as error:
            raise AssertionError(changed) from error
    assert time.process_time() - start < 30.0


@pytest.mark.parametrize(
    "text",
    [
        "E(t)*99999999999L",
        "E" + "(" * 5000 + "t" + ")*9" * 5000 + "L",
        "E" + "t*9" * 9000 + "L",
        "E(t*9)*" + "9" * 5000 + "L",
    ],
)
def test_layouts_are_bounded(text: str) -> None:
    with pytest.raises(InputError, match="layout"):
        parse_layout(text, "x")


@pytest.mark.parametrize(
    "value", ["9" * 5000, "1e9999", "[" * 500, '{"a":' * 500, '"\\ud800"', "1" + "0" * 400]
)
def test_absurd_values_are_refused_in_one_line(value: str) -> None:
    with suppress(InputError):
        read_config_fully(f'{{"train_batch_size": {value}}}')
    with suppress(InputError):
        read_script_fully(
            f"torchrun pretrain_gpt.py --num-layers {value} --pipeline-model-parallel-size 1{0:012d}"
        )


def test_the_sample_itself_is_read() -> None:
    command = read_command_line(SCRIPT, "run.sh")
    assert command.program == "pretrain_gpt.py" and command.options["tensor-model-parallel-size"] == ("2",)
    assert command.maybe["recompute-method"] == "$1"
    assert [f.level for f in lint_command(command, "run.sh", KNOWN)].count("open") == 1
    assert read_config(read_loose(CONFIG, "x"), SCHEMA).ratio == 0.5


def test_large_files_are_refused_at_once() -> None:
    start = time.process_time()
    for text in ("x" * 60_000_000, "{" + " " * 60_000_000, "a: 1\n" * 12_000_000):
        with pytest.raises(InputError, match="characters"):
            (read_loose if text[0] == "{" else mapping_of if text[0] == "a" else read_command_line)(text, "x")
    assert time.process_time() - start < 5.0
