"""Options under the names that other GRPO scripts give them: refused with the name here; docs/migration.md agrees."""

import re

import pytest

from tests.support.commands import refused
from tests.support.paths import ROOT
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.main import COMMANDS
from trl_grpo_tasks.commands.old_names import OLD_COMMANDS, OLD_NAMES, OLD_OPTIONS, OTHER_MEANINGS

# The flags in the scripts of the documents that this package implements; the others are options here too.
DOCUMENTS = {
    "--group_size": "--num_generations", "--num_episodes": "--steps", "--save_interval": "--save_steps",
    "--log_interval": "--logging_steps", "--kl_coef": "--beta", "--kl_beta": "--beta", "--checkpoint": "--model",
    "--resume": "--resume_from_checkpoint", "--model_path": "--model", "--use_priority_buffer": "--replay_size",
    "--use_curriculum": "--curriculum", "--eval_episodes": "--eval_rows", "--clip_range": "--epsilon",
    "--clip-range": "--epsilon",
}  # fmt: skip


@pytest.mark.parametrize("given", DOCUMENTS)
def test_flags_of_the_documents_are_refused_with_the_name_here(my_task, given):
    with pytest.raises(ValueError, match=f"; here it is {DOCUMENTS[given]}$"):
        parse(["my_task.py", given, "3", "--use_cpu", "true"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train my_task.py --config old.yaml", "unknown option --group_size; here it is --num_generations"),
        ("train my_task.py --config older.yaml", "--num_samples is now: --samples N"),
        ("train prompts --dataset_path x.json", "unknown option --dataset_path; here it is --prompts_file"),
        ("solve tiny --task my_task.py --text abc --max_new_tokens 3",
         "unknown option --max_new_tokens; here it is --max_completion_length"),
    ],
)  # fmt: skip
def test_old_names_in_recipes_tasks_and_other_commands(my_task, capsys, words, message):
    (my_task.parent / "old.yaml").write_text("group_size: 8\n")
    (my_task.parent / "older.yaml").write_text("num_samples: 8\n")
    assert refused(capsys, *words.split()) == f"error: {message}\n"


def test_an_old_name_of_an_option_that_the_task_does_not_have(my_task, capsys):
    assert "here it is" not in refused(capsys, "train", "my_task.py", "--dataset_path", "x.json")


@pytest.mark.parametrize("command", OLD_COMMANDS)
def test_commands_of_earlier_versions_are_refused_with_the_new_form(capsys, command):
    assert command not in COMMANDS and OLD_COMMANDS[command].split()[0] in COMMANDS
    err = refused(capsys, command, "outputs/demo", "-h")
    assert err == f"error: {command!r} is now: trl-grpo-tasks {OLD_COMMANDS[command]}\n"


@pytest.mark.parametrize(("command", "option"), [(one, option) for one in OLD_OPTIONS for option in OLD_OPTIONS[one]])
def test_options_of_earlier_versions_are_refused_with_the_new_form(capsys, command, option):
    err = refused(capsys, command, "outputs/demo", f"{option}=3")
    assert err == f"error: {option} is now: {OLD_OPTIONS[command][option]}\n"


def test_the_page_on_migration_lists_the_same_names():
    text = (ROOT / "docs/migration.md").read_text()
    rows = re.findall(r"^\| (`.+?) \| `(\w+)`.* \|$", text.partition("## Concepts")[0], re.MULTILINE)
    listed = {old.lower(): new for names, new in rows for old in re.findall(r"`(\w+)`", names)}
    assert listed == OLD_NAMES | OTHER_MEANINGS
