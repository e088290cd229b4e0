"""Generated blocks of the page of task prompts: examples, rewards, columns, files and generators."""

from __future__ import annotations

import json
from typing import Any

from .blocks import code, codes, fenced, first_row, table


def examples() -> str:
    parts = []
    for kind in _generators():
        task, row = first_row("prompts", lambda row: row["level"] == "2", generator=kind, allow_code_execution=True)
        parts.append(f"`{kind}`, level 2:\n\n{fenced(row['prompt'][-1]['content'])}\n\n{fenced(task.gold(row))}")
    return "\n\n".join(parts)


def _generators() -> Any:
    from trl_grpo_tasks.tasks.prompts.generators import GENERATORS

    return GENERATORS


_LEVELS = {
    "arithmetic": "1: one-digit sums; 2: one-digit differences; 3: two digits plus or minus one digit; "
    "4: two digits with two digits, and products; 5: two operations",
    "word_problems": "1: one step with + or -; 2: one step with * or /; 3: two steps",
    "code": "1: one expression; 2: a short function; 3: a loop or a small algorithm",
    "schema": "1: flat objects; 2: lists, choices and booleans; 3: nested objects",
}


def generators() -> str:
    rows = []
    for name, generator in _generators().items():
        rewards = ", ".join(f"{code(reward)} {weight:g}" for reward, weight in generator.rewards.items())
        rows.append((code(name), generator.levels, _LEVELS[name], rewards))
    deepest = max(generator.levels for generator in _generators().values())
    rows.append(("`mixed`", deepest, "all generators in turn, each with the levels it has", "of each generator"))
    return table(["generator", "levels", "problems by level", "rewards and weights"], rows)


_OTHERWISE = {
    "numeric": "0",
    "exact": "0",
    "tests": "the share of tests that pass",
    "json": "0.5 with other text around it, 0 if it is no JSON",
    "schema": "0.5 with other text around it, otherwise 0",
    "fields": "the share of values that are right; half of that with other text around the JSON",
    "xml": "0.5 with other text around it; less for a broken document, by how far it parses",
    "regex": "0",
    "tags": "half of the share of well-written tags; 0.5 if the order is wrong or there is text outside",
    "length": "falls linearly to 0 at no words or at twice the target",
    "keywords": "the share of rules that are kept",
    "novelty": "1 minus the similarity to the most similar other completion (runs of four characters)",
    "reward_model": "the model's score, for every row; not limited to 0 to 1",
    "judge": "the weighted mean of the grades, 0 for the worst; a completion without grades is not scored",
}
_ROLES = {
    "checks": "always",
    "rules": "if no other does",
    "group": "never",
    "judge": "never",
}


def rewards() -> str:
    from trl_grpo_tasks.tasks.prompts.reward import REWARDS

    rows = []
    for name, reward in REWARDS.items():
        options = {"reward_model": "`--reward_model`", "judge": "`--judge_url`; `rubric` or `--judge_rubric`"}
        needs = options.get(name) or codes(reward.columns) or "-"
        rows.append((code(name), needs, reward.full_marks, _OTHERWISE[name], _ROLES[reward.role]))
    rows.append(("`module:function`", "-", "your function returns 1 or more", "what it returns", _ROLES["rules"]))
    return table(["reward", "column it needs", "full credit (1)", "otherwise", "decides success"], rows)


_COLUMNS = {
    "answer": ("text or number; a worked solution that ends in `#### 42` works too", "`numeric`, `exact`"),
    "tolerance": ("largest difference that still counts as equal", "`numeric`"),
    "tests": ("list of Python statements that raise on failure, such as `assert f(2) == 4`", "`tests`"),
    "schema": ("JSON schema, as an object or as text", "`schema`, the constraint"),
    "fields": ("the expected values of a JSON object", "`fields`"),
    "pattern": ("regular expression for the whole answer", "`regex`, the constraint"),
    "tags": ('tag names in order, such as `["think", "answer"]`', "`tags`"),
    "target_length": ("number of words; `--target_length` sets it for all rows", "`length`"),
    "keywords": ("words that must appear", "`keywords`"),
    "forbidden": ("words that must not appear", "`keywords`"),
    "rubric": ("text, or criteria with weights and a scale ([format](#an-llm-as-a-judge)); `--judge_rubric` sets it "
               "for all rows", "`judge`"),
    "rewards": ('`{"name": weight}`, `["name", "name=weight"]` or the text `name name=weight`; `reward` works too; '
                "`--rewards` applies to rows without it", "every row"),
    "gold": ("an answer that succeeds; `answer` is used where it is missing",
             "a cold start and `trl-grpo-tasks check`; training itself does not need it"),
    "level": ("level of the row, if every row has one: sorted as numbers, or in order of appearance",
              "the curriculum"),
}  # fmt: skip


def columns() -> str:
    from trl_grpo_tasks.tasks.prompts.data import COLUMNS

    first = ("`prompt`", "text, or chat messages of which the last is the user's; `--prompt_column` renames it",
             "every row")  # fmt: skip
    return table(["column", "content", "read by"], [first, *((code(name), *_COLUMNS[name]) for name in COLUMNS)])


_PROMPTS_FILE = {
    "prompts": [
        {"prompt": "A pen costs 3 coins. What do 14 pens cost?", "answer": 42, "rewards": {"numeric": 1.0}},
        {
            "prompt": "Name a city and its country as JSON.",
            "gold": '{"city": "Oslo", "country": "Norway"}',
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
                "required": ["city", "country"],
            },
            "rewards": ["schema"],
        },
        {
            "prompt": "Describe the sea.",
            "keywords": ["salt", "wave"],
            "target_length": 50,
            "rewards": "keywords length=0.5",
        },
    ]
}


def file() -> str:
    entries = ",\n  ".join(json.dumps(entry) for entry in _PROMPTS_FILE["prompts"])
    return fenced(f'{{"prompts": [\n  {entries}\n]}}', "json")
