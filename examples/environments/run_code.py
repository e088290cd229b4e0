"""Questions that a short program answers: the model may run Python in the sandbox before it answers.

trl-grpo-tasks train examples/environments/run_code.py        trains the tiny model, offline
trl-grpo-tasks train examples/environments/run_code.py --describe_tools --model Qwen/Qwen2.5-Coder-0.5B-Instruct
"""

import itertools
import random
from dataclasses import dataclass

from trl_grpo_tasks import Step
from trl_grpo_tasks.rewards.sandbox import run_python
from trl_grpo_tasks.rewards.tools import ToolTask
from trl_grpo_tasks.task import TinySpec, option

TERMS = {"squares": "i*i", "cubes": "i**3", "doubles": "2*i", "numbers": "i"}
CONDITIONS = {"": "", "even ": " if i%2==0", "odd ": " if i%2"}


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    result = run_python(code, timeout=2, max_output=500)
    return result.stdout.strip() or result.stderr.strip().rpartition("\n")[2] or "it printed nothing"


@dataclass(frozen=True)
class Options:
    """Options of the code task."""

    describe_tools: bool = option(False, "Prompts say which tools there are. The tiny model knows its tool.")
    largest: int = option(40, "The largest number in a question.")

    def __post_init__(self):
        if not 10 <= self.largest <= 99:
            raise ValueError(f"--largest {self.largest} must be from 10 to 99")


class RunCode(ToolTask):
    name, version, description = "run_code", "1", "Answer a question with the help of a program."
    functions = (python,)
    answer_pattern = r" -?[0-9]{1,9}"
    turns = 3
    Options = Options
    defaults = {"max_completion_length": 500, "max_steps": 200}
    tiny_defaults = {
        "train_rows": 600, "eval_rows": 100, "cold_start_steps": 200, "cold_start_batch_size": 64,
        "cold_start_learning_rate": 2e-3, "max_completion_length": 64, "num_generations": 8,
        "per_device_train_batch_size": 128, "max_steps": 40, "learning_rate": 3e-4,
    }  # fmt: skip

    def dataset(self, split, size, seed):
        """All questions, one in five of them in the test split."""
        pairs = itertools.combinations(range(1, self.options.largest), 2)
        made = [(term, which, *pair) for pair in pairs for term in TERMS for which in CONDITIONS]
        made = [one for one in made if (random.Random(str(one)).random() < 0.2) == (split == "test")]
        random.Random(seed).shuffle(made)
        return [self._row(*one) for one in made[:size]]

    def _row(self, term, which, low, high):
        program = f"print(sum({TERMS[term]} for i in range({low},{high}){CONDITIONS[which]}))"
        question = f"sum of {term} of {which}i from {low} up to, not including, {high}"
        if not self.options.describe_tools:
            question = f"{which}{term} {low},{high}"
        plain = [{"role": "user", "content": question}]
        prompt = self.with_tools(question) if self.options.describe_tools else plain
        # In its own words, not by running the program: what is summed, from which numbers.
        numbers = [i for i in range(low, high) if not which or (i % 2 == 0) == (which == "even ")]
        answer = {"squares": lambda i: i**2, "cubes": lambda i: i**3, "doubles": lambda i: i + i, "numbers": int}[term]
        return {"prompt": prompt, "program": program, "answer": sum(map(answer, numbers))}

    def score_answer(self, row, answer):
        success = answer.strip() == str(row["answer"])
        return Step(reward=float(success), success=success, reason="" if success else f"{answer[:20]!r} is wrong")

    def gold(self, row):
        return self.conversation(row, [self.call("python", code=row["program"]), f"#### {row['answer']}"])

    def bad(self, row):
        return "#### -1"

    def tiny(self):
        begin = '<tool_call>\n{"name": "python", "arguments": {"code": "'
        words = ["print(sum(", " for i in range(", "))", *TERMS.values(), *CONDITIONS.values(), *TERMS, *CONDITIONS]
        tokens = [begin, '"}}\n</tool_call>', "#### ", *filter(None, words), *"0123456789, -)"]
        return TinySpec(tokens=list(dict.fromkeys(tokens)), hidden_size=96, layers=3, heads=4, context=192)
