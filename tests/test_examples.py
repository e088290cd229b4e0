"""The examples run, and learn."""

import importlib.util

from tests.support.paths import ROOT


def test_grpo_in_one_file_learns_and_is_short(capsys):
    file = ROOT / "examples" / "grpo_in_one_file.py"
    assert len(file.read_text().splitlines()) <= 150
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    history = example.main(steps=50)
    assert sum(history[:10]) < 2 and sum(history[-10:]) > 7, "successes of ten steps"
    assert "step  50  success 0." in capsys.readouterr().out
