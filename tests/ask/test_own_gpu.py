"""`--gpu my.yaml`: five figures are a GPU for every question."""

from __future__ import annotations

from pathlib import Path

import pytest

import mist_megatron as mm
from mist_megatron.ask.job_words import read_job
from mist_megatron.errors import InputError

FIVE = """
bf16_tflops: 312
memory_gib: 80
memory_gb_per_s: 2039
intra_gb_per_s: 300
inter_gb_per_s: 100
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(FIVE)
    return str(path)


def test_a_tuned_plan_is_written_read_priced_and_emitted(file: str, tmp_path: Path) -> None:
    tuned = mm.tune(model="gpt3-1.3b", gpus=2, gpu=file, global_batch=8, target="megatron")
    out = tmp_path / "run"
    emitted = mm.emit(tuned.plan, out=out)
    assert "args.sh" in emitted.files
    again = mm.load_plan(out / "plan.yaml")
    assert again.cluster.gpu == tuned.plan.cluster.gpu and again.cluster.gpu.name == "own-gpu"
    told = mm.predict(out / "plan.yaml").to_dict()["iteration_s"]
    assert told == pytest.approx(tuned.to_dict()["prediction"]["iteration_s"], rel=1e-9)


def test_half_the_rate_takes_longer(file: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text(FIVE.replace("312", "156"))
    words = {"model": "gpt3-1.3b", "gpus": 2, "global_batch": 8, "target": "megatron"}
    times = [mm.tune(gpu=gpu, **words).to_dict()["prediction"]["iteration_s"] for gpu in (file, str(slow))]
    assert 1.3 < times[1] / times[0] <= 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf16_tflops: 312\n", "is missing"),
        (FIVE.replace("80", "-1"), "memory_gib is -1.0; wanted a number above 0"),
        (FIVE.replace("2039", ".nan"), "memory_gb_per_s is nan; wanted a number above 0"),
        (FIVE + "fp16_tflops: 0\n", "fp16_tflops is 0.0; wanted a number above 0"),
        (FIVE.replace("memory_gib", "memory_gigs"), "unknown key memory_gigs"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_job({"model": "gpt3-7b", "gpus": 8, "gpu": str(path)})
