"""What one would do after a search: three things at most, each a line that can be typed or done; and why
there is no plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mist_megatron.calibrate.error_bars import UNMEASURED
from mist_megatron.errors import EmitError, InputError, MistError, NoFeasiblePlan

if TYPE_CHECKING:
    from mist_megatron.ask.tune import Tuned

MOSTLY = 0.5
"""Share of layer time from which prices rest more on curves than on measurements."""


def next_steps(tuned: Tuned) -> tuple[str, ...]:
    """Start it, see whether it is sure, and look closer."""
    return _start(tuned), _surer(tuned), _closer(tuned)


def _start(tuned: Tuned) -> str:
    if tuned.out is None:
        return "the same command with --out DIR writes the plan and its files"
    if "train.sh" in tuned.files:
        return f"fill in {tuned.out}/env.sh, then {tuned.out}/train.sh, or sbatch {tuned.out}/slurm.sbatch"
    return f"mist-megatron predict {tuned.out}/plan.yaml"


def _surer(tuned: Tuned) -> str:
    """What would tell more than the prices do."""
    gpu = tuned.plan.cluster.gpu.name
    if tuned.error_bar.like == UNMEASURED:
        return (
            f"nobody measured {gpu} here, its datasheet stands in: on one of its nodes, mist-megatron "
            "calibrate run --out m.jsonl"
        )
    if tuned.prediction.measured_share["extrapolated"] > MOSTLY:
        return (
            f"most prices of {gpu} are curves, not measured shapes: on one of its nodes, mist-megatron "
            "calibrate run --out m.jsonl"
        )
    plan = "plan.yaml" if tuned.out is None else f"{tuned.out}/plan.yaml"
    return f"run 20 steps and hold them against it: mist-megatron replay TRACE --against {plan}"


def _closer(tuned: Tuned) -> str:
    """Ties first: between them the events may choose."""
    if tuned.verification is None and len(tuned.predictions) > 1:
        best_s, other_s = (cost.iteration_s for cost in tuned.predictions[:2])
        if tuned.error_bar.ties(best_s, other_s):
            return "the best plans are a tie: --verify simulate plays them event by event"
    if tuned.out is None:
        return "--report report.html shows it all on one page"
    return f"mist-megatron report {tuned.out}/plan.yaml shows it all on one page"


Why = Literal["", "cannot run", "nothing fits"]
"""Empty where there is a plan."""


def why_not(error: MistError) -> Why:
    """Anything else that fails is no answer about a plan: it is raised on."""
    if isinstance(error, NoFeasiblePlan):
        return "nothing fits"
    if isinstance(error, InputError | EmitError):
        return "cannot run"
    raise error
