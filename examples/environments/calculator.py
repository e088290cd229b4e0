"""Word problems with a calculator: the model may call it as often as it has turns, then answers after ####.

trl-grpo-tasks train examples/environments/calculator.py       trains the tiny model on sums and products, offline
trl-grpo-tasks train examples/environments/calculator.py --data gsm8k.jsonl --model Qwen/Qwen2.5-0.5B-Instruct

A line of the data has `question` and `answer`, which ends with #### and a number, as in GSM8K. Its annotations
<<48/2=24>> are the calls of the gold answer.
"""

import ast
import json
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path

from trl_grpo_tasks import Step
from trl_grpo_tasks.rewards.tools import ToolTask
from trl_grpo_tasks.task import NoAnswerError, TinySpec, option

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LARGEST = 1e12


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as (12 + 3) * 4.
    """
    if len(expression) > 200:
        raise ValueError("the expression is too long")
    value = _value(ast.parse(expression, mode="eval").body)
    if abs(value) > LARGEST:
        raise ValueError("the result is too large")
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / and parentheses are allowed")


def number_of(text):
    """The number that a final answer states, or None."""
    found = re.fullmatch(r"\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*", text)
    return None if found is None else float(found[1].replace(",", ""))


@dataclass(frozen=True)
class Options:
    """Options of the calculator task."""

    data: str = option("", "A JSONL file with `question` and `answer`. Without it, problems are sums and products.")
    digits: int = option(3, "Digits of the numbers in generated problems.")
    describe_tools: bool = option(False, "Prompts say which tools there are, also without data.")

    def __post_init__(self):
        if not 1 <= self.digits <= 6:
            raise ValueError(f"--digits {self.digits} must be from 1 to 6")
        if self.data and not Path(self.data).is_file():
            raise ValueError(f"--data {self.data}: there is no such file; give a JSONL file, or leave it out")


class Calculator(ToolTask):
    name, version, description = "calculator", "1", "Solve word problems with a calculator."
    functions = (calculate,)
    answer_pattern = r" -?[0-9]{1,9}(\.[0-9]{1,4})?"
    turns = 6
    Options = Options
    defaults = {"max_completion_length": 700, "max_steps": 200}
    tiny_defaults = {
        "train_rows": 4000, "eval_rows": 200, "cold_start_steps": 250,
        "cold_start_batch_size": 64, "cold_start_learning_rate": 2e-3, "max_completion_length": 80,
        "num_generations": 8, "per_device_train_batch_size": 128, "max_steps": 60, "learning_rate": 3e-4,
    }  # fmt: skip

    def dataset(self, split, size, seed):
        rows = self._read(split) if self.options.data else self._made(split, size or 2000, seed)
        random.Random(seed).shuffle(rows)
        return [self._with_prompt(row) for row in rows[:size]]

    def _with_prompt(self, row):
        question = row["question"]
        plain = [{"role": "user", "content": question}]
        is_told = self.options.data or self.options.describe_tools  # the tiny model knows its tool
        return {"prompt": self.with_tools(question) if is_told else plain, **row}

    def _read(self, split):
        lines = Path(self.options.data).read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        rows = [{"question": row["question"], "answer": row["answer"]} for row in rows]
        return [row for row in rows if (random.Random(row["question"]).random() < 0.1) == (split == "test")]

    def _made(self, split, size, seed):
        rng, found = random.Random(f"{seed}-{split}"), {}
        while len(found) < size:
            a, b, c = (rng.randrange(1, 10**self.options.digits) for _ in range(3))
            question = f"{a}{rng.choice('+-*')}{b}{rng.choice('+-*')}{c}"
            if (random.Random(question).random() < 0.2) == (split == "test"):
                found[question] = {"question": question, "answer": f"<<{question}={calculate(question)}>> #### "
                                   f"{calculate(question)}"}  # fmt: skip
        return list(found.values())

    def score_answer(self, row, answer):
        given, wanted = number_of(answer), number_of(row["answer"].rpartition("####")[2])
        if given is None:
            return Step(reason=f"{answer[:40]!r} is not a number")
        success = given == wanted
        return Step(reward=float(success), success=success, reason="" if success else f"{given:g} is not the answer")

    def gold(self, row):
        calls = re.findall(r"<<([^=<>]+)=[^<>]*>>", row["answer"])[: self.turns - 1]
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        if not calls:
            raise NoAnswerError("this row has no annotated calculations")
        made = [self.call("calculate", expression=expression) for expression in calls]
        return self.conversation(row, [*made, f"#### {answer}"])

    def bad(self, row):
        return "#### 0" if number_of(row["answer"].rpartition("####")[2]) else "#### 1"

    def row_of(self, text):
        return self._with_prompt({"question": text, "answer": "#### "})

    def tiny(self):
        begin = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "'
        tokens = [begin, '"}}\n</tool_call>', "#### ", *"0123456789+-*/(). ", '{"error": "']
        return TinySpec(tokens=tokens, hidden_size=96, layers=3, heads=4, context=256)
