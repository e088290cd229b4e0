"""Requests of the brick task: captions of a level have a target and can be solved; others cannot be judged."""

from types import SimpleNamespace

from trl_grpo_tasks.evaluation.samples import Completion
from trl_grpo_tasks.evaluation.solver import Solver
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor

TASK = get_task("brick")


class Writes:
    """A sampler that always writes the same text."""

    def __init__(self, text):
        self.text = text

    def sample(self, rows, editor=None):
        return [Completion(self.text, 1)] * len(rows)


def solved(request, text):
    ready = SimpleNamespace(tokenizer=None, config=None, constraint=None)
    return Solver(TASK, Writes(text), ready, RewardExecutor(TASK, 0))(request, 8)


def test_the_caption_of_a_level_is_solved_by_its_gold_answer():
    (row,) = TASK.dataset("test", 1, 0)
    caption = f"{row['caption']}, world {row['world']}"
    assert TASK.unverifiable(TASK.row_of(caption)) == ""
    assert solved(caption, row["gold"]).solved and not solved(caption, TASK.bad(row)).solved


def test_a_caption_without_a_target_is_ranked_by_its_physics_and_never_solved():
    row = TASK.row_of("a small table, world 8") | {"caption": "a red dragon", "voxels": None, "gold": None}
    solution = solved(row, "2x4 (0,0,0)\n2x4 (0,0,1)\n")
    assert not solution.solved and "no target shape" in solution.unverifiable
    (answer,) = solution.answers
    assert answer.drawn == 8 and answer.sample.score["total"] > 0
