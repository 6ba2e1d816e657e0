"""Every flag of the real parser is classed by what it does to a price."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mist_megatron.frameworks.megatron.command import options_of, read_command_line
from mist_megatron.frameworks.megatron.flag_classes import CLASSES, class_of, unpriced_flags
from mist_megatron.frameworks.megatron.lint import lint_command, lint_megatron

ROOT = Path(__file__).resolve().parents[2]
KNOWN = frozenset(json.loads((ROOT / "launch" / "megatron_flags.json").read_text("utf-8"))["flags"])


def test_every_flag_of_the_parser_is_classed() -> None:
    assert [flag for flag in sorted(KNOWN) if class_of(flag.removeprefix("--")) is None] == []


def test_the_table_names_only_flags_that_there_are_and_each_once() -> None:
    said = [name for group in CLASSES for name in group.flags.split()]
    assert len(said) == len(set(said))
    for name in said:
        start = f"--{name.removesuffix('*')}"
        assert any(flag.startswith(start) for flag in KNOWN) if name.endswith("*") else start in KNOWN, name


SHAPE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16"


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2", []),
        (
            "--num-experts 8 --moe-grouped-gemm --moe-expert-capacity-factor 1.5 --moe-paged-stash",
            ["moe-expert-capacity-factor", "moe-paged-stash"],
        ),
        (
            "--num-experts 8 --moe-grouped-gemm --moe-router-load-balancing-type sinkhorn",
            ["moe-router-load-balancing-type"],
        ),
        ("--multi-latent-attention --kv-lora-rank 512 --mla-down-proj-fusion", ["mla-down-proj-fusion"]),
        ("--mtp-num-layers 1 --mtp-detach-heads", ["mtp-detach-heads"]),
        ("--use-torch-fsdp2", ["use-torch-fsdp2"]),
        ("--hybrid-override-pattern M-M*", ["hybrid-override-pattern"]),
        ("--optimizer sgd", ["optimizer"]),
        ("--optimizer muon", ["optimizer"]),
        ("--window-size 4096,0 --window-attn-skip-freq 2", []),
        ("--fp4-format e2m1", []),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", []),
        ("--fp8-format e4m3 --fp8-recipe custom", ["fp8-recipe"]),
        ("--optimizer adam --mtp-num-layers 0 --lr 1e-4 --transformer-impl transformer_engine", []),
    ],
)
def test_what_is_not_priced_is_named(added: str, named: list[str]) -> None:
    options = options_of(f"{SHAPE} {added}".split())
    assert [name for name, _ in unpriced_flags(options)] == named
    findings = lint_megatron(options, "", "x", KNOWN)
    assert [f.key for f in findings if f.level == "unpriced"] == [f"--{name}" for name in named]


@pytest.mark.parametrize(
    ("added", "noted"),
    [
        ("", []),
        ("--profile", ["--profile"]),
        ("--profile --use-pytorch-profiler", ["--profile-ranks"]),
        ("--profile --use-pytorch-profiler --profile-ranks 0", ["--profile-ranks"]),
        ("--profile --use-pytorch-profiler --profile-ranks 0 1 2 3", []),
    ],
)
def test_recordings_that_a_replay_could_not_use(added: str, noted: list[str]) -> None:
    findings = lint_megatron(options_of(f"{SHAPE} {added}".split()), "", "x", KNOWN)
    assert [f.key for f in findings if "profile" in f.key] == noted


def test_wild_scripts_are_read(measured_dir: Path) -> None:
    """Launch scripts of public repositories: each gives the command that it starts."""
    scripts = sorted((measured_dir / "wild" / "mg").glob("*"))
    if not scripts:
        pytest.skip("no scripts of public repositories beside the measured rows")
    for path in scripts:
        command = read_command_line(path.read_text("utf-8"), path.name)
        assert {"num-layers", "hidden-size", "num-attention-heads"} <= set(command.options), path.name
        lint_command(command, path.name, KNOWN)


FORMS = {
    "input of sbatch": "sbatch <<EOF\n#!/bin/bash\nsrun torchrun pretrain_gpt.py {flags}\nEOF",
    "printed by cat": "A=$(cat <<EOF\n{flags}\nEOF\n)\ntorchrun pretrain_gpt.py $A",
    "read from a heredoc": 'read -r -d "" A <<EOF\n{flags}\nEOF\ntorchrun pretrain_gpt.py $A',
    "a module": "python3 -m torch.distributed.run --rdzv_backend c10d -m megatron.pretrain_gpt {flags}",
    "a test first": "[ -d /data ] && echo yes || torchrun pretrain_gpt.py {flags}",
    "a quoted command": 'run_cmd="python -u pretrain_gpt.py {flags}"\nsrun -l sh -c "${run_cmd}"',
    "ssh in a loop": 'for h in a b; do ssh $h "cd /m; torchrun pretrain_gpt.py {flags}" & done',
    "a container": "srun apptainer exec --nv $IMG bash -c 'python pretrain_gpt.py {flags}'",
    "profiled": "nsys profile -s none -o out numactl --cpunodebind=0 python pretrain_gpt.py {flags} | tee l",
    "a function": 'run() {{\n torchrun pretrain_gpt.py {flags} "$@"\n}}\nrun',
}


@pytest.mark.parametrize("form", FORMS)
def test_the_command_is_found_in_what_people_wrap_it_in(form: str) -> None:
    flags = "--num-layers 4 --global-batch-size 8"
    wanted = options_of(flags.split())
    script = FORMS[form].replace("{{", "{").replace("}}", "}").replace("{flags}", flags)
    assert dict(read_command_line(script, "x").options) == dict(wanted)


def test_what_an_open_loop_sets_can_be_said() -> None:
    """The variable is named, not the condition, so that --set can say it."""
    loop = 'while getopts "t:" o; do case $o in t) TP=$OPTARG;; esac; done\n'
    text = f"{loop}TP=${{TP:-2}}\ntorchrun pretrain_gpt.py {SHAPE} --tensor-model-parallel-size $TP"
    (found,) = lint_command(read_command_line(text, "x"), "x", KNOWN)[-1:]
    assert (found.level, found.key) == ("open", "TP (a condition)")
    assert "--set TP=VALUE" in found.message
    assert read_command_line(text, "x", {"TP": "4"}).options["tensor-model-parallel-size"] == ("4",)
