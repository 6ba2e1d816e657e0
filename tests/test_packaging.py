"""What is installed, from a wheel and from a checkout: built and installed for real, run from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from short_form import long_form

from mist_megatron import __version__
from mist_megatron.ask.emit import launch_sources
from mist_megatron.formats.files import load_plan, write_artifacts
from mist_megatron.frameworks.folder import artifacts

ROOT = Path(__file__).resolve().parent.parent
DATA = ("launch", "calibration", "recipes")


def call(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source archive and the wheel, built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


def new_environment(folder: Path) -> Path:
    """A new environment that sees this one's dependencies, but not this one's copy of the package."""
    venv.create(folder, with_pip=True)
    site = Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}, scheme="venv")
    )
    here = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    # Plain path lines: the other environment's own .pth files (an editable install) are not followed.
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(here)))
    return folder / ("Scripts" if os.name == "nt" else "bin")


def test_wheel_holds_two_packages_and_the_data(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mist_megatron", "mist_patches", f"mist_megatron-{__version__}.dist-info"}
    for folder in DATA:
        assert any(name.startswith(f"mist_megatron/_data/{folder}/") for name in names), folder
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"mist_megatron/py.typed", "mist_megatron/pages/template/page.html"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_source_archive_builds_the_same_wheel(built: Path) -> None:
    """`build` makes the wheel from the source archive: what is missing there is missing in the wheel."""
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for wanted in (
        "pyproject.toml",
        "hatch_build.py",
        "LICENSE",
        "README.md",
        "tests/conftest.py",
        "examples/what_if.py",
    ):
        assert wanted in names


def test_installed_wheel_runs_from_another_folder(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    programs = new_environment(tmp_path / "env")
    python = programs / "python"
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    where = call(python, "-c", "import mist_megatron; print(mist_megatron.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    program = programs / "mist-megatron"
    assert call(program, "--version", cwd=tmp_path) == f"mist-megatron {__version__}\n"
    assert json.loads(call(program, "models", "--json", cwd=tmp_path))["models"]
    assert "recipes" in json.loads(call(program, "recipes", "--json", cwd=tmp_path))
    call(python, "-c", "import mist_patches", cwd=tmp_path)
    check = f"from mist_megatron.resources import data_folder as f; print(*map(f, {DATA}), sep='\\n')"
    for line in call(python, "-c", check, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(tmp_path)


@long_form
def test_editable_install_exposes_only_the_two_packages(built: Path, tmp_path: Path) -> None:
    programs = new_environment(tmp_path / "env")
    python, source = programs / "python", built / "source"
    flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--editable")
    call(python, "-m", "pip", "install", *flags, source, cwd=tmp_path)
    generic = ("patches", "launch", "calibration", "recipes", "tests", "benchmarks")
    check = f"from importlib.util import find_spec as f; print([n for n in {generic} if f(n)])"
    assert call(python, "-c", check, cwd=tmp_path) == "[]\n"
    where = call(python, "-c", "import mist_patches; print(mist_patches.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(source)
    found = "from mist_megatron.resources import data_folder; print(data_folder('recipes'))"
    assert Path(call(python, "-c", found, cwd=tmp_path).strip()) == source / "recipes"
    assert call(programs / "mist-megatron", "--version", cwd=tmp_path) == f"mist-megatron {__version__}\n"


@pytest.fixture(scope="module")
def small_wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel ./patches` makes of the tracked files."""
    folder = tmp_path_factory.mktemp("small")
    source = built / "source" / "patches"
    call(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source),
        cwd=folder,
    )
    [wheel] = folder.glob("mist_patches-*.whl")
    return wheel


def test_small_wheel_is_the_patches_alone(small_wheel: Path, built: Path) -> None:
    with zipfile.ZipFile(small_wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
        tree = built / "source" / "patches"
        for name in names:
            if name.endswith(".py"):
                assert archive.read(name) == (tree / name).read_bytes(), name
    modules = {path.relative_to(tree).as_posix() for path in tree.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert f"Version: {__version__}" in text, "the two packages are released together"
    assert "Requires-Dist" not in text, "pip would exchange a cluster's own build of torch"


def test_small_wheel_starts_a_plan_with_the_standard_library_alone(small_wheel: Path, tmp_path: Path) -> None:
    """An emitted folder whose stages differ, started as torchrun starts a rank: no site-packages at all."""
    folder = tmp_path / "emitted"
    plan = ROOT / "recipes" / "gpt3-1.3b-1x8-l4" / "plan.yaml"
    planned = load_plan(plan)
    (stage, *_) = planned.stages
    uneven = replace(stage, layers=planned.model.layers // 2, ckpt=1, recompute="full")
    two = (uneven, replace(uneven, ckpt=0))
    nodes = replace(planned.cluster, nodes=2 * stage.gpus // planned.cluster.gpus_per_node)
    half = replace(
        planned, target="megatron+patches", stages=two, vpp=1, schedule="1f1b", cluster=nodes, rank_map=None
    )
    write_artifacts(folder, artifacts(half, launch_sources(probe=False)))
    (tmp_path / "mine.py").write_text("import sys; print(*sys.argv[1:])")
    for rank, said in ((0, "--recompute-num-layers 1"), (half.gpus - 1, "")):
        done = subprocess.run(
            [sys.executable, "-S", "-E", str(folder / "pretrain.py"), "--mist-stages",
             str(folder / "stages.json"), "--mist-script", str(tmp_path / "mine.py")],
            env={"RANK": str(rank), "WORLD_SIZE": str(half.gpus)},
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode != 0 and "mist_patches is not installed" in done.stderr
        code = f"import sys, runpy; sys.path.insert(0, {str(small_wheel)!r}); sys.argv = sys.argv[1:]; "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        done = subprocess.run(
            [sys.executable, "-S", "-E", "-c", code, str(folder / "pretrain.py"), "--mist-stages",
             str(folder / "stages.json"), "--mist-script", str(tmp_path / "mine.py")],
            env={"RANK": str(rank), "WORLD_SIZE": str(half.gpus)},
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert ("--recompute-granularity" in done.stdout.splitlines()[-1]) is (rank == 0)
