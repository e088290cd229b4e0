"""Files of a run folder with wrong types: every command that reads them says which file and entry is wrong."""

import json

import pytest

from tests.support.commands import refused
from trl_grpo_tasks.report.run_folder import RESULTS_FILE, SETTINGS_FILE, RunFolder, settings_of

SAMPLE = {"row": {"prompt": "p"}, "completion": "c", "tokens": 1, "score": None}
EVALUATION = {"name": "before", "metrics": {"success": 0.5}, "samples": [SAMPLE]}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([], "its content must be an object"),
        ({"run": 3}, "'run' must be an object, not 3"),
        ({"task": "brick"}, "'task' must be an object"),
        ({"task": {"name": 3}}, "'name' must be of type str, not 3"),
        ({"task": {"options": []}}, "'options' must be of type dict"),
        ({"model": []}, "'model' must be an object"),
        ({"training": {"temperature": "hot"}}, "'temperature' must be of type int | float, not 'hot'"),
        ({"training": {"max_completion_length": True}}, "'max_completion_length' must be of type int, not True"),
        ({"training": {"repair_turns": [2]}}, "'repair_turns' must be of type int"),
    ],
)
def test_settings_with_wrong_types(tmp_path, capsys, settings, problem):
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is damaged: ") as error:
        settings_of(tmp_path)
    assert f"{SETTINGS_FILE} is damaged: {problem}" in str(error.value) and "move it away" in str(error.value)
    for words in (["report", "--status"], ["report"], ["solve", "--text", "x"], ["play"]):
        assert refused(capsys, words[0], str(tmp_path), *words[1:]) == f"error: {error.value}\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"evaluations": {}}, "'evaluations' must be a list"),
        ({"evaluations": [3]}, "an entry of 'evaluations' must be an object"),
        ({"evaluations": [EVALUATION | {"metrics": None}]}, "'metrics' must be of type dict, not None"),
        ({"evaluations": [{"name": "before"}]}, "'metrics' must be of type dict, not None"),
        ({"evaluations": [EVALUATION | {"samples": ["c"]}]}, "an entry of 'samples' must be an object"),
        ({"evaluations": [EVALUATION | {"samples": [SAMPLE | {"row": {}}]}]}, "'prompt' must be of type str | list"),
        ({"evaluations": [EVALUATION | {"samples": [SAMPLE | {"score": {"total": "1"}}]}]}, "'total' must be of type"),
    ],
)
def test_results_with_wrong_types(tmp_path, change, problem):
    whole = {"task": "brick", "evaluations": [EVALUATION]}
    (tmp_path / RESULTS_FILE).write_text(json.dumps(whole))
    assert len(RunFolder.read(tmp_path).evaluations) == 1
    (tmp_path / RESULTS_FILE).write_text(json.dumps(whole | change))
    with pytest.raises(ValueError) as error:
        RunFolder.read(tmp_path)
    assert f"{RESULTS_FILE} is damaged: {problem}" in str(error.value)
