"""Which linear solvers PuLP can start here, for `doctor`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pulp


def usable_solvers() -> Mapping[str, bool]:
    """Solver -> whether it answers. The exact search needs none of them; `--solver milp` needs one."""
    with warnings.catch_warnings():
        # PuLP 3 announces the interface of PuLP 4, which needs Python 3.12; we pin 3.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "highs": bool(pulp.HiGHS(msg=False).available()),
            "cbc": bool(pulp.PULP_CBC_CMD(msg=False).available() or pulp.COIN_CMD(msg=False).available()),
        }
