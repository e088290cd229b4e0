"""Commands of `trl-grpo-tasks` in this process, with what they print."""

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
