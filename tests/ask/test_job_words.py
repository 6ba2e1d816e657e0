"""The words of a job: what is read, what is assumed and told, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mist_megatron as mm
from mist_megatron.ask.job_words import JobWords, read_job
from mist_megatron.ask.words import texts
from mist_megatron.errors import InputError, MistError
from mist_megatron.spec import catalogue
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import LinkOverrides
from mist_megatron.spec.job import parse_links
from mist_megatron.spec.presets import PRESETS


def test_defaults_are_taken_and_told() -> None:
    taken = read_job(JobWords(model="gpt3-7b", gpus=32))
    cluster = taken.job.cluster
    assert (cluster.gpu.name, cluster.nodes, cluster.gpus_per_node) == ("a100-sxm-80gb", 4, 8)
    assert (taken.job.training.global_batch, taken.job.training.seq_len) == (512, 2048)
    told = {
        "--gpu",
        "--gpus-per-node",
        "--global-batch",
        "--seq",
        "--precision",
        "--flash-attention",
        "--target",
    }
    assert set(taken.defaults) == told


def test_what_was_said_is_not_told_again() -> None:
    said = JobWords(
        model="llama2-7b",
        gpus=16,
        gpu="h100-sxm-80gb",
        gpus_per_node=4,
        global_batch=64,
        seq=4096,
        precision="fp8",
        flash_attention=False,
        dropout=0.1,
        target="deepspeed",
        memory_limit="70GiB",
        bandwidth=["inter=50GB/s"],
    )
    taken = read_job(said)
    job = taken.job
    assert taken.defaults == {}
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (4, 4)
    assert job.cluster.memory_limit_bytes == 70 * 2**30
    assert job.cluster.links.inter_bytes_per_s == 50e9
    assert (job.training.precision, job.training.flash_attention, job.training.dropout) == ("fp8", False, 0.1)
    assert job.target == "deepspeed"


def test_old_gpus_get_fp16_without_the_fused_kernel() -> None:
    taken = read_job(JobWords(model="gpt3-1.3b", gpus=8, gpu="v100-sxm-32gb"))
    assert taken.job.training.precision == "fp16"
    assert not taken.job.training.flash_attention
    assert "no bf16" in taken.defaults["--precision"]


def test_learned_positions_bound_the_default_sequence() -> None:
    assert read_job(JobWords(model="gpt2", gpus=1)).job.training.seq_len == 1024


def test_model_from_a_huggingface_config(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    taken = read_job(JobWords(model=str(path), gpus=8))
    assert taken.job.model.parameters == 6_738_415_616


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (JobWords(gpus=8), "--model is missing"),
        (JobWords(model="gpt3-7b"), "--gpus is missing"),
        (JobWords(model="gtp3-7b", gpus=8), "did you mean gpt3-7b?"),
        (JobWords(model="gpt3-7b", gpus=8, gpu="a100-sxm-8gb"), "did you mean a100-sxm-80gb?"),
        (JobWords(model="gpt3-7b", gpus=0), "gpus"),
        (JobWords(model="gpt3-7b", gpus=-8), "gpus"),
        (JobWords(model="gpt3-7b", gpus=10**9), "wanted at most 1000000"),
        (JobWords(model="gpt3-7b", gpus=12), "wanted 8 or 16 GPUs"),
        (JobWords(model="gpt3-7b", gpus=8, gpus_per_node=3), "wanted 6 or 9 GPUs"),
        (JobWords(model="gpt3-7b", gpus=8, precision="bf61"), "did you mean bf16?"),
        (JobWords(model="gpt3-7b", gpus=8, target="megatorn"), "did you mean megatron?"),
        (JobWords(model="gpt3-7b", gpus=8, memory_limit="lots"), "--memory-limit"),
        (JobWords(model="gpt3-7b", gpus=8, memory_limit="900GiB"), "a100-sxm-80gb has 80.0GiB"),
        (JobWords(model="gpt3-7b", gpus=8, precision="fp8"), "a100-sxm-80gb has bf16, fp16"),
        (JobWords(model="gpt3-7b", gpus=8, gpu="t4-16gb", precision="bf16"), "t4-16gb has fp16"),
        (JobWords(model="gpt3-7b", gpus=8, bandwidth=["inter"]), "--bandwidth"),
        (JobWords(model="gpt3-7b", gpus=8, bandwidth=["infer=5GB/s"]), "did you mean inter?"),
        (JobWords(model="gpt3-7b", gpus=8, global_batch=0), "global_batch"),
        (JobWords(model="gpt3-7b", gpus=8, seq=-1), "seq_len"),
        (JobWords(model="gpt3-7b", gpus=8, dropout=1.5), "dropout"),
        (JobWords(model="gpt3-7b", gpus=8, dropout=float("nan")), "dropout"),
    ],
)
def test_bad_options_are_one_line(words: JobWords, wanted: str) -> None:
    with pytest.raises(InputError) as caught:
        read_job(words)
    assert wanted in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"\x00\x01\xff", b"{", b"[]", b"gpu: 7", b"gpu: nothing-known"])
def test_damaged_profile_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_bytes(content)
    with pytest.raises(MistError):
        read_job(JobWords(model="gpt3-7b", gpus=8, gpu=str(path)))


def test_typed_values_and_names_are_the_same() -> None:
    named = JobWords(
        model="gpt3-7b", gpus=8, gpu="h100-sxm-80gb", memory_limit="70GiB", bandwidth="inter=50GB/s"
    )
    typed = JobWords(
        model=PRESETS["gpt3-7b"],
        gpus=8,
        gpu=CATALOGUE["h100-sxm-80gb"],
        memory_limit=70 * 2.0**30,
        bandwidth={"inter": 50e9},
    )
    assert read_job(named) == read_job(typed)
    assert texts({"tp": 2, "pp": 4}) == texts(["tp=2", "pp=4"]) == ("tp=2", "pp=4")


def test_a_table_of_positions_is_as_long_as_the_sequences():
    """As Megatron makes it: what `lint` reads in the written arguments is then what was planned."""
    asked = read_job({"model": "gpt3-7b", "gpus": 8, "seq": 8192})
    assert asked.job.model.learned_positions == 8192
    assert "2,048" in asked.defaults["learned positions"]
    assert "learned positions" not in read_job({"model": "gpt3-7b", "gpus": 8, "seq": 1024}).defaults
    assert read_job({"model": "llama3-8b", "gpus": 8, "seq": 32768}).job.model.learned_positions == 0


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("50GB/s", 50e9),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400 Gbit/s", 50e9),
        ("25GiB/s", 25 * 2**30),
        ("5e10", 5e10),
    ],
)
def test_a_small_b_is_a_bit(text: str, bytes_per_s: float) -> None:
    """An adapter of 400Gb/s moves 50 GB in a second."""
    assert parse_links((f"inter={text}",), LinkOverrides()).inter_bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"bandwidth": "inter=400gb/s"}, "bytes or bits"),
        ({"bandwidth": "inter=400"}, "400 has no unit; wanted 400GB/s or 400Gb/s"),
        ({"memory_limit": 40}, "40 has no unit; wanted 40GiB"),
        ({"memory_limit": "76"}, "76 has no unit"),
        ({"gpu": "A100"}, "may be a100-"),
    ],
)
def test_what_may_mean_two_things_is_asked(words: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_job({"model": "gpt3-7b", "gpus": 8, **words})


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("H100-SXM-80GB", "h100-sxm-80gb"),
        ("l4-24gb", "l4-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
    ],
)
def test_gpus_are_known_in_any_letters(typed: str, known: str) -> None:
    assert catalogue.gpu(typed).name == known


def test_models_are_known_in_any_letters() -> None:
    assert read_job({"model": "LLaMA2-7B", "gpus": 8}).job.model.name == "llama2-7b"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA RTX A6000", "a6000-48gb"),
        ("Tesla T4", "t4-16gb"),
        ("A100 40", "a100-sxm-40gb"),
        ("h100-sxm-80", "h100-sxm-80gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
    ],
)
def test_a_gpu_is_known_by_the_name_its_driver_says(asked, found):
    assert read_job({"model": "gpt3-1.3b", "gpus": 8, "gpu": asked}).job.cluster.gpu.name == found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("A100-80", "may be a100-sxm"),
        ("A100-80GB", "may be a100-sxm-80gb or a100-pcie-80gb"),
        ("gh200", " are known"),
        ("H100 NVL", " are known"),
    ],
)
def test_a_gpu_of_another_name_is_not_guessed(asked, said):
    with pytest.raises(InputError, match=said):
        read_job({"model": "gpt3-1.3b", "gpus": 8, "gpu": asked})


def test_a_model_of_the_hub_is_of_the_cache_or_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for asked in ("meta-llama/Llama-2-7b-hf", "Llama-2-7B", "llama2-7b"):
        assert read_job({"model": asked, "gpus": 8}).job.model.name == "llama2-7b"
    with pytest.raises(InputError, match="neither a file, nor in the local Hugging Face cache, nor a preset"):
        read_job({"model": "someone/thing-8b", "gpus": 8})
    kept = tmp_path / "models--someone--thing-8b" / "snapshots" / "0f1e"
    kept.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    more = {
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    (kept / "config.json").write_text(json.dumps(config | more))
    assert read_job({"model": "someone/thing-8b", "gpus": 8}).job.model.layers == 3


JOB_OF_TWO = {"model": "gpt2", "gpus": 2, "gpu": "l4-24gb"}


def test_a_batch_may_be_told_by_gpu() -> None:
    small = {**JOB_OF_TWO, "space": "megatron"}
    by_gpu, whole = mm.tune(**small, per_device_batch=8), mm.tune(**small, global_batch=16)
    assert by_gpu.plan.training == whole.plan.training
    assert by_gpu.iteration_s == whole.iteration_s
    assert (
        read_job({**JOB_OF_TWO, "per_device_batch": 2, "grad_accum": 4}).job
        == read_job({**JOB_OF_TWO, "global_batch": 16}).job
    )
    for more, said in (
        ({"gpus": 2, "global_batch": 16}, "beside --global-batch"),
        ({"any_gpus": 8}, "wanted --gpus N"),
        ({"gpus": 2, "per_device_batch": 0}, "wanted at least 1"),
        ({"gpus": 2, "per_device_batch": None, "grad_accum": 2}, "goes with --per-device-batch"),
        ({"tokens": "1T", "deadline": "30d"}, "wanted --gpus N, or --global-batch"),
    ):
        with pytest.raises(InputError, match=said):
            mm.tune(**{"model": "gpt2", "per_device_batch": 8, **more})


@pytest.mark.parametrize(
    ("chosen", "said"),
    [(16, "num_experts_per_tok is 16; wanted at most the number of experts, which is 8"), (0, "is 0")],
)
def test_a_config_that_cannot_be_is_refused_by_its_own_keys(chosen, said, tmp_path):
    config = {"model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32000}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    config |= {"num_local_experts": 8, "num_experts_per_tok": chosen}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json: .*num_experts_per_tok") as caught:
        read_job({"model": str(tmp_path), "gpus": 8})
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("word", "recipe"),
    [
        ("fp8", None),
        ("fp8-delayed", "delayed"),
        ("fp8-current", "tensorwise"),
        ("fp8-blockwise", "blockwise"),
        ("MXFP8", "mxfp8"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_recipes_of_few_bits_by_their_names(word: str, recipe: str | None) -> None:
    job = mm.job(model="llama3-8b", gpus=8, gpu="b200-sxm-180gb", precision=word)
    assert (job.training.precision, job.execution.quantization) == ("fp8", recipe)
    told = mm.tune(job, space="megatron", fix=["tp=1", "micro_batch=1"]).plan
    assert told is not None and told.execution.quantization == recipe


def test_recipes_that_a_gpu_has_no_products_for() -> None:
    with pytest.raises(InputError, match=r"--precision is mxfp8, .*; h100-sxm-80gb has fp8-blockwise"):
        mm.job(model="llama3-8b", gpus=8, gpu="h100-sxm-80gb", precision="mxfp8")
