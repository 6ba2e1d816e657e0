"""mist-megatron: configuration auto-tuner and patch layer for Megatron-LM and DeepSpeed.

    import mist_megatron as mm

    tuned = mm.tune(model="gpt3-7b", gpus=32)

What is listed here is the Python API (docs/api.md); each name is imported when it is first used. Arguments
have the names of the command line's options; typed values may stand for their names, and a plan may be a
`Plan`, the path of a plan.yaml, the mapping that such a file holds, or any result that has a `plan`. Results
are frozen, print in one screen, and give with `to_dict()` the document that `--json` prints. What goes wrong
is raised as a `MistError`, with the words of the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mist_megatron.ask.compare import Compared as Compared
    from mist_megatron.ask.compare import compare as compare
    from mist_megatron.ask.convert import Converted as Converted
    from mist_megatron.ask.convert import convert as convert
    from mist_megatron.ask.emit import Emitted as Emitted
    from mist_megatron.ask.emit import emit as emit
    from mist_megatron.ask.explain import Explained as Explained
    from mist_megatron.ask.explain import explain as explain
    from mist_megatron.ask.job_words import job as job
    from mist_megatron.ask.lint import Linted as Linted
    from mist_megatron.ask.lint import lint as lint
    from mist_megatron.ask.place import PlacedPlan as PlacedPlan
    from mist_megatron.ask.place import place as place
    from mist_megatron.ask.plans import load_plan as load_plan
    from mist_megatron.ask.predict import Predicted as Predicted
    from mist_megatron.ask.predict import predict as predict
    from mist_megatron.ask.recipes import recipe as recipe
    from mist_megatron.ask.replay import Replayed as Replayed
    from mist_megatron.ask.replay import replay as replay
    from mist_megatron.ask.report import Reported as Reported
    from mist_megatron.ask.report import report as report
    from mist_megatron.ask.simulate import Simulated as Simulated
    from mist_megatron.ask.simulate import simulate as simulate
    from mist_megatron.ask.strategies import Strategies as Strategies
    from mist_megatron.ask.strategies import strategies as strategies
    from mist_megatron.ask.sweep import Swept as Swept
    from mist_megatron.ask.sweep import sweep as sweep
    from mist_megatron.ask.tune import Tuned as Tuned
    from mist_megatron.ask.tune_words import tune as tune
    from mist_megatron.ask.validate import Validated as Validated
    from mist_megatron.ask.validate import validate as validate
    from mist_megatron.errors import EmitError as EmitError
    from mist_megatron.errors import InputError as InputError
    from mist_megatron.errors import MistError as MistError
    from mist_megatron.errors import NoFeasiblePlan as NoFeasiblePlan
    from mist_megatron.errors import ProfileError as ProfileError
    from mist_megatron.search.search import Watch as Watch
    from mist_megatron.search.space import Space as Space
    from mist_megatron.spec.cluster import ClusterSpec as ClusterSpec
    from mist_megatron.spec.cluster import GpuSpec as GpuSpec
    from mist_megatron.spec.job import Job as Job
    from mist_megatron.spec.kinds import Offload as Offload
    from mist_megatron.spec.model import ModelSpec as ModelSpec
    from mist_megatron.spec.plan import Execution as Execution
    from mist_megatron.spec.plan import Plan as Plan
    from mist_megatron.spec.plan import StagePlan as StagePlan
    from mist_megatron.spec.training import TrainingSpec as TrainingSpec

_HOME = {
    "ask.tune_words": "tune",
    "ask.compare": "compare Compared",
    "ask.sweep": "sweep Swept",
    "ask.strategies": "strategies Strategies",
    "ask.predict": "predict Predicted",
    "ask.simulate": "simulate Simulated",
    "ask.replay": "replay Replayed",
    "ask.explain": "explain Explained",
    "ask.report": "report Reported",
    "ask.lint": "lint Linted",
    "ask.convert": "convert Converted",
    "ask.emit": "emit Emitted",
    "ask.validate": "validate Validated",
    "ask.job_words": "job",
    "ask.place": "place PlacedPlan",
    "ask.plans": "load_plan",
    "ask.recipes": "recipe",
    "ask.tune": "Tuned",
    "spec.job": "Job",
    "spec.model": "ModelSpec",
    "spec.training": "TrainingSpec",
    "spec.cluster": "ClusterSpec GpuSpec",
    "spec.plan": "Plan StagePlan Execution",
    "spec.kinds": "Offload",
    "search.space": "Space",
    "search.search": "Watch",
    "errors": "MistError InputError NoFeasiblePlan ProfileError EmitError",
}
_MODULE = {name: f"{__name__}.{module}" for module, names in _HOME.items() for name in names.split()}
__all__ = tuple(_MODULE)


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})
