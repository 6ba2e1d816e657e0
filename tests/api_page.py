"""Writes docs/api.md from the signatures and docstrings of the Python API.

    python tests/api_page.py

A test holds that the page is what this program writes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from pathlib import Path

import mist_megatron as mm
from mist_megatron.ask.convert import ConvertWords
from mist_megatron.ask.job_words import JobWords
from mist_megatron.ask.place import PlaceWords
from mist_megatron.ask.replay import ReplayWords
from mist_megatron.ask.simulate import SimulateWords
from mist_megatron.ask.sweep import SweepWords
from mist_megatron.ask.tune_words import AS_USUAL, TuneWords

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
KINDS = (JobWords, TuneWords, SweepWords, ConvertWords, SimulateWords, ReplayWords, PlaceWords)
WORDS = {kind.__name__: kind for kind in KINDS}


def page() -> str:
    functions = [name for name in mm.__all__ if inspect.isfunction(getattr(mm, name))]
    classes = [name for name in mm.__all__ if inspect.isclass(getattr(mm, name))]
    results = [name for name in classes if hasattr(getattr(mm, name), "to_dict")]
    errors = [name for name in classes if issubclass(getattr(mm, name), Exception)]
    values = [name for name in classes if name not in results + errors]
    parts = [HEAD.format(about=inspect.getdoc(mm).partition("first used. ")[2])]
    parts += ["## Functions", *(function_text(name) for name in functions)]
    parts += ["### Arguments of a job", words_table("JobWords")]
    parts += ["## Results", *(class_text(name) for name in results)]
    parts += ["## Values", VALUES, value_table(values)]
    parts += ["## Errors", error_table(errors)]
    return "\n\n".join(parts) + "\n"


HEAD = """# The Python API

`import mist_megatron as mm` imports nothing else; each name is imported when it is first used. This page is
written by `python tests/api_page.py` from signatures and docstrings; `examples/` has the API in use.

{about}"""


VALUES = (
    "Frozen dataclasses: `dataclasses.replace` makes a variant. What each key of a plan means is told in "
    "[plan.md](plan.md)."
)


def function_text(name: str) -> str:
    function = inspect.unwrap(getattr(mm, name))
    parameters = []
    more = ""
    starred = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            more = parameter.annotation.removeprefix("Unpack[").removesuffix("]")
            parameters.append(("" if starred else "*, ") + "...")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parameters.append(f"{parameter.name}: {parameter.annotation}{default}")
    returns = inspect.signature(function).return_annotation
    lines = [f"### mm.{name}", "", "```python", *call_lines(f"mm.{name}", parameters, returns), "```", ""]
    lines += [inspect.getdoc(function)]
    if more and more != "JobWords":
        lines += ["", words_table(more)]
    if more and issubclass_of_job(more):
        lines += ["", "`...`: those [of a job](#arguments-of-a-job)."]
    return "\n".join(lines)


def issubclass_of_job(words: str) -> bool:
    return set(JobWords.__annotations__) <= set(WORDS[words].__annotations__)


def call_lines(name: str, parameters: list[str], returns: str) -> list[str]:
    line = f"{name}({', '.join(parameters)}) -> {returns}"
    if len(line) <= 100:
        return [line]
    return [f"{name}(", *(f"    {parameter}," for parameter in parameters), f") -> {returns}"]


def words_table(words: str) -> str:
    rows = []
    for name, (hint, meaning) in annotations_in(WORDS[words]):
        default = f"`{AS_USUAL[name]!r}`" if name in AS_USUAL and words == "TuneWords" else ""
        rows.append((f"`{name}`", f"`{hint}`", default, meaning))
    return table(("argument", "type", "default", "meaning"), rows)


def class_text(name: str) -> str:
    kind = getattr(mm, name)
    parts = [f"### mm.{name}", inspect.getdoc(kind)]
    if is_dataclass(kind):
        said = annotations_of(kind)
        defaults = {item.name: default_words(item) for item in fields(kind)}
        rows = [
            (f"`{field}`", f"`{said[field][0]}`" if field in said else "", defaults[field], said[field][1])
            for field in defaults
            if field in said
        ]
        parts += [table(("field", "type", "default", "meaning"), rows)] if rows else []
    parts.append(table(("also", "", "meaning"), list(methods_of(kind))))
    return "\n\n".join(parts)


def default_words(item: object) -> str:
    if item.default is MISSING and item.default_factory is MISSING:
        return ""
    if item.default is MISSING or is_dataclass(item.default):
        return "none of them"
    return f"`{item.default!r}`"


def methods_of(kind: type) -> Iterator[tuple[str, str, str]]:
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property | cached_property):
            function = member.fget if isinstance(member, property) else member.func
            returns = inspect.signature(function).return_annotation
            yield f"`{name}`", f"`{returns}`", one_line(inspect.getdoc(function))
        elif inspect.isfunction(member):
            signature = inspect.signature(member)
            arguments = [str(p) for p in signature.parameters.values() if p.name != "self"]
            arguments = ", ".join(arguments).replace("'", "")
            yield (
                f"`{name}({arguments})`",
                f"`{signature.return_annotation}`",
                one_line(inspect.getdoc(member)),
            )


def value_table(values: list[str]) -> str:
    rows = [(f"`mm.{name}`", one_line(inspect.getdoc(getattr(mm, name)).split("\n\n")[0])) for name in values]
    return table(("type", "what it is"), rows)


def error_table(errors: list[str]) -> str:
    rows = [
        (f"`mm.{name}`", str(getattr(mm, name).exit_code), one_line(inspect.getdoc(getattr(mm, name))))
        for name in errors
    ]
    head = "All are `mm.MistError`: `message` is one line, `details` are further ones, such as what to try."
    return f"{head}\n\n{table(('error', 'exit code of the command', 'meaning'), rows)}"


def annotations_of(kind: type) -> dict[str, tuple[str, str]]:
    """Name -> type as it is written, and the text under it."""
    return dict(annotations_in(kind))


def annotations_in(kind: type) -> Iterator[tuple[str, tuple[str, str]]]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = one_line(str(after.value.value))
            yield node.target.id, (ast.unparse(node.annotation), text)


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
