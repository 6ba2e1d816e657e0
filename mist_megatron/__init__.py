"""mist-megatron: configuration auto-tuner and patch layer for Megatron-LM and DeepSpeed.

    import mist_megatron as mm

    tuned = mm.tune(model="gpt3-7b", gpus=32)

What is listed here is the Python API (docs/api.md); each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mist_megatron.ask.api import compare as compare
    from mist_megatron.ask.api import convert as convert
    from mist_megatron.ask.api import emit as emit
    from mist_megatron.ask.api import job as job
    from mist_megatron.ask.api import lint as lint
    from mist_megatron.ask.api import load_plan as load_plan
    from mist_megatron.ask.api import predict as predict
    from mist_megatron.ask.api import recipe as recipe
    from mist_megatron.ask.api import simulate as simulate
    from mist_megatron.ask.api import tune as tune
    from mist_megatron.ask.compare import Compared as Compared
    from mist_megatron.ask.convert import Converted as Converted
    from mist_megatron.ask.emit import Emitted as Emitted
    from mist_megatron.ask.lint import Linted as Linted
    from mist_megatron.ask.predict import Predicted as Predicted
    from mist_megatron.ask.simulate import Simulated as Simulated
    from mist_megatron.ask.tune import Tuned as Tuned
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
    "ask.api": "tune compare predict simulate lint convert emit job load_plan recipe",
    "ask.tune": "Tuned",
    "ask.compare": "Compared",
    "ask.predict": "Predicted",
    "ask.simulate": "Simulated",
    "ask.lint": "Linted",
    "ask.convert": "Converted",
    "ask.emit": "Emitted",
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
