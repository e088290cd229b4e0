"""What the README shows works."""

import re
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_configs_are_read_by_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
