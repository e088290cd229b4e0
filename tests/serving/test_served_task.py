"""What a server samples under: its record, the comparison with a run, and the check of requests."""

import json
from dataclasses import asdict, make_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.tokenizer_makes import MAKES, every_make
from tests.support.toy import LETTERS, ToyTask
from trl_grpo_tasks.constraints import Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.base import unpack
from trl_grpo_tasks.constraints.budget import within
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.registry import TASKS, find_task_class, get_task
from trl_grpo_tasks.serving import served_task
from trl_grpo_tasks.serving.served_task import (
    CONFIG_KEY,
    SERVED_VARIABLE,
    ServedTask,
    check_row,
    fingerprint_of,
    served_here,
)

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
OPTIONS = st.dictionaries(st.sampled_from("abc"), VALUES | st.lists(VALUES, max_size=2))
NAMES = st.sampled_from(["brick", "theory", "a.b"]) | st.text().filter(lambda text: not text.endswith(".py"))
SERVED = st.builds(ServedTask, NAMES, OPTIONS, st.text(), st.sampled_from("fg"))
TOKENIZER = make_tokenizer(list("abcd12x"), context=64)


def over_http(served):
    """The record after its way through the command line of vLLM and back from the server."""
    return ServedTask.from_config(json.loads(json.dumps({"other": 1, CONFIG_KEY: served.to_config()})))


# ---- the record


@settings(max_examples=30)
@given(SERVED)
def test_a_record_survives_the_way_to_the_server_and_back(served):
    assert over_http(served) == served and served.difference(over_http(served)) is None


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_built_in_task_is_made_again_from_its_record(name):
    task = get_task(name)
    served = over_http(ServedTask.of(task, TOKENIZER))
    assert served.task == name
    again = get_task(served.task, served.options)
    assert json.dumps(asdict(again.options)) == json.dumps(asdict(task.options))


def test_a_task_made_without_a_name_has_the_name_of_the_registry_or_its_module():
    assert ServedTask.of(find_task_class("brick")(), TOKENIZER).task == "brick"

    class Unnamed(ToyTask):
        spec = None

    assert ServedTask.of(Unnamed(), TOKENIZER).task == __name__


def test_secrets_are_not_published_and_options_must_be_json():
    def served(**options):
        task = ToyTask()
        task.options = make_dataclass("Options", list(options))(**options)
        return ServedTask.of(task, TOKENIZER)

    assert served(api_key="hf_0123456789", width=(1, 2)).options == {"width": [1, 2]}
    for value in (object(), float("nan"), {1, 2}):
        with pytest.raises(ValueError, match="options of task 'toy' cannot be written as JSON"):
            served(value=value)


WHOLE = {"task": "toy", "options": {}, "tokenizer": "there", "fingerprint": "f"}


@pytest.mark.parametrize(
    "entry",
    [None, "brick", [], {}, {"key": 1}, WHOLE | {"more": 1}, WHOLE | {"options": []}, WHOLE | {"task": None}]
    + [{name: value for name, value in WHOLE.items() if name != left_out} for left_out in WHOLE],
)
def test_a_malformed_entry_is_refused(entry):
    assert not any(map(ServedTask.from_config, (None, {}, {"other": {}}, "text", ["list"])))
    with pytest.raises(ValueError, match=r"must hold task, options, tokenizer, fingerprint .* start the server with"):
        ServedTask.from_config({CONFIG_KEY: entry})


# ---- differences


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "theory"}, "the server samples for task 'brick', and this run trains task 'theory'"),
        ({"task": "a/brick.py"}, "the server samples for task 'brick', and this run trains task 'a/brick.py'"),
        ({"options": {"n": 5, "w": None}}, "option --n of the task is 4 on the server and 5 in this run"),
        ({"options": {"n": 4, "w": "a"}}, 'option --w of the task is not set on the server and "a" in this run'),
        ({"options": {"w": None}}, "option --n of the task is 4 on the server and missing in this run"),
        ({"options": {"new": 1, "n": 4, "w": None}}, "option --new of the task is missing on the server and 1"),
        ({"fingerprint": "g", "tokenizer": "here"}, "the server's tokenizer, there, has another vocabulary, other"),
    ],
)
def test_the_first_difference_is_named_in_one_line(changed, message):
    served = ServedTask("brick", {"n": 4, "w": None}, "there", "f")
    in_a_folder = replace(served, task="/server/my_task.py")
    assert in_a_folder.difference(replace(served, task="my_task.py")) is None
    found = served.difference(replace(served, **changed))
    assert found.startswith(message) and "\n" not in found


@given(SERVED, SERVED)
def test_records_agree_if_task_options_and_fingerprint_are_equal(one, other):
    are_equal = (one.task, one.options, one.fingerprint) == (other.task, other.options, other.fingerprint)
    assert (one.difference(other) is None) == are_equal
    assert replace(one, tokenizer=other.tokenizer).difference(one) is None  # a folder may have another path there


# ---- the fingerprint of a tokenizer


@every_make
def test_a_fingerprint_does_not_depend_on_the_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "one")
    again = AutoTokenizer.from_pretrained(tmp_path / "one", padding_side="left")
    again.save_pretrained(tmp_path / "two")
    third = AutoTokenizer.from_pretrained(tmp_path / "two")
    third(["a b", "12"], padding="longest" if third.pad_token else False, truncation=True, max_length=3)
    assert fingerprint_of(tokenizer) == fingerprint_of(again) == fingerprint_of(third)


def test_a_fingerprint_depends_on_tokens_their_order_the_end_and_special_tokens():
    def made(letters="abcd", change=lambda tokenizer: None):
        tokenizer = make_tokenizer(list(letters), context=64)
        change(tokenizer)
        return fingerprint_of(tokenizer)

    def other_end(tokenizer):
        tokenizer.eos_token = "a"

    def more_special(tokenizer):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})

    def now_special(tokenizer):
        tokenizer.add_special_tokens({"additional_special_tokens": ["b"]})

    made_so = [made(), made("abdc"), made("abcde"), made(change=other_end), made(change=more_special)]
    assert len({*made_so, made(change=now_special), *map(fingerprint_of, MAKES.values())}) == 6 + len(MAKES)
    assert made() == made_so[0]


def test_a_fingerprint_depends_on_how_text_is_split():
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    one, other = (make_tokenizer(["a", "b", "ab"], context=64) for _ in range(2))
    other.backend_tokenizer.pre_tokenizer = Split(Regex("."), "isolated")  # never into "ab"
    assert one.get_vocab() == other.get_vocab() and one.tokenize("ab") != other.tokenize("ab")
    assert fingerprint_of(one) != fingerprint_of(other)


# ---- the constraint


def test_unknown_options_and_a_changed_tokenizer_are_refused(tiny_path):
    served = ServedTask.of(ToyTask(), load_tokenizer(tiny_path))
    with pytest.raises(ValueError, match=r"'tests.support.toy' cannot be created with these options: .*width"):
        replace(served, options={"width": 1}).build()
    with pytest.raises(ValueError, match="has changed since the server was started; restart it"):
        replace(served, fingerprint="f").build()


# ---- the check of requests


class Picky:
    """A constraint that starts only on rows with a letter, and whose letter e has no text."""

    def start(self, row):
        if row["letter"] == "free":
            return None
        return SimpleNamespace(mask=lambda: 1 / (row["letter"] != "e"))


def asked(row):
    return SimpleNamespace(extra_args=None if row is None else {"row": row, "other": 1}, max_tokens=8)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(served_task, "served_here", lambda: (ToyTask(), Picky()))


def test_rows_of_the_task_and_requests_without_a_row_are_accepted(server):
    for row in ('{"prompt": "a", "letter": "a"}', '{"prompt": "a", "letter": "free"}', None):
        check_row(asked(row))
    check_row(SimpleNamespace(extra_args={}))


def test_requests_that_are_too_short_for_an_answer_are_refused(monkeypatch):
    tokenizer = make_tokenizer([*"abcd"], 64)
    letters = GrammarConstraint(tokenizer, Grammar.regex("[ab]{3,}"))
    monkeypatch.setattr(served_task, "served_here", lambda: (ToyTask(), within(letters, None)))
    row = '{"prompt": "a", "letter": "a"}'
    check_row(SimpleNamespace(extra_args={"row": row}, max_tokens=4))
    check_row(SimpleNamespace(extra_args={"row": row}, max_tokens=None))  # vLLM takes what is left of the context
    with pytest.raises(ValueError, match="max_completion_length=3 is too short: the shortest answer takes 4 tokens"):
        check_row(SimpleNamespace(extra_args={"row": row}, max_tokens=3))


NOT_JSON = ["", "{", "[" * 100_000, 5, ["{}"], {"letter": "a"}, True]


@pytest.mark.parametrize("row", [*NOT_JSON, "null", "[]", '"a"', "1"])
def test_rows_that_are_not_json_of_an_object_are_refused_also_without_a_server(row, monkeypatch):
    monkeypatch.delenv(SERVED_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="'row' must be the JSON text of an object"):
        check_row(asked(row))
    check_row(asked('{"what": "ever"}'))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('{"prompt": "a"}', "KeyError: 'letter'"),
        ('{"prompt": "a", "letter": "e"}', "ZeroDivisionError"),
        ("{}", "ValueError: a row needs a 'prompt'"),
    ],
)
def test_rows_on_which_the_constraint_fails_are_refused_whatever_it_raises(server, row, error):
    with pytest.raises(ValueError, match=f"the constraint cannot start on this row .{error}"):
        check_row(asked(row))


def test_the_process_of_a_server_builds_the_constraint_once_from_its_environment(tiny_path, monkeypatch):
    monkeypatch.delenv(SERVED_VARIABLE, raising=False)
    assert served_here() is None
    served = ServedTask.of(ToyTask(), load_tokenizer(tiny_path))
    monkeypatch.setenv(SERVED_VARIABLE, json.dumps({CONFIG_KEY: served.to_config()}))
    constraint = served_here()[1]
    assert constraint is served_here()[1]
    allowed = np.flatnonzero(unpack(constraint.start({}).mask(), constraint.vocab_size))
    assert load_tokenizer(tiny_path).convert_ids_to_tokens(allowed.tolist()) == list(LETTERS)
    check_row(asked('{"prompt": "a1x"}'))
    monkeypatch.setenv(SERVED_VARIABLE, "{}")
    with pytest.raises(ValueError, match=f"{SERVED_VARIABLE} holds no entry"):
        served_here()
