"""Essential lines of the DeepSpeed patches, by name, and what stands in for each: a test must fail then."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any


def fetch_nothing(held: Any) -> None:
    """Memory, but not what was in it."""
    if not held.on_device:
        held.overwrite()
        for flat in held.flats:
            flat.zero_()


def release_without_copy(held: Any) -> None:
    if held.on_device:
        held.free()


@contextlib.contextmanager
def mutated(name: str | None) -> Any:
    """With one essential line of a patch neutralised."""
    from unittest import mock

    from mist_patches.core import activation_offload as offload
    from mist_patches.core import host_copies
    from mist_patches.deepspeed import (
        activations,
        group_steps,
        groups,
        optimizer_fraction,
        overflow,
        pipeline_stages,
    )
    from mist_patches.deepspeed import decoupled_step as decoupled
    from mist_patches.deepspeed import gradient_fraction as gradients
    from mist_patches.deepspeed import weight_fraction as weights

    own_state = property(lambda s: s.__dict__.setdefault("own", defaultdict(dict)), lambda s, value: None)
    places: dict[str, Any] = {
        "use_before_arrival": (host_copies.Held, "use", lambda held: held.fetch()),
        "activation_before_arrival": (offload._Copy, "_arrive", lambda copy, stream: None),
        "stale_rates": (optimizer_fraction, "HYPER_PARAMETERS", ("betas", "eps", "weight_decay")),
        "state_of_its_own": (optimizer_fraction.DeviceAdam, "state", own_state),
        "no_host_weights": (weights, "hosted", lambda *_: frozenset()),
        "no_host_gradients": (gradients, "hosted", lambda *_: frozenset()),
        "no_cut": (groups, "host_starts", lambda sizes, fraction: [0] * len(sizes)),
        "not_linked": (groups, "expect_new_state", lambda *_: None),
        "rates_of_today": (group_steps, "RATES", ()),
        "no_flush": (decoupled, "_flushed", lambda original: original),
        "no_flush_before_saving": (decoupled, "_flush_before", lambda *_: lambda module, *more: None),
        "no_flush_at_the_end": (decoupled, "_flush_own", lambda original: original),
        "no_step_before_gather": (decoupled, "_before_gather", lambda original: original),
        "no_step_before_forward": (decoupled, "_step_before", lambda *_: lambda module, inputs: None),
        "no_copy_in": (host_copies.Held, "fetch", fetch_nothing),
        "no_copy_out": (host_copies.Held, "release", release_without_copy),
        "not_given_back": (host_copies.Held, "free", lambda self: None),
        "not_recomputed": (activations, "_recomputing", lambda forward: forward),
        "no_fraction_of_activations": (activations, "check_fraction", lambda what, fraction: 0.0),
        "not_forgotten": (overflow, "put", lambda *_: lambda: None),
        "even_stages": (pipeline_stages, "stage_parts", lambda kinds, layers: [0, 3, len(kinds)]),
        "no_recomputed_stage": (pipeline_stages, "_recompute", lambda module, wanted: wanted),
        "json_of_the_script": (pipeline_stages, "stage_configuration", lambda base, stage: dict(base)),
    }
    if name is None:
        yield
        return
    owner, attribute, value = places[name]
    with mock.patch.object(owner, attribute, value, create=True):
        yield
