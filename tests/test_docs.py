"""The documentation site: it builds without a warning, and its reference pages lack nothing that the code has."""

import ast
import fnmatch
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.evaluation.evaluate import Sample
from trl_grpo_tasks.evaluation.summary import summarise
from trl_grpo_tasks.rollout.cache import PAGE, CacheShape, pages_for

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` builds it: in strict mode."""
    folder = tmp_path_factory.mktemp("site")
    command = re.search(r"-m sphinx (.+) docs docs/_build/html", (ROOT / "Makefile").read_text())[1].split()
    assert "-W" in command
    command = [sys.executable, "-m", "sphinx", *command, str(DOCS), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def extension():
    """A module of docs/_ext by its name."""
    sys.path.insert(0, str(DOCS / "_ext"))
    yield importlib.import_module
    sys.path.remove(str(DOCS / "_ext"))


@pytest.fixture(scope="module")
def meanings():
    """The texts of the page of metrics."""
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("task_pages.metric_meanings")
    sys.path.remove(str(DOCS))


def links_of(page):
    """The pages of the site that a page links to."""
    targets = re.findall(r'<a [^>]*href="([^"#?]+)', page.read_text())
    found = ((page.parent / unquote(target)).resolve() for target in targets if "://" not in target)
    return {path for path in found if path.suffix == ".html"}


@pytest.mark.exhaustive
def test_every_page_is_reachable_from_the_index_and_needs_no_network(site):
    """Whether reference pages have every command, option and metric: test_task_pages.py."""
    reached, todo = set(), [site / "index.html"]
    while todo:
        page = todo.pop()
        if page not in reached and page.is_file():
            reached.add(page)
            todo += links_of(page)
            loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', page.read_text())
            assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    for page in PAGES:
        assert (site / page.relative_to(DOCS)).with_suffix(".html") in reached, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet


# ---- the names of metrics


def pattern_of(node):
    """What names a metric in the code, as a pattern: what is filled in is *."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in parts)


def logged_patterns():
    """Every name for which the package appends to the trainer's metrics, calls `_log_metric`, or which the method
    `metrics` of an extra returns."""
    texts = {path: path.read_text() for path in sorted((ROOT / "trl_grpo_tasks").rglob("*.py"))}
    for path, text in texts.items():
        if "metrics" not in text and "_log_metric" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "metrics" and path.parent.name == "extras":
                yield from (pattern_of(key) for one in ast.walk(node) if isinstance(one, ast.Dict) for key in one.keys)
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            to = node.func.value
            if node.func.attr == "_log_metric":
                yield pattern_of(node.args[0])
            elif node.func.attr == "append" and isinstance(to, ast.Subscript) and "metrics" in ast.unparse(to.value):
                yield pattern_of(to.slice)


def test_metrics_that_the_code_logs_have_a_meaning(meanings):
    patterns = set(logged_patterns())
    assert len(patterns) > 15 and "*" not in patterns
    for pattern in patterns:
        assert fnmatch.filter(meanings.TRAINING, pattern), f"{pattern}: add it to docs/task_pages/metric_meanings.py"
    for name in meanings.TRAINING:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), f"{name}: nothing logs it any more"


def test_metrics_of_a_run_have_a_meaning(meanings, tiny_path, tmp_path):
    options = {"beta": 0.04, "kl_target": 0.1, "advantage_clip": 1.0, "curriculum": True, "replay_size": 4}
    options |= {"use_adaptive_entropy": True, "entropy_target": 1.0}
    trainer = toy_trainer(tiny_path, tmp_path, max_steps=3, constrain=True, **options)
    trainer.train()
    logged = {name for logs in trainer.state.log_history[:-1] for name in logs} - {"step"}
    generic = {re.sub(r"@\d+$", "@k", re.sub(r"^rewards/\w+/", "rewards/NAME/", name)) for name in logged}
    assert {"pass@k", "beta", "replay/size", "constraint/allowed_mass", "rewards/NAME/mean"} <= generic
    assert generic - set(meanings.TRAINING) - set(meanings.TRL) == set()
    assert set(meanings.TRL) - generic == set()


def test_metrics_of_an_evaluation_have_a_meaning(meanings):
    task = ToyTask()
    rows = task.dataset("train", 2, 0)
    samples = [Sample(row, task.gold(row), 1, task.score(row, task.gold(row)).as_dict()) for row in rows * 2]
    metrics, _ = summarise(samples, num_samples=2)
    generic = {re.sub(r"@\d+$", "@k", re.sub(r"^success/\w+", "success/LEVEL", name)) for name in metrics}
    generic = {"NAME" if name in task.weights else name for name in generic} | {"seconds"}
    assert generic - set(meanings.EVALUATION) == set()


# ---- numbers


def test_the_documentation_stays_short():
    assert sum(len(page.read_text().split()) for page in PAGES) <= 45_000
    assert len((ROOT / "README.md").read_text().split()) <= 1_200


def test_kv_cache_sizes_of_the_memory_page_are_those_of_the_cache():
    page = (DOCS / "memory.md").read_text().replace(",", "")
    sizes = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    per_token = {}
    for model, layers, heads, width, size in sizes:
        shape = CacheShape(int(layers), int(heads), int(width), torch.bfloat16, torch.device("cpu"))
        keys_and_values = [buffer for pair in shape.buffers(1, 1, make=torch.empty) for buffer in pair]
        assert int(size) == sum(buffer.nbytes for buffer in keys_and_values) == shape.bytes_per_token, model
        per_token[model] = int(size)
    examples = re.findall(r"^\| (\d+) \| (\d+) \+ (\d+) \| (\d+) \| ([\d.]+) GB \|$", page, re.MULTILINE)
    for rows, prompt, completion, tokens, gigabytes in examples:
        assert int(tokens) == PAGE * pages_for(int(prompt), int(completion))
        assert f"{int(rows) * int(tokens) * per_token['Qwen2.5-1.5B'] / 1e9:.1f}" == gigabytes
    assert (len(sizes), len(examples)) == (5, 3)


# ---- docstrings


def test_docstrings_become_restructured_text(extension):
    docstring = """A `name` and a_name_, *args | more.

Class attributes:
    name: The `task`'s name.
    policy: One,
        or another.

Text after it:
- one
- two

    an *indented* block

```python
x = "`"
```"""
    assert extension("docstrings").to_rst(docstring.splitlines()) == [
        r"A ``name`` and a_name\_, \*args \| more.",
        "",
        *("Class attributes:", "", "- ``name``: The ``task``'s name.", "- ``policy``: One,", "  or another.", "", ""),
        *("Text after it:", "", "- one", "- two", ""),
        *("::", "", "    an *indented* block", ""),
        *("", ".. code-block:: python", "", '    x = "`"', ""),
    ]
