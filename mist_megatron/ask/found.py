"""What a search answered, as the command line tells and writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.search.search import SearchResult
    from mist_megatron.spec.plan import Plan


class Found:
    """Plans with prediction and provenance, best first."""

    def __init__(
        self, evaluator: StageEvaluator, result: SearchResult, about: dict[str, Any], seconds: float
    ) -> None:
        from mist_megatron.cost.predict import predict
        from mist_megatron.search.search import plan_of

        self.evaluator = evaluator
        self.result = result
        self.seconds = seconds
        self.about = about
        bare = [plan_of(evaluator, solution) for solution in result.solutions]
        self.predictions = [predict(plan, evaluator) for plan in bare]
        self.plans = [self._told(plan, k) for k, plan in enumerate(bare)]

    def _told(self, plan: Plan, index: int) -> Plan:
        from mist_megatron.cost.predict import prediction_document

        provenance = {**self.about, "rank": index + 1, **self.search_document()}
        return replace(plan, prediction=prediction_document(self.predictions[index]), provenance=provenance)

    @property
    def interrupted(self) -> bool:
        return self.result.status.value == "interrupted"

    def search_document(self) -> dict[str, Any]:
        result = self.result
        return {
            "status": result.status.value,
            "gap": result.gap if result.status.value != "optimal" else 0.0,
            # Eq. 1 of the plan that is best by it: what bound_s bounds. The plan told is the fastest by
            # predict, which is at or a little below eq. 1, so that another may be best by eq. 1.
            "objective_s": result.objective_s,
            "plan_objective_s": result.solutions[0].value_s,
            "bound_s": result.bound_s,
            "configs": result.tally.priced,
            "over_memory": result.tally.over_memory,
            "shapes": result.shapes,
            "milp_solved": result.shapes_solved,
            "seconds": self.seconds,
        }

    def document(self) -> dict[str, Any]:
        from mist_megatron.formats.plan_yaml import plan_to_mapping

        others = [plan_to_mapping(plan) for plan in self.plans[1:]]
        return {**plan_to_mapping(self.plans[0]), "search": self.search_document(), "others": others}
