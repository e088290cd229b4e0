"""Parametrised tests of which `make test` runs a few cases and `make test-all` the others."""

import pytest


def exhaustive_but(kept, cases):
    """Return the cases as parameters; all but those in `kept` are marked exhaustive. A tuple is several arguments."""
    assert kept and all(case in cases for case in kept)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else MARK)
        for case in cases
    ]


MARK = pytest.mark.exhaustive
