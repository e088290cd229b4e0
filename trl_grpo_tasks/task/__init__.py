"""`Task` (base.py) and `Score`: the contract between a task pack and everything else."""

from .base import Task
from .checks import check_choice, check_one_of, check_text, check_whole, describe_error, nearest, printable
from .rows import check_editor, checked_row, describe_rows, one_per_request, rows_of, short_hash
from .score import (
    MASK_TOKEN,
    POLICIES,
    EditorError,
    NoAnswerError,
    NoOptions,
    Row,
    Score,
    TinySpec,
    UnfinishedTaskError,
    option,
    weighted_total,
)
from .thoughts import fold_thought, folded

__all__ = ["MASK_TOKEN", "POLICIES", "EditorError", "NoAnswerError", "NoOptions", "Row", "Score", "Task", "TinySpec",
           "UnfinishedTaskError", "check_choice", "check_editor", "check_one_of", "check_text", "check_whole",
           "checked_row", "describe_error", "describe_rows", "fold_thought", "folded", "nearest", "one_per_request",
           "option", "printable", "rows_of", "short_hash", "weighted_total"]  # fmt: skip
