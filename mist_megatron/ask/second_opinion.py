"""What the events say of the plans of a search, where that is not what `predict` says.

A search needs a closed form, which lacks some waits; the events have them. So the fastest plan and its rivals
are played before they are told. Their order stays that of `predict`, which is what is proved: `--verify
simulate` ranks by the events.
"""

from __future__ import annotations

from collections.abc import Sequence

APART = 0.03
"""From here on both are told: the law that `reliability/laws.py` holds plans to."""


def opinion_words(predicted_s: Sequence[float], played_s: Sequence[float | None]) -> tuple[str, ...]:
    """Of the plans of a search, the fastest first: what of the events has to be said; None was not played."""
    told = played_s[0]
    if told is None:
        return ("not played event by event, which takes long for a pipeline of this size: simulate does",)
    words = []
    if abs(predicted_s[0] / told - 1.0) > APART:
        words.append(
            f"played event by event a step of it takes {told:.4g} s, and by predict's formula "
            f"{predicted_s[0]:.4g} s ({predicted_s[0] / told - 1.0:+.1%}): simulate shows where"
        )
    others = [(seconds, rank) for rank, seconds in enumerate(played_s) if seconds is not None]
    least_s, rank = min(others)
    if least_s < told * (1.0 - SAME):
        words.append(
            f"played event by event plan {rank + 1} is faster: {least_s:.4g} s against {told:.4g} s; "
            "--verify simulate ranks plans so"
        )
    return tuple(words)


SAME = 1e-3
"""Plans that are closer are equally fast."""
