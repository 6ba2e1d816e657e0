"""What delaying gradients of weights hides of tokens on their way, against the two streams of Megatron's
schedule played one piece after the other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mist_megatron.cost.expert_traffic import _beside_passes
from mist_megatron.cost.terms import NOTHING_AGAIN, LayerLoad

UNDISTURBED = np.ones((16, 4))
"""Slowdowns of each set of streams that run together."""


def played_s(first: tuple[float, float], forward_s: float, sent: tuple[float, float], *, late: bool) -> float:
    """TransformerLayerSchedulePlan.run: what goes back of one micro-batch, its weights' gradients, what goes
    forward of another, on one stream; on the other what the pass before sends, then what this one does."""
    back_s, weights_s = first
    sent_s = sent[0]
    leaves_s = max(back_s if late else back_s + weights_s, sent_s)
    forward_ends_s = max(back_s + weights_s, sent_s) + forward_s
    return max(forward_ends_s, leaves_s + sent[1])


def load_of(attention: tuple[float, float, float], experts: tuple[float, float, float], sent) -> LayerLoad:
    each = [np.array(value) for value in (*attention, *experts, *sent)]
    back_s, weights_s, forward_s, inside_back_s, inside_weights_s, inside_forward_s, there_s, home_s = each
    return LayerLoad(
        forward_s=forward_s + inside_forward_s,
        backward_s=back_s + weights_s + inside_back_s + inside_weights_s,
        forward_collective_s=2 * there_s,
        backward_collective_s=2 * home_s,
        parameters=np.zeros(()),
        weight_grad_s=weights_s + inside_weights_s,
        inside_weight_grad_s=inside_weights_s,
        forward_exchange_s=2 * there_s,
        backward_exchange_s=2 * home_s,
        forward_inside_s=inside_forward_s,
        backward_inside_s=inside_back_s + inside_weights_s,
    )


CASES = list(product((1.0, 3.0), (0.5, 2.0), (1.0, 2.5), (0.2, 1.5, 2.2, 4.0), (0.3, 2.0, 6.0)))


@pytest.mark.parametrize("late", [False, True])
def test_as_the_streams_play_it(late: bool) -> None:
    for back_s, weights_s, forward_s, there_s, home_s in CASES:
        attention = back_s, weights_s, forward_s
        experts = 2.0 * back_s, 1.5 * weights_s, 0.7 * forward_s
        load = load_of(attention, experts, (there_s, home_s))
        late_s = (np.array(weights_s), np.array(1.5 * weights_s)) if late else (np.zeros(()),) * 2
        hidden_s = float(_beside_passes(load, NOTHING_AGAIN, UNDISTURBED, late_s))
        total_s = sum((*attention, *experts)) + 2 * (there_s + home_s)
        both_s = sum(
            played_s(part[:2], part[2], (there_s, home_s), late=late) for part in (attention, experts)
        )
        assert hidden_s == pytest.approx(total_s - both_s, rel=1e-12)


def test_delays_hide_no_less_and_sometimes_more() -> None:
    gains = []
    for back_s, weights_s, forward_s, there_s, home_s in CASES:
        times = [
            played_s((back_s, weights_s), forward_s, (there_s, home_s), late=late) for late in (False, True)
        ]
        assert times[1] <= times[0]
        gains.append(times[0] - times[1])
    assert 0 < sum(gain > 0.0 for gain in gains) < len(gains)
