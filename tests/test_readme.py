"""What the README shows works."""

import re
from pathlib import Path

import pytest

from trl_grpo_tasks import Task, TaskGRPOConfig
from trl_grpo_tasks.contract import check_task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_task_in_the_readme_keeps_the_contract():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Shout" in block]
    namespace = {"Task": Task}
    exec(code, namespace)
    check_task(namespace["Shout"](), size=3)


@pytest.mark.parametrize("name", sorted(TaskGRPOConfig.__annotations__))
def test_help_says_what_an_option_does(name):
    help_text = TaskGRPOConfig.__dataclass_fields__[name].metadata["help"]
    assert len(help_text) > 20 and help_text.endswith(".")


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
