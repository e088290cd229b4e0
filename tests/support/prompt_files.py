"""Helpers that create prompts tasks from rows."""

import json

from trl_grpo_tasks.tasks.prompts import PromptsOptions, PromptsTask

SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
)


def make(**options):
    return PromptsTask(PromptsOptions(**options))


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def from_rows(tmp_path, rows, **options):
    return make(prompts_file=write(tmp_path, "rows.json", rows), **options)


def only_row(task):
    (row,) = task.dataset("train", None, 0) + task.dataset("test", None, 0)
    return row
