"""Objects that keep their hashes: equal ones have the same, here and after another process had them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

from mist_megatron.spec.hashed import varied
from mist_megatron.spec.plan import Execution


def test_a_kept_hash_is_that_of_the_fields() -> None:
    one, other = Execution(context_parallel=2), Execution(context_parallel=2)
    assert hash(one) == hash(other) == hash(one) and len({one, other}) == 1
    assert hash(replace(one, context_parallel=4)) == hash(Execution(context_parallel=4)) != hash(one)
    assert copy.copy(one) == one and hash(copy.copy(one)) == hash(one)


def test_another_process_makes_its_own() -> None:
    """Strings have other hashes there."""
    made = Execution(context_exchange="a2a")
    hash(made)
    code = (
        "import pickle, sys; from mist_megatron.spec.plan import Execution; "
        "read = pickle.load(sys.stdin.buffer); "
        "new = Execution(context_exchange='a2a'); assert hash(read) == hash(new) and read in {new}"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(made), check=True)


def test_varied_objects_are_those_that_replace_makes() -> None:
    """With a hash of their own."""
    one = Execution(context_parallel=2)
    hash(one)
    other = varied(one, context_parallel=4)
    assert other == replace(one, context_parallel=4) != one and one.context_parallel == 2
    assert hash(other) == hash(Execution(context_parallel=4)) != hash(one)
