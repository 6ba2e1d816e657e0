"""The table of commands, and how to add one.

A command is one function in one file of this folder and one line in `COMMANDS`; a command is in the table
only when it works. Its module is imported when it is run, so `--help` and `--version` import none of them.

    # mist_megatron/cli/predict.py
    def predict(
        plan: Annotated[Path, typer.Argument(help="plan.yaml to price.")],
        *,
        breakdown: Annotated[bool, typer.Option(help="Show every memory term.")] = False,
        output: OutputOptions,
    ) -> None:
        '''Time and memory of a given plan.'''                     # becomes `predict --help`
        result = price(read_plan(plan))                            # InputError and friends just pass
        output.finish(result_document(result))                     # with --json: the one document on stdout
        output.people.print(result_table(result))                  # for people: stderr when --json is given

`target` may also name a mapping, subcommand name -> function, for `calibrate fit` and its like; a subcommand
`list` runs when none is named.

A parameter whose type is a dataclass deriving from `OptionGroup` stands for all its fields: `OutputOptions`
gives `--json`, `JobOptions` (options.py) the job options. Heavy imports (numpy, the solver) go inside
the function where they would slow down `predict --help`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandEntry:
    """One line of `mist-megatron --help`: what it is called, where it lives, what it does."""

    name: str
    target: str
    """`module:function` below mist_megatron.cli."""
    summary: str
    panel: str
    """Heading of `--help` under which it is listed."""


SEARCH = "Finding a plan"
LISTS = "What is known"
COSTS = "What a plan costs"
FILES = "Files for the frameworks"

COMMANDS: tuple[CommandEntry, ...] = (
    CommandEntry("tune", "tune:tune", "Finds the fastest plan that fits, and proves it.", SEARCH),
    CommandEntry("compare", "compare:compare", "The same job under each space, or framework.", SEARCH),
    CommandEntry("sweep", "sweep:sweep", "One model over many clusters: cost and scaling.", SEARCH),
    CommandEntry("predict", "predict:predict", "Time and memory of a given plan, term by term.", COSTS),
    CommandEntry("place", "place:place", "Which node goes where, by measured links between nodes.", SEARCH),
    CommandEntry("simulate", "simulate:simulate", "One iteration of a plan, played event by event.", COSTS),
    CommandEntry("replay", "replay:replay", "Recorded steps: where time goes, and what if.", COSTS),
    CommandEntry("report", "report:report", "Plans as a page: cluster, memory, time, timeline.", COSTS),
    CommandEntry("explain", "explain:explain", "The expressions behind a prediction, in symbols.", COSTS),
    CommandEntry("validate", "validate:validate", "Predictions against measured runs in CSV files.", COSTS),
    CommandEntry("calibrate", "calibrate:CALIBRATE", "Makes, shows and lists hardware profiles.", COSTS),
    CommandEntry("emit", "emit:emit", "Writes files that Megatron-core or DeepSpeed run as they are.", FILES),
    CommandEntry("convert", "convert:convert", "A tuned replacement for a DeepSpeed JSON.", FILES),
    CommandEntry("lint", "lint:lint", "What a Megatron command line or a DeepSpeed JSON would do.", FILES),
    CommandEntry("models", "lists:models", "Model presets with their shapes and parameter counts.", LISTS),
    CommandEntry("gpus", "lists:gpus", "The GPU catalogue, with the source of each figure.", LISTS),
    CommandEntry("spaces", "lists:spaces", "Named search spaces, with what each of them varies.", LISTS),
    CommandEntry("reference", "reference:reference", "Every key of plan.yaml, and what targets run.", LISTS),
    CommandEntry("doctor", "doctor:doctor", "What is missing here, and for which feature.", LISTS),
    CommandEntry("recipes", "recipes:RECIPES", "Tuned plans that come with this package.", LISTS),
)
