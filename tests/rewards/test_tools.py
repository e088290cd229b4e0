"""Tasks with tools: what a turn does, whatever it says, and the calculator of the examples."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from trl_grpo_tasks import Step
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.constraints import tools
from trl_grpo_tasks.constraints.tools import in_form
from trl_grpo_tasks.constraints.turns import TurnsForm, chat_observation, split_turns
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.tools import ToolTask

FILE = str(ROOT / "examples" / "environments" / "calculator.py")
PIECES = ["<tool_call>", "\n", '{"name": "calculate", "arguments": ', '{"expression": "', "2*3", "/0", "))", '"}', "}",
          "</tool_call>", "####", " 6", "é", "[1]", "**9", "null"]  # fmt: skip


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="module")
def calculator():
    return get_task(FILE)


ROW = {"prompt": "2*3+4", "question": "2*3+4", "answer": "<<2*3+4=10>> #### 10"}


def told(task, *actions):
    return [step.observation for step in task.play(ROW, actions)]


def test_calls_are_answered_and_the_answer_is_scored(calculator):
    assert told(calculator, call("calculate", expression="2*3"), "#### 6") == ["6", ""]
    acted = [[call("calculate", expression="6+4"), f"so ####{end}"] for end in (" 10", " $10.00", " 11", " ten", "")]
    scores = [calculator.score(ROW, calculator.conversation(ROW, actions)) for actions in acted]
    assert [score.success for score in scores] == [True, True, False, False, False]
    assert scores[2].reason == "11 is not the answer" and scores[3].reason == "' ten' is not a number"
    assert scores[0].info["calls"] == 1 and scores[0].info["turns"] == 2


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (call("calculate", expression="2/0"), "ZeroDivisionError: division by zero"),
        (call("calculate", expression="9**9"), "ValueError: only numbers, + - * / and parentheses are allowed"),
        (call("calculate", expression="(" * 500), "ValueError: the expression is too long"),
        (call("calculate", words="1"), "TypeError: calculate() got an unexpected keyword argument 'words'"),
        (call("remove"), "there is no tool 'remove'; tools are: calculate"),
    ],
)
def test_the_model_is_told_what_was_wrong_with_a_call(calculator, action, said):
    (observation,) = told(calculator, action)
    assert json.loads(observation) == {"error": said}


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_any_turn_is_answered_or_ends_the_conversation(calculator, action):
    (step,) = calculator.play(ROW, [action])
    assert isinstance(step, Step) and (step.done or step.observation)
    assert step.success == (step.done and "####" in action and action.rpartition("####")[2].strip() == "10")


def test_the_form_of_llama_is_understood_too(calculator):
    assert told(calculator, '{"name": "calculate", "parameters": {"expression": "1+1"}}') == ["2"]


def test_limits_of_a_completion_are_not_told_to_the_model():
    class Endless(ToolTask):
        name, version, description = "endless", "1", "Waits."

        @property
        def functions(self):
            def wait():
                raise TimeoutError("took longer than 1 s")

            return (wait,)

    with pytest.raises(TimeoutError):
        Endless().play(ROW, [call("wait")])


def test_prompts_tell_which_tools_there_are(calculator):
    chat = calculator.with_tools([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}])
    assert [part["role"] for part in chat] == ["system", "user"] and chat[0]["content"].startswith("Be brief.\n\n")
    assert '"name": "calculate"' in chat[0]["content"] and "End with #### and the answer." in chat[0]["content"]
    assert calculator.with_tools("q")[1] == {"role": "user", "content": "q"}


def test_word_problems_come_from_a_file_with_their_calls(calculator, tmp_path):
    file = tmp_path / "data.jsonl"
    answers = ["Half of 48 is <<48/2=24>>24. In all <<48+24=72>>72.\n#### 72", "none\n#### 1,000"]
    lines = [{"question": f"question {n}", "answer": answers[n % 2]} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, lines)))
    task = get_task(FILE, {"data": str(file)})
    train, test = task.dataset("train", None, 0), task.dataset("test", None, 0)
    assert len(train) + len(test) == 60 and not {r["question"] for r in train} & {r["question"] for r in test}
    row = next(row for row in train if "72" in row["answer"])
    turns, observations = split_turns(task.gold(row))
    assert observations == ["24", "72"] and turns[-1] == "#### 72" and task.score(row, task.gold(row)).success
    with pytest.raises(ValueError, match="this row has no annotated calculations"):
        task.gold(next(row for row in train if "1,000" in row["answer"]))
    with pytest.raises(ValueError, match="there is no such file"):
        get_task(FILE, {"data": str(tmp_path / "missing.jsonl")})


QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}"
    "\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "eos", "head", "tail", "is_quoted"),
    [
        (QWEN, "<|im_end|>", "\n<|im_start|>user\n<tool_response>\n",
         "\n</tool_response><|im_end|>\n<|im_start|>assistant\n", False),
        (LLAMA, "<|eot_id|>", '<|start_header_id|>ipython<|end_header_id|>\n\n"',
         '"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n', True),
    ],
    ids=["qwen", "llama"],
)  # fmt: skip
def test_results_stand_as_the_chat_template_writes_them(chat_tokenizer, template, eos, head, tail, is_quoted):
    chat_tokenizer.chat_template, chat_tokenizer.eos_token = template, eos
    assert chat_observation(chat_tokenizer, TurnsForm(role="tool")) == (head, tail, is_quoted)


@pytest.fixture
def chat_tokenizer():
    from tests.support.tokenizer_makes import byte_level

    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    return tokenizer


@pytest.mark.parametrize(("template", "eos", "begin"), [
    (QWEN + "{# <tool_call> #}", "<|im_end|>", '<tool_call>\n{"name": "calculate", "arguments": '),
    (LLAMA + '{# "parameters": #}', "<|eot_id|>", '{"name": "calculate", "parameters": '),
], ids=["qwen", "llama"])  # fmt: skip
def test_gold_calls_are_those_that_the_chat_template_writes(calculator, chat_tokenizer, template, eos, begin):
    """The constraint allows each turn of the cold start."""
    chat_tokenizer.chat_template, chat_tokenizer.eos_token = template, eos
    constraint = calculator.turn_constraint(chat_tokenizer)
    row = {**ROW, "prompt": [{"role": "user", "content": "q"}]}
    (_, first), (prompt, last) = calculator.demonstrations(row, chat_tokenizer)
    assert first.startswith(begin) and last == "#### 10" and prompt[1]["content"] == first
    for turn in (first, last):
        state = constraint.start(row)
        for token in [*chat_tokenizer(turn)["input_ids"], chat_tokenizer.eos_token_id]:
            state.accept(token)
        assert state.finished
    said = []
    check_task(calculator, size=2, tokenizer=chat_tokenizer, say=said.append)
    assert "ok  the constraint allows gold answers (4 rows)" in said


@pytest.mark.parametrize(("turn", "hermes", "llama"), [
    ("so #### 1", "so #### 1", "so #### 1"),
    (f"first {call('f', a=1)}", f"first {call('f', a=1)}", '{"name": "f", "parameters": {"a": 1}}'),
    ('{"name": "f", "parameters": {"a": "é"}}', '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>',
     '{"name": "f", "parameters": {"a": "é"}}'),
])  # fmt: skip
def test_a_turn_in_the_form_of_another_template(turn, hermes, llama):
    assert in_form(turn, tools.HERMES) == hermes and in_form(turn, tools.LLAMA) == llama
