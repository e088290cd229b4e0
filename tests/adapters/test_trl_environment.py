"""`trl_env:module:name`: environments and tools of TRL. The oracle calls the class by hand, as TRL's loop does."""

import asyncio
import copy
import inspect
import itertools
import json
import random
import threading

import pytest

from tests.support.tokenizer_makes import byte_level
from tests.support.walks import allows
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.constraints.turns import split_turns
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.worker import TaskRecipe
from trl_grpo_tasks.task import NoAnswerError

HERE = f"trl_env:{__name__}"
ROWS = [{"prompt": f"Guess the number of box {n}.", "number": n, "gold": ["", f"It is {n}."]} for n in range(8)]


class Box:
    """An environment of TRL: instances are used again, and state begins with reset."""

    made = 0

    def __init__(self):
        Box.made += 1
        self.lock = threading.Lock()  # a task is copied without its instances

    def reset(self, number, prompt, **row):
        assert "asked" not in row and "Tools" not in str(prompt) and "tool_call" not in str(prompt)
        self.number, self.guesses, self._secret = number, [], "not a tool"
        return f" There are {number % 3} marks on it."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.
        """
        self.guesses.append(number)
        return "right" if number == self.number else "more" if number < self.number else "less"

    async def peek(self) -> list:
        """Look into the box."""
        await asyncio.sleep(0)
        return [self.number, None]

    def _hidden(self):
        raise AssertionError

    def get_reward(self):
        return float(self.number in self.guesses) - 0.1 * len(self.guesses)


def call(name, **arguments):
    return f"So: <tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ACTIONS = [call("guess", number=2), call("guess", number=5), call("peek"), call("guess"), call("guess", number="x"),
           call("_hidden"), call("reset", number=2, prompt="p"), call("get_reward"), "done",
           '<tool_call>{"name": "guess", "arguments": {"number": 2', "<tool_call>[1]</tool_call>"]  # fmt: skip


def by_hand(row, actions, turns):
    """(reward, results) as TRL: calls are run until a turn has none, or no further turn may follow."""
    box, results = Box(), []
    box.reset(**row)
    tools = {"guess": box.guess, "peek": box.peek}
    for action in actions[: turns - 1]:
        try:
            given = json.loads(action.partition("<tool_call>")[2].partition("</tool_call>")[0])
            name, arguments = given["name"], given["arguments"]
        except (ValueError, TypeError):
            break
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            result = tools[name](**arguments)
            result = asyncio.run(result) if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 - as in TRL
            result = {"error": str(error)}
        results.append(str(result))
    return box.get_reward(), results


@pytest.fixture
def make(tmp_path):
    def make(name, rows=ROWS, **options):
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(rows))
        return get_task(f"{HERE}:{name}", {"dataset": str(file), **options})

    return make


def rows_of(task):
    return task.dataset("train", None, 0) + task.dataset("test", None, 0)


def test_a_conversation_is_that_of_the_class(make):
    task = make("Box", turns=4, success_at=0.5)
    row = next(row for row in rows_of(task) if row["number"] == 2)
    original = {"prompt": row["asked"], "number": 2, "gold": ROWS[2]["gold"]}
    rng = random.Random(0)
    tried = [*itertools.product(ACTIONS, ["done"]), *(rng.choices(ACTIONS[:-3], k=6) for _ in range(60))]
    ended = 0
    for actions in tried:
        reward, results = by_hand(original, actions, 4)
        text = task.conversation(row, actions)
        turns, told = split_turns(text)
        assert told == results and turns == list(actions[: len(results) + 1])
        score = task.score(row, text)
        assert (score.total, score.success) == (pytest.approx(reward), reward >= 0.5)
        assert task.reply(row, text) is None
        ended += len(turns) == 4
    assert ended > 30
    assert Box.made < len(tried) + 20, "instances are used again; the others are those of the oracle"


def test_prompts_say_what_reset_says_and_which_tools_there_are(make):
    task = make("Box", [*ROWS[:2], {"prompt": [{"role": "system", "content": "Be brief."},
                                               {"role": "user", "content": "Guess."}], "number": 4}])  # fmt: skip
    rows = {row["number"]: row["prompt"] for row in rows_of(task)}
    assert rows[1][1] == {"role": "user", "content": "Guess the number of box 1. There are 1 marks on it."}
    assert rows[4][1]["content"] == "Guess. There are 1 marks on it." and rows[4][0]["content"].startswith("Be brief.")
    listed = rows[1][0]["content"].partition("<tools>\n")[2].partition("\n</tools>")[0]
    schemas = [json.loads(line)["function"] for line in listed.splitlines()]
    assert [schema["name"] for schema in schemas] == ["guess", "peek"]
    assert schemas[0]["parameters"]["properties"] == {"number": {"type": "integer", "description": "The guess."}}


def test_the_contract_is_kept_and_copies_agree(make):
    task = make("Box", success_at=-0.5)
    check_task(task)
    row = rows_of(task)[0]
    texts = [task.conversation(row, [action, "done"]) for action in ACTIONS]
    copied = copy.deepcopy(task)
    for other in (copied, TaskRecipe.of(task).build()):  # the second is what a worker has
        assert [other.score(row, text) for text in texts] == [task.score(row, text) for text in texts]
    assert not set(copied.idle) & set(task.idle)


def test_turns_are_calls_that_fit_the_methods(make):
    tokenizer = byte_level()
    tokenizer.chat_template = "<tool_call>"
    task = make("Box")
    constraint = task.turn_constraint(tokenizer)
    for text, is_allowed in (
        (call("guess", number=2), True),
        (call("peek"), True),
        ("It is 2.", True),
        (call("guess", number="two"), False),
        (call("reset"), False),
    ):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert allows(constraint, ROWS[0], ids) == is_allowed


def add(a: int, b: int = 1) -> int:
    """
    Add numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


def boom() -> str:
    """Fail."""
    raise KeyError("oh")


def stop() -> str:
    """Reach a limit."""
    raise TimeoutError("took longer than 1 s")


TOOLS, LIMITED = [add, boom], [stop]


def said(prompts, completions, environments, number, **columns):
    """A reward function of TRL that reads messages, columns and environments."""
    (messages,), (environment,), (prompt,) = completions, environments, prompts
    assert prompt[0]["role"] == "user" and "asked" not in columns
    assert (environment is None) == ("marks" not in prompt[0]["content"])
    roles = [message["role"] for message in messages]
    assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    called = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert all(call["name"] and isinstance(call["arguments"], dict) for call in called)
    return [float(str(number[0]) in results) if "unknown" not in messages[-1]["content"] else None]


def test_tools_are_scored_by_a_reward_function(make):
    task = make("TOOLS", reward_function=f"{__name__}:said")
    row = next(row for row in rows_of(task) if row["number"] == 3)
    for actions, told, reward in (
        ([call("add", a=2), "3"], ["3"], 1.0),
        ([call("add", a=2, b=2), call("boom"), "3"], ["4", "{'error': \"'oh'\"}"], 0.0),
        (["3"], [], 0.0),
    ):
        text = task.conversation(row, actions)
        assert split_turns(text) == (actions, told) and task.score(row, text).total == reward
    assert task.score(row, "unknown") is None, "None is no reward"


def test_rewards_are_added(make):
    task = make("Box", reward_function=f"{__name__}:said")
    row = next(row for row in rows_of(task) if row["number"] == 3)
    text = task.conversation(row, [call("guess", number=3), call("peek"), "3"])
    assert task.score(row, text).total == pytest.approx(0.9)
    assert task.score(row, "unknown").total == 0.0, "that of the environment alone, as in TRL"


def test_rows_are_not_changed_by_an_environment(make):
    task = make("Greedy", [{"prompt": "p", "cards": [1, 2]}], test_fraction=0)
    (row,) = rows_of(task)
    assert [task.score(row, task.conversation(row, [call("take"), "end"])).total for _ in range(2)] == [2.0, 2.0]
    assert row["cards"] == [1, 2]


def test_limits_of_a_completion_are_not_told_to_the_model(make):
    with pytest.raises(TimeoutError):
        make("LIMITED", reward_function=f"{__name__}:said")


class Bare:
    def get_reward(self):
        return 0.0


class Greedy:
    """It changes what it is given."""

    def reset(self, cards, **row):
        self.cards, self.taken = cards, []

    def take(self) -> int:
        """Take a card."""
        self.taken.append(self.cards.pop())
        return self.taken[-1]

    async def get_reward(self):
        return sum(self.taken)


class Undocumented(Box):
    def open(self, wide):
        pass


class Dice(Box):
    def roll(self) -> str:
        """Roll."""
        return str(random.random())


Moody = type("Moody", (Box,), {"reset": lambda self, **row: str(random.random())})
Painted = type("Painted", (Box,), {"reset": lambda self, **row: [{"type": "image"}]})
MANY = {"box": Box}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Bare", {}, "must return an environment with a method reset"),
        ("Undocumented", {}, "tool 'open' needs type hints and a docstring"),
        ("TOOLS", {}, "has no method get_reward.*--reward_function"),
        ("Dice", {}, "get different answers, from action 3 on"),
        ("Moody", {}, "says different things about the same row"),
        ("Painted", {}, "must return text or None"),
        ("MANY", {}, "must be a class or a function that returns an environment, or a list of functions"),
        ("nothing", {}, "must be a class or a function"),
        ("Box", {"turns": 1}, "--turns 1 must be at least 2"),
        ("Box", {"reward_function": "said"}, "must be trl:module:reward"),
        ("Box", {"dataset": None}, "pass --dataset with a file"),
    ],
)
def test_what_cannot_work_is_refused(make, name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_gold_turns_are_those_of_the_column(make):
    task = make("Box", [{"prompt": "p", "number": 5, "gold": [call("guess", number=5), "5"]},
                        {"prompt": "q", "number": 6, "gold": None}], success_at=0.9, test_fraction=0)  # fmt: skip
    rows = {row["number"]: row for row in rows_of(task)}
    assert task.score(rows[5], task.gold(rows[5])).success and split_turns(task.gold(rows[5]))[1] == ["right"]
    with pytest.raises(NoAnswerError, match="--gold_column"):
        task.gold(rows[6])
