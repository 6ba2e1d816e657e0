"""The Megatron flags that a YAML file stands for: NeMo, Megatron-Bridge, `--yaml-cfg`, lists of flags.

Pure. Key by key into the flags that `lint` knows, so that one table (flag_classes) says of all of them what
is priced; a key that neither is a flag nor stands in yaml_keys is named, and then no price is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mist_megatron.frameworks.findings import Finding
from mist_megatron.frameworks.interpolation import Interpolation
from mist_megatron.frameworks.megatron.command import OPEN_VALUE, Options
from mist_megatron.frameworks.megatron.model import model_flags
from mist_megatron.frameworks.megatron.yaml_keys import (
    HARMLESS,
    INDIFFERENT,
    NEMO_1_DEFAULTS,
    OFF,
    RENAMED,
    SECTIONS,
)
from mist_megatron.frameworks.megatron.yaml_values import SPECIAL, is_open, plain, words_of
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.presets import preset_like
from mist_megatron.spec.training import TrainingSpec

_SIGNS = frozenset({"num_layers", "hidden_size", "tensor_model_parallel_size", "micro_batch_size"})
_CLASS = re.compile(r"(\w*?)(?:Config|ModelProvider|Provider)_?(\w*)")
_DATA = ("seq_length", "sequence_length", "micro_batch_size", "global_batch_size", "reset_attention_mask")
"""What of a data set is about the step."""
_OVERLAP = "MegatronCommOverlapCallback"
_PRICED_AS = "apex's optimizer is priced as Megatron's own, with 2 bytes of master weight beside bf16"


@dataclass(frozen=True, kw_only=True)
class YamlRun:
    """What a file says, as `lint` reads command lines."""

    options: Options
    keys: Mapping[str, str]
    """Flag -> the key that says it."""
    maybe: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    gpus: int | None = None
    gpus_per_node: int | None = None
    environment: str = ""
    """Variables that the file sets, as text."""


Section = tuple[str, Mapping[str, object]]
"""Where it stands, and what it holds."""


def yaml_run(
    document: Mapping[str, object], known: frozenset[str], given: Mapping[str, str]
) -> YamlRun | None:
    """The run that a document describes; None where it is none of Megatron-core's."""
    if listed := _listed(document, known):
        return listed
    sections = _sections(document)
    if sections is None:
        return None
    reading = _Reading(known=known, told=Interpolation(document, given))
    for path, section in sections:
        reading.read(path, section)
    if _is_nemo_1(document):
        reading.defaults("model", NEMO_1_DEFAULTS)
        reading.elsewhere(document.get("defaults"))
    shape = _named_shape(document)
    reading.close(shape)
    gpus, per_node = _size(document.get("trainer"), reading)
    return YamlRun(
        options=reading.options,
        keys=reading.keys,
        maybe=reading.maybe,
        findings=tuple(reading.findings),
        gpus=gpus,
        gpus_per_node=per_node,
    )


def _listed(document: Mapping[str, object], known: frozenset[str]) -> YamlRun | None:
    """Flags by their names: our args.yaml, and the MODEL_ARGS of Megatron-LM's own tests."""
    inner = document.get("MODEL_ARGS")
    flags = inner if isinstance(inner, Mapping) else document
    names = {key: key.removeprefix("--") for key in flags}
    if sum(f"--{name}" in known and "_" not in name for name in names.values()) * 2 <= len(names):
        return None
    said = {name: words_of(flags[key]) for key, name in names.items()}
    options = {name: words for name, words in said.items() if words is not None}
    variables = document.get("ENV_VARS")
    told = "\n".join(f"{k}={v}" for k, v in variables.items()) if isinstance(variables, Mapping) else ""
    return YamlRun(options=options, keys={}, environment=told)


def _sections(document: Mapping[str, Any]) -> list[Section] | None:
    """The parts of a document that are about Megatron-core, each with the path of its keys."""
    model, trainer = document.get("model"), document.get("trainer")
    if isinstance(document.get("language_model"), Mapping) and "model_parallel" in document:
        rest = {key: value for key, value in document.items() if not isinstance(value, Mapping)}
        inner = {key: value for key, value in document.items() if isinstance(value, Mapping)}
        return [("", rest), *((path, section) for path, section in inner.items())]
    if not isinstance(model, Mapping) and not isinstance(trainer, Mapping):
        return None
    top = ("", {key: value for key, value in document.items() if key not in SECTIONS})
    if isinstance(trainer, Mapping):
        nemo = _nemo_1(document) if _is_nemo_1(document) else _nemo_2(document)
        return None if nemo is None else [top, *nemo]
    others = ("train", "mixed_precision", "ddp", "optimizer", "comm_overlap")
    beside = [name for name in (*others, "dataset") if name in document]
    if not beside or "policy" in document:
        return None
    precision = document.get("mixed_precision")
    words = [] if isinstance(precision, Mapping) else [("", {"mixed_precision": precision})]
    sections = [
        (name, document[name]) for name in ("model", *others) if isinstance(document.get(name), Mapping)
    ]
    if isinstance(precision, Mapping) and precision.get("fp8") and "fp8_recipe" not in precision:
        sections.append(("mixed_precision", {"fp8_recipe": "tensorwise"}))
    return [top, *words, *sections, *_of_data(document, "dataset")]


def _is_nemo_1(document: Mapping[str, Any]) -> bool:
    """A flat `model:` beside the trainer."""
    model, trainer = document.get("model"), document.get("trainer")
    flat = isinstance(model, Mapping) and isinstance(trainer, Mapping)
    return (
        flat
        and not _SIGNS.isdisjoint(model or {})
        and not isinstance((trainer or {}).get("strategy"), Mapping)
    )


def _nemo_1(document: Mapping[str, Any]) -> list[Section]:
    model = document["model"]
    optim = model.get("optim")
    return [
        ("model", model),
        ("trainer", document["trainer"]),
        *([("model.optim", optim)] if isinstance(optim, Mapping) else []),
        *_of_data(model, "data", "model."),
    ]


def _nemo_2(document: Mapping[str, Any]) -> list[Section] | None:
    """Lightning's objects as NeMo-Run writes them."""
    trainer, model = document["trainer"], document.get("model")
    strategy = trainer.get("strategy")
    config = model.get("config") if isinstance(model, Mapping) else None
    if not isinstance(strategy, Mapping) or "tensor_model_parallel_size" not in strategy:
        return None
    plain_trainer = {key: value for key, value in trainer.items() if key not in ("strategy", "plugins")}
    parts: list[tuple[str, object]] = [
        ("model.config", config),
        ("trainer.strategy", {key: value for key, value in strategy.items() if key != "ddp"}),
        *(("trainer.plugins", plugin) for plugin in _listed_of(trainer.get("plugins"))),
        ("trainer.strategy.ddp", strategy.get("ddp")),
        ("trainer", plain_trainer),
        *(("optim.config", optim.get("config")) for optim in _listed_of(document.get("optim"))),
        *(
            ("trainer.callbacks", callback)
            for holder in (trainer, document)
            for callback in _listed_of(holder.get("callbacks"))
            if str(callback.get("_target_", "")).endswith(_OVERLAP)
        ),
    ]
    sections = [(path, section) for path, section in parts if isinstance(section, Mapping)]
    return [*sections, *_of_data(document, "data")]


def _listed_of(value: object) -> list[Mapping[str, object]]:
    """One mapping or several."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Mapping)]


def _of_data(holder: Mapping[str, object], name: str, before: str = "") -> Iterator[Section]:
    data = holder.get(name)
    if isinstance(data, Mapping):
        yield f"{before}{name}", {key: data[key] for key in _DATA if key in data}


def _size(trainer: object, reading: _Reading) -> tuple[int | None, int | None]:
    """GPUs and GPUs of a node, as far as the trainer says them."""
    if not isinstance(trainer, Mapping):
        return None, None
    devices, nodes = (
        reading.told.value(f"trainer.{key}", trainer.get(key, default))
        for key, default in (("devices", None), ("num_nodes", 1))
    )
    if isinstance(devices, list):
        devices = len(devices)
    if not isinstance(devices, int) or not isinstance(nodes, int) or min(devices, nodes) < 1:
        return None, None
    return devices * nodes, devices


def _named_shape(document: Mapping[str, object]) -> ModelSpec | None:
    """The model of a class or a factory that stands for a shape: `Llama3Config8B`, `llama31_405b`."""
    model = document.get("model")
    if not isinstance(model, Mapping):
        return None
    config = model.get("config")
    holders = [config, model] if isinstance(config, Mapping) else [model]
    named = (str(h.get(key, "")) for h in holders for key in ("_target_", "_factory_") if h.get(key))
    for name in named:
        last = name.partition("(")[0].rpartition(".")[2]
        parts = _CLASS.fullmatch(last)
        told = f"{parts.group(1)}-{parts.group(2)}".strip("-") if parts else last
        told = re.sub(r"(?i)^(llama|qwen)(\d)(\d)", r"\1\2.\3", told)
        preset = None if told.lower().startswith("gpt") and "175" not in told else preset_like(told)
        if preset is not None:
            return preset
    return None


@dataclass(kw_only=True)
class _Reading:
    """Keys on their way into flags."""

    known: frozenset[str]
    told: Interpolation
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    maybe: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, object] = field(default_factory=dict)
    """Last part of a key -> its value, for what two keys say together."""

    def read(self, path: str, section: Mapping[str, object]) -> None:
        for key, value in section.items():
            where = f"{path}.{key}" if path else key
            if not key.startswith("_"):
                self._one(where, key, plain(self.told.value(where, value)))

    def _one(self, where: str, key: str, value: Any) -> None:
        if value is not None:
            self.seen["optim.name" if where.endswith("optim.name") else key] = value
        flag = RENAMED.get(key, key.replace("_", "-"))
        if value is None or key in _TOGETHER or (key == "name" and not where.endswith("optim.name")):
            return
        if is_open(value):
            self._left_open(where, key, flag, value)
        elif key in SPECIAL:
            said = SPECIAL[key](value)
            if isinstance(said, str):
                self._unpriced(where, f"{_shown(value)}: {said}")
            else:
                self._add(where, said)
        elif key in HARMLESS:
            if value not in HARMLESS[key]:
                self._unpriced(where, f"{_shown(value)}: what it does is not priced")
        elif (off := self._off(key)) is not None:
            self._add(where, {} if value else {off: ()})
        elif key in INDIFFERENT:
            return
        elif f"--{flag}" in self.known:
            words = words_of(value)
            self._add(where, {} if words is None else {flag: words})
        elif value is not False:
            self._unpriced(where, "nobody knows here what it does to a price")

    def _off(self, key: str) -> str | None:
        """The flag that switches off what is on by itself."""
        name = key.replace("_", "-")
        if f"--{name}" in self.known:
            return None
        return OFF.get(key) or next(
            (f"{no}-{name}" for no in ("no", "disable") if f"--{no}-{name}" in self.known), None
        )

    def _add(self, where: str, said: Mapping[str, tuple[str, ...]]) -> None:
        for flag, words in said.items():
            if _OPPOSITE.get(flag) not in self.options:
                self.options.setdefault(flag, words)
                self.keys.setdefault(flag, where)

    def _left_open(self, where: str, key: str, flag: str, value: str) -> None:
        """Flags that a value would decide, by the name that decides it."""
        if key in INDIFFERENT and key not in SPECIAL:
            return
        if f"--{flag}" in self.known and key not in SPECIAL:
            self._add(where, {flag: (value,)})
            return
        names = ", ".join(dict.fromkeys(OPEN_VALUE.findall(value)))
        self.findings.append(Finding(level="open", key=where, message=f"left open by {names}"))

    def _unpriced(self, where: str, why: str) -> None:
        self.findings.append(Finding(level="unpriced", key=where, message=why))

    def defaults(self, path: str, defaults: Mapping[str, object]) -> None:
        """What its program takes where a file says nothing."""
        for key, value in defaults.items():
            if key not in self.seen:
                before = len(self.findings)
                self._one(f"{path}.{key}", key, value)
                self.findings[before:] = [_by_default(finding) for finding in self.findings[before:]]

    def elsewhere(self, listed: object) -> None:
        """Other files that Hydra lays under this one."""
        for item in listed if isinstance(listed, list) else []:
            name = item if isinstance(item, str) else " ".join(map(str, item)) if item else ""
            if name and name != "_self_" and not name.startswith(("optional ", "override ")):
                message = f"values of another file, {_shown(name)}, which is not read"
                self.findings.append(Finding(level="open", key="defaults", message=message))

    def close(self, shape: ModelSpec | None) -> None:
        """What several keys say together, and a shape that stands under another name."""
        if shape is not None:
            self._under(shape)
        self._gated()
        self._apex()
        self._selective()
        self._idle()
        self.options.setdefault("max-position-embeddings", self.options.get("seq-length", ("0",)))
        # Neither NeMo nor Bridge has Megatron's trap of a missing interval.
        self.options.setdefault("eval-interval", ("1000",))

    def _under(self, shape: ModelSpec) -> None:
        training = TrainingSpec(global_batch=1, seq_len=2048, dropout=shape.constants.dropout)
        for flag, *words in model_flags(shape, training):
            if flag not in ("--seq-length", "--max-position-embeddings"):
                self.options.setdefault(flag.removeprefix("--"), tuple(words))
        self.options.setdefault("vocab-size", (str(shape.vocab),))

    def _idle(self) -> None:
        """What is said of parts that the run has not."""
        if self.options.get("position-embedding-type", ("",))[0] not in ("rope", "yarn", "mrope"):
            self.options.pop("no-rope-fusion", None)
        if "disable-bias-linear" not in self.options:
            self.options.pop("add-qkv-bias", None)
        if "num-virtual-stages-per-pipeline-rank" not in self.options:
            self.options.pop("no-overlap-p2p-communication", None)
        if "tp-comm-overlap" not in self.options:
            self.findings = [f for f in self.findings if ".tp_comm_" not in f.key]
            for flag in [flag for flag in self.options if "-tp-comm-" in flag]:
                self.options.pop(flag)
        if self.options.get("optimizer-offload-fraction") in (("0.0",), ("0",)):
            self.options.pop("optimizer-offload-fraction")

    def _selective(self) -> None:
        """NeMo keeps method and layers beside selective recomputation, where they say how many layers."""
        if self.options.get("recompute-granularity") != ("selective",):
            return
        method = self.options.pop("recompute-method", None)
        layers = self.options.pop("recompute-num-layers", ("0",))
        if method is not None and layers != ("0",):
            self._unpriced(self.keys["recompute-num-layers"], "selective recomputation of some layers")

    def _gated(self) -> None:
        gated, function = self.seen.get("gated_linear_unit"), self.seen.get("activation_func")
        if (gated is True and function in (None, "silu")) or function == "swiglu":
            self._add("model.gated_linear_unit", {"swiglu": ()})
        elif (gated and function not in (None, "silu")) or (
            gated is not True
            and "swiglu" not in self.options
            and function not in (None, "gelu", "openai_gelu")
        ):
            self._unpriced("model.activation_func", f"{_shown(function)}: not GELU, and no SwiGLU")

    def _apex(self) -> None:
        """NeMo 1's distributed_fused_adam keeps 16 bits of what bf16 weights lack."""
        if self.seen.get("optim.name") != "distributed_fused_adam":
            return
        self.findings = [f for f in self.findings if not f.key.endswith("optim.name")]
        narrow = {"use-precision-aware-optimizer": ()} if "bf16" in self.options else {}
        self._add("model.optim.name", {"use-distributed-optimizer": (), **narrow})
        self.findings.append(Finding(level="note", key="model.optim.name", message=_PRICED_AS))


_OPPOSITE = {
    "grad-reduce-in-bf16": "accumulate-allreduce-grads-in-fp32",
    "accumulate-allreduce-grads-in-fp32": "grad-reduce-in-bf16",
}
"""What is said first counts: the precision's own word stands above that of the reductions."""

_TOGETHER = frozenset({"gated_linear_unit", "activation_func"})
"""Read together at the end."""


def _by_default(finding: Finding) -> Finding:
    return Finding(level=finding.level, key=finding.key, message=f"not said, {finding.message}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
