"""Commands of `trl-grpo-tasks` in this process, or in one of their own, with what they print."""

import os
import subprocess
import sys

from tests.support import forked
from tests.support.paths import ROOT
from trl_grpo_tasks.commands.main import main


def said(capsys, *words):
    """The exit status, standard output and standard error of a command."""
    code = main([*map(str, words)])
    return code, *capsys.readouterr()


def refused(capsys, *words):
    """The one line with which a command refuses wrong words."""
    code, _, err = said(capsys, *words)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def command(*words, cwd, stdin=""):
    """`trl-grpo-tasks ...` in a process of its own, as the console script does it: without its folder on the path."""
    script = "import sys; from trl_grpo_tasks.commands.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    if stdin:
        new = [sys.executable, "-c", script, *words]
        done = subprocess.run(new, cwd=cwd, input=stdin, env=environment, capture_output=True, text=True)
    else:
        done = forked.python("-c", script, *words, cwd=cwd, env=environment)
    return done.returncode, done.stdout, done.stderr
