"""Requests: the beginning of a theory; errors for other texts say what can be asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.theory.test_task import make, prompt_of
from trl_grpo_tasks.tasks.theory.constraint import check_prompt
from trl_grpo_tasks.tasks.theory.task import EXAMPLE


def test_the_beginning_of_a_theory_is_a_request():
    prompt, rest = prompt_of("su5", 1)
    row = make().row_of(f" {prompt}\n")
    assert row == {"prompt": prompt, "level": "anomalies"}
    assert make().score(row, f" {rest}").success
    assert make().row_of(EXAMPLE)["prompt"] == EXAMPLE and prompt_of("su5", 0)[0].startswith(EXAMPLE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not the beginning of a theory; write one, such as 'BOS GAUGE_GROUPS"),
        ("SU(5) with three families", r"'SU\(5\) with three families' is not the beginning of a theory"),
    ],
)
def test_requests_that_are_not_understood(text, message):
    with pytest.raises(ValueError, match=message):
        make().row_of(text)


WORDS = [*EXAMPLE.split(), "num_2", "group_2", "U_1", "SU(5)", "é"]


@given(st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join) | st.text(max_size=30))
def test_any_text_is_a_prompt_or_a_clear_error(text):
    try:
        row = make().row_of(text)
    except ValueError as error:
        assert str(error)
    else:
        check_prompt(row["prompt"])
