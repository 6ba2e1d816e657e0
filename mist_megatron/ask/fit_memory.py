"""Learns from measured runs what a program's memory is beyond what is computed, and keeps it in a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.fit_memory import Learned, MemorySample, fit_memory
from mist_megatron.calibrate.profiles import profile_named, shipped_profiles, write_profile
from mist_megatron.calibrate.rows import TARGET_OF_FRAMEWORK, read_rows
from mist_megatron.calibrate.validate import Outcome, outcomes_of
from mist_megatron.cost.learned import features_of
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.errors import InputError
from mist_megatron.formats.files import read_text
from mist_megatron.spec.profile import Profile, Source

KEY = "learned-memory"

Program = tuple[str, str]
"""Framework and version."""


@dataclass(frozen=True, kw_only=True)
class FittedMemory:
    """A profile with what was learned, and by program how well that is known."""

    profile: Profile
    learned: tuple[Learned, ...]
    samples: tuple[tuple[MemorySample, ...], ...]
    skipped: int
    """Rows with measured memory whose layout cannot be expressed."""
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `calibrate fit-memory --json` prints."""
        return {
            "profile": self.profile.name,
            "files": [str(path) for path in self.files],
            "skipped": self.skipped,
            "learned": [
                {
                    **asdict(one.memory),
                    "groups": [asdict(group) for group in one.groups],
                    "rows": [
                        {"id": sample.row_id, "group": sample.group, "measured_bytes": sample.measured_bytes,
                         "computed_bytes": sample.computed_bytes, "learned_bytes": added}
                        for sample, added in zip(samples, one.learned_bytes, strict=True)
                    ],
                }
                for one, samples in zip(self.learned, self.samples, strict=True)
            ],
        }  # fmt: skip


def fit_memory_of(
    runs: Sequence[Path], out: Path, *, base: str | None = None, framework: str | None = None,
    force: bool = False,
) -> FittedMemory:  # fmt: skip
    """Reads tables of measured runs in the layout of `validate`; `framework` (NAME or NAME==VERSION) picks
    the program where several of one target were run. Writes the profile `base`, else the shipped one of
    the GPU of these runs, with what was learned."""
    rows = [row for path in runs for row in read_rows(read_text(path), str(path))]
    measured = [row for row in rows if row.measured_peak_bytes is not None or row.stage_peak_bytes]
    outcomes = outcomes_of(measured, "", predictor())
    told = [outcome for outcome in outcomes if outcome.memory_pairs()]
    if not told:
        reasons = sorted({outcome.skipped for outcome in outcomes if outcome.skipped})
        raise InputError(
            f"{', '.join(map(str, runs))}: no row has measured memory and a layout that can be expressed",
            details=tuple(reasons[:3]),
        )
    programs = _programs(told, framework)
    filled = profile_named(base) if base is not None else _shipped_of(told)
    learned, samples = [], []
    for (name, version), members in programs.items():
        own = tuple(sample for outcome in members for sample in _samples(outcome))
        target = TARGET_OF_FRAMEWORK[name]
        learned.append(fit_memory(own, target=target, framework=name, version=version, source=KEY))
        samples.append(own)
    profile = with_learned_memory(filled, learned, runs, name=out.stem)
    paths = write_profile(profile, out, force=force)
    return FittedMemory(
        profile=profile,
        learned=tuple(learned),
        samples=tuple(samples),
        skipped=len(outcomes) - len(told),
        files=tuple(paths),
    )


def _programs(told: Sequence[Outcome], framework: str | None) -> dict[Program, list[Outcome]]:
    """Rows by program; one program for each target."""
    programs: dict[Program, list[Outcome]] = {}
    for outcome in told:
        programs.setdefault((outcome.row.framework, outcome.row.framework_version), []).append(outcome)
    words = [f"{name}=={version}" if version else name for name, version in programs]
    if framework is not None:
        name, _, version = framework.partition("==")
        picked = {
            program: members
            for program, members in programs.items()
            if program[0] == name and (not version or program[1] == version)
        }
        if not picked:
            raise InputError(f"--framework is {framework!r}; the rows are of {', '.join(words)}")
        programs = picked
    for one in programs:
        alike = [other for other in programs if TARGET_OF_FRAMEWORK[other[0]] == TARGET_OF_FRAMEWORK[one[0]]]
        if len(alike) > 1:
            raise InputError(
                f"the rows are of {' and '.join(words)}, which are fitted apart",
                details=(f"try: --framework {words[0]}",),
            )
    return programs


def _shipped_of(told: Sequence[Outcome]) -> Profile:
    gpus = sorted({_plan_gpu(outcome.row) for outcome in told})
    if len(gpus) > 1 or gpus[0] not in shipped_profiles():
        raise InputError(
            f"the rows are of {', '.join(gpus)}; which profile shall keep what they tell is not said",
            details=(f"try: --profile {next((gpu for gpu in gpus if gpu in shipped_profiles()), 'FILE')}",),
        )
    return profile_named(gpus[0])


def _plan_gpu(row: MeasuredRow) -> str:
    assert row.plan is not None
    return row.plan.cluster.gpu.name


def _samples(outcome: Outcome) -> list[MemorySample]:
    plan = outcome.row.plan
    assert plan is not None
    job, group = job_of(plan), outcome.row.group or f"{plan.model.name} on {plan.cluster.gpu.name}"
    return [
        MemorySample(
            row_id=outcome.row.row_id,
            group=group,
            measured_bytes=measured,
            computed_bytes=computed,
            features={name: size.item() for name, size in features_of(job, grid_of(plan, stage)).items()},
        )
        for stage, computed, measured in outcome.memory_pairs()
    ]


def with_learned_memory(
    base: Profile, learned: Sequence[Learned], runs: Sequence[Path], *, name: str
) -> Profile:
    """The profile with these, each in the place of what it had of the same target."""
    targets = {one.memory.target for one in learned}
    kept = tuple(one for one in base.learned_memory or () if one.target not in targets)
    text = f"measured runs in {', '.join(path.name for path in runs)}"
    source = Source(origin="fitted", text=text)
    return replace(
        base,
        name=name,
        learned_memory=(*kept, *(one.memory for one in learned)),
        sources={**base.sources, KEY: source},
        note=base.note or f"of {base.name} {base.content_hash}, with learned memory",
    )
