"""What Trainer, Accelerate, LLaMA-Factory and axolotl say of a job, in their files and command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import mist_megatron as mm
from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.command import read_command_line
from mist_megatron.frameworks.trainer_yaml import adapter_findings, processes, trainer_document, trainer_job

AUTO = {
    "bf16": {"enabled": "auto"},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
ACCELERATE = {
    "deepspeed_config": {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero_stage": 3},
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 8,
}
SAID = (
    "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 2 --block_size 4096 "
    "--gradient_accumulation_steps=4 --gradient_checkpointing --output_dir out"
)
FACTORY = {  # examples/train_lora/llama3_lora_sft_ds3.yaml of LLaMA-Factory, in short
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "deepspeed": "ds.json",
    "template": "llama3",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "bf16": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(ACCELERATE))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        f"torchrun --nnodes 1 --nproc_per_node=8 run_clm.py {SAID} --bf16 True --deepspeed ds.json",
        f"deepspeed --num_gpus 8 run_clm.py {SAID} --bf16 --deepspeed ds.json",
        f"accelerate launch --config_file acc.yaml train.py {SAID}",
    ],
)
def test_a_command_line_of_trainer_is_priced_as_what_it_says(command: str, folder: Path) -> None:
    written = {**AUTO, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    (folder / "written.json").write_text(json.dumps({**written, "bf16": {"enabled": True}}))
    (folder / "run.sh").write_text(command + "\n")
    said = mm.lint(
        folder / "written.json", model="llama2-7b", gpus=8, seq=4096, checkpointing=True, gpu="a100-sxm-40gb"
    )
    found = mm.lint(folder / "run.sh", gpu="a100-sxm-40gb")
    assert found.plan == said.plan is not None
    assert found.defaults["--gpus"] == "8 (said there)"
    # What is typed counts more than what the script says.
    assert mm.lint(folder / "run.sh", gpus=16, gpu="l4-24gb").plan.training.global_batch == 16 * 8


def test_what_a_script_leaves_open_is_asked_for_by_its_name(folder: Path) -> None:
    (folder / "run.sh").write_text(
        f"torchrun --nproc_per_node 8 run.py {SAID} --per_device_train_batch_size $EACH --deepspeed ds.json"
    )
    assert mm.lint(folder / "run.sh").plan.stages[0].micro_batch == 8  # Trainer's own
    assert mm.lint(folder / "run.sh", given={"EACH": "2"}).plan.stages[0].micro_batch == 2
    commands = ("torchrun pretrain_gpt.py --num-layers 4 --deepspeed", f"python train.py {SAID}")
    assert [trainer_document(read_command_line(each, "x")) for each in commands] == [None, None]
    assert processes({"nproc_per_node": 8, "nnodes": 4}) == 32
    assert processes({"nproc_per_node": "gpu"}) is None


def test_adapters_of_llama_factory_are_priced_as_lora(folder: Path) -> None:
    (folder / "sft.yaml").write_text(yaml.safe_dump(FACTORY))
    asked = {"gpus": 8, "gpu": "a100-sxm-80gb", "checkpointing": True}
    found = mm.lint(folder / "sft.yaml", gpus=8)
    assert (
        found.plan.model.adapter
        == mm.lint(folder / "ds.json", model="llama3-8b", lora=8, **asked).plan.model.adapter
    )
    assert found.plan.stages[0].ckpt == 32 and found.plan.training.seq_len == 2048
    assert found.prediction is not None and not found.findings


@pytest.mark.parametrize(
    ("document", "adapter", "unpriced"),
    [
        ({"stage": "sft", "template": "qwen"}, "8", []),  # LLaMA-Factory's own defaults
        ({"stage": "sft", "template": "qwen", "finetuning_type": "full"}, None, []),
        ({**FACTORY, "lora_target": "q_proj,v_proj", "lora_rank": 4}, "4:q,v", []),
        ({**FACTORY, "quantization_bit": 4}, "8:", ["quantization_bit"]),
        ({**FACTORY, "additional_target": "embed_tokens,lm_head"}, "8", ["additional_target"]),
        ({**FACTORY, "finetuning_type": "freeze"}, None, ["finetuning_type"]),
        ({"adapter": "lora", "lora_r": 32, "lora_target_linear": True}, "32", []),
        ({"adapter": "lora", "lora_r": 8, "lora_target_modules": ["up_proj"]}, "8:up", []),
        ({"adapter": "lora", "lora_target_linear": True}, None, ["lora_target_modules"]),
        ({"adapter": "lora", "lora_r": 8, "lora_target_modules": ["Wqkv"]}, None, ["lora_target_modules"]),
        ({"adapter": "qlora", "lora_r": 32, "load_in_4bit": True}, None, ["load_in_4bit", "adapter"]),
        ({"use_peft": True}, None, ["lora_target_modules"]),  # PEFT chooses by the model
        ({"use_peft": True, "lora_target_modules": ["all-linear"], "use_dora": True}, "16", ["use_dora"]),
        ({"use_peft": False, "lora_r": 8, "lora_dropout": 0.05}, None, []),
    ],
)  # fmt: skip
def test_adapters_by_the_keys_of_each_trainer(
    document: dict[str, Any], adapter: str | None, unpriced: list[str]
) -> None:
    found = trainer_job(document).adapter
    assert found == (adapter and adapter.removesuffix(":"))
    assert [finding.key for finding in adapter_findings(document)] == unpriced


def test_typed_adapters_answer_for_those_that_are_not_priced(folder: Path) -> None:
    more = {**FACTORY, "lora_dropout": 0.05}
    (folder / "sft.yaml").write_text(yaml.safe_dump(more))
    assert mm.lint(folder / "sft.yaml", gpus=8).prediction is None
    assert mm.lint(folder / "sft.yaml", gpus=8, lora="8").prediction is not None
    (folder / "sft.yaml").write_text(yaml.safe_dump({**more, "load_in_4bit": True}))
    assert mm.lint(folder / "sft.yaml", gpus=8, lora="8").prediction is None


def test_offload_beside_adapters_has_no_price(folder: Path) -> None:
    moved = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = {**AUTO, "bf16": {"enabled": True}, "zero_optimization": moved}
    (folder / "moved.json").write_text(json.dumps(config))
    asked = {"model": "llama2-7b", "gpus": 8, "lora": 16, "per_device_batch": 2}
    found = mm.lint(folder / "moved.json", **asked)
    assert found.prediction is None and "offload: not modelled" in found.findings[-1].message
    with pytest.raises(InputError, match="offload: not modelled beside low-rank adapters"):
        mm.convert(folder / "moved.json", **asked)


def test_a_model_that_nobody_knows_is_asked_for(folder: Path) -> None:
    (folder / "sft.yaml").write_text(yaml.safe_dump({**FACTORY, "model_name_or_path": "someone/else"}))
    found = mm.lint(folder / "sft.yaml", gpus=8)
    assert found.prediction is None and found.price_words() == "not priced: --model"
    assert mm.lint(folder / "sft.yaml", gpus=8, model="llama3-8b").prediction is not None


def test_what_does_not_fit_is_said_with_what_fills_it(folder: Path, ran_here) -> None:
    (folder / "run.sh").write_text(f"torchrun --nproc_per_node 2 run.py {SAID} --bf16 --deepspeed ds.json\n")
    ran = ran_here("lint", str(folder / "run.sh"), "--gpu", "l4-24gb")
    assert "does NOT fit" in ran.out and "most of it optimizer states" in ran.out
    assert "next: mist-megatron convert" in ran.out
