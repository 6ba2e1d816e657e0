"""Text -> mapping -> dataclass, strictly: no unknown key, no duplicate key, no guessed type.

Pure functions on text; `files.py` is what reads files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from mist_megatron.errors import InputError, MistError

if TYPE_CHECKING:
    import yaml
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails

T = TypeVar("T")

_ADAPTERS: dict[object, Any] = {}
"""Validators by type: building one takes milliseconds, and pydantic is imported only when one is needed."""


MOST_YAML, MOST_JSON = 512 << 10, 4 << 20
"""Characters. The largest document of ours has 12 thousand; YAML takes some 9 CPU-seconds a megabyte, and
JSON up to 400 bytes of memory a character."""


def parse(text: str, where: str) -> dict[str, Any]:
    """A YAML or JSON document that is one mapping."""
    if len(text) > MOST_JSON:
        raise InputError(f"{where}: {len(text)} characters; a document has at most {MOST_JSON}")
    if not text.strip():
        raise InputError(f"{where}: the file is empty; wanted a YAML or JSON mapping")
    try:
        value = _parse_json(text) if text.lstrip().startswith("{") else _parse_yaml(text)
    except MistError as error:
        raise InputError(f"{where}: {error.message}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; wanted a plain mapping") from None
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise InputError(f"{where}: not a valid document ({_one_line(error)})") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: holds {_kind(value)}; wanted a mapping of keys to values")
    return value


def _parse_json(text: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in items:
            if key in mapping:
                raise InputError(f"key {key!r} stands twice")
            mapping[key] = value
        return mapping

    def constant(name: str) -> object:
        raise InputError(f"{name} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        # A YAML flow mapping also begins with a brace.
        try:
            return _parse_yaml(text)
        except (InputError, RecursionError):
            raise InputError(f"line {error.lineno}: not valid JSON ({error.msg})") from None


_PLAIN: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf)$|^\.(?:nan|NaN)$",
        list("-+0123456789."),
    ),
)
"""Tag, pattern and first characters of what an unquoted word of a YAML file means."""


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    digits = node.value.lstrip("-+")
    if len(digits) > 1 and digits.startswith("0"):
        raise InputError(
            f"line {node.start_mark.line + 1}: {node.value} begins with a zero, which some readers take for "
            f"octal; write {int(node.value)}"
        )
    return int(node.value)


@cache
def _yaml_loader() -> type[yaml.SafeLoader]:
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Safe YAML without aliases (a short file must not grow), dates, or duplicate keys."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                raise InputError(f"line {event.start_mark.line + 1}: aliases (*name) are not accepted")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            seen: set[object] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise InputError(f"line {key_node.start_mark.line + 1}: key {key!r} is not text")
                if key in seen:
                    raise InputError(f"line {key_node.start_mark.line + 1}: key {key!r} stands twice")
                seen.add(key)
            return super().construct_mapping(node, deep)

    # The plain words of YAML 1.2 and JSON. YAML 1.1 also reads 010 as 8, 1:30 as 90, 1_0 as 10 and yes as
    # true, and 1e9 as text: none of which somebody who writes a configuration means.
    StrictLoader.yaml_implicit_resolvers = {}
    for tag, pattern, first in _PLAIN:
        StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), first)
    StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)
    return StrictLoader


def _parse_yaml(text: str) -> object:
    import yaml

    if len(text) > MOST_YAML:
        raise InputError(f"{len(text)} characters; a YAML document has at most {MOST_YAML}")
    try:
        # The loader is a SafeLoader, made stricter.
        return yaml.load(text, Loader=_yaml_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or _one_line(error)
        raise InputError(f"{line}not valid YAML ({_one_line(problem)})") from None


_UNICODE_BREAK = re.compile("[\x85\u2028\u2029]")


class Inline(dict[str, object]):
    """A mapping that is written on one line."""


class Row(list[object]):
    """A list that is written on one line."""


@cache
def _yaml_dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Never writes the aliases that our reader refuses."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def inline(dumper: yaml.SafeDumper, data: Inline) -> yaml.Node:
        return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
        # Line breaks of Unicode are only escaped, and so read back as they were, between double quotes.
        style = '"' if _UNICODE_BREAK.search(data) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def row(dumper: yaml.SafeDumper, data: Row) -> yaml.Node:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    Dumper.add_representer(Inline, inline)
    Dumper.add_representer(Row, row)
    Dumper.add_representer(str, text)
    # Quoted is what YAML 1.1 takes for something else than text, and also what our reader does (1e3, 0189).
    for tag, pattern, first in _PLAIN:
        Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), first)
    return Dumper


def to_yaml(value: Mapping[str, object], *, width: int) -> str:
    """A document as YAML that `parse` reads back as it was."""
    import yaml

    text: str = yaml.dump(value, Dumper=_yaml_dumper(), sort_keys=False, width=width, allow_unicode=True)
    return text


def build(kind: type[T], value: object, where: str) -> T:
    """A dataclass from a parsed value, every field checked; the first fault is named with its path."""
    from pydantic import ValidationError

    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: holds a value that is not plain data ({_one_line(error)})") from None
    try:
        result: T = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {_first_fault(error, kind)}") from None
    except MistError as error:
        raise type(error)(f"{where}: {error.message}", details=error.details) from None
    return result


def build_versioned(kind: type[T], value: Mapping[str, object], where: str, schema: int) -> T:
    """The same for a file whose format is numbered: a file of another format is refused for its number, not
    for the first key that differs."""
    said = value.get("schema")
    if isinstance(said, int) and said != schema:
        raise InputError(f"{where}: schema is {said}; this version reads schema {schema}")
    return build(kind, value, where)


def schema_of(kind: type[T]) -> dict[str, Any]:
    """JSON Schema of a document."""
    return _adapter(kind).json_schema()


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    from pydantic import TypeAdapter

    adapter: TypeAdapter[T] | None = _ADAPTERS.get(kind)
    if adapter is None:
        _make_strict(kind)
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter


def _make_strict(kind: object) -> None:
    """Every dataclass of a document refuses unknown keys and guessed types. pydantic asks the class itself
    for that; our nouns need not know that they are ever read."""
    if isinstance(kind, type) and is_dataclass(kind) and "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[attr-defined]
        for held in get_type_hints(kind).values():
            _make_strict(held)
    for form in get_args(kind):
        _make_strict(form)


def _first_fault(error: ValidationError, kind: object) -> str:
    faults = _of_one_form(error.errors(include_url=False, include_context=False))
    missing = [fault["loc"] for fault in faults if fault["type"] in _MISSING]
    # A misspelt key is a missing one and an unknown one: the unknown one is what somebody typed.
    names = [str(key[-1]) for key in missing]
    misspelt = [f for f in faults if f["type"] in _UNKNOWN and _near(f["loc"], names)]
    fault = (misspelt or faults)[0]
    path = _path(fault["loc"])
    if fault["type"] in _UNKNOWN:
        meant = _near(fault["loc"], _keys_at(kind, fault["loc"][:-1]))
        others = len(faults) - 1 - ((*fault["loc"][:-1], meant) in missing)
        return f"unknown key {path}{f'; did you mean {meant}?' if meant else ''}{_more(others)}"
    more = _more(len(faults) - 1)
    if fault["type"] in _MISSING:
        return f"key {path} is missing{more}"
    got = repr(fault.get("input"))
    shown = got if len(got) <= 40 else got[:37] + "..."
    message = fault["msg"].removeprefix("Input should be ")
    for word, plain in _PLAIN_WORDS.items():
        message = message.replace(word, plain)
    wanted = f"wanted {message}" if message != fault["msg"] else f"{message[0].lower()}{message[1:]}"
    return f"{path} is {shown}; {wanted}{more}"


_PLAIN_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "an object": "a mapping",
}
_UNKNOWN = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
_MISSING = frozenset({"missing", "missing_argument"})


def _of_one_form(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Of a value that is a name or a mapping, and was given as a mapping, only what is wrong as a mapping."""
    return [
        {**fault, "loc": tuple(part for part in fault["loc"] if part not in _FORMS)}
        for fault in faults
        if not (fault["loc"][-1:] == ("str",) and isinstance(fault.get("input"), dict))
    ] or faults


_FORMS = frozenset({"str", "GpuSpec", "dict[str,any]"})
"""What pydantic puts into the path of a value that may have several forms."""


def _keys_at(kind: object, path: tuple[object, ...]) -> list[str]:
    """Keys of the mapping at a path in a document; none where that is no dataclass."""
    for key in path:
        if isinstance(key, str):
            held = get_type_hints(kind).get(key) if is_dataclass(kind) else None
            # Of a sequence its elements, of what may be left out what it is.
            kind = next((form for form in get_args(held) if is_dataclass(form)), held)
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def _near(path: tuple[object, ...], names: list[str]) -> str | None:
    matches = get_close_matches(str(path[-1]), names, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _path(parts: tuple[object, ...]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "document"


def _kind(value: object) -> str:
    return {list: "a list", str: "plain text", type(None): "nothing"}.get(type(value), "a single value")


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else text[:117] + "..."
