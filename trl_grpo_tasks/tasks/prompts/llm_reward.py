"""The reward `judge`: an LLM behind a chat API grades answers by the rubric of their row or of --judge_rubric."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ...files import check_local_path
from ...rewards.chat_api import ChatApi
from ...rewards.llm_judge import JudgeLimits, LLMJudge, Question
from ...rewards.rubric import Rubric
from ...task import Row
from .options import PromptsOptions, request_parameters


def make_judge(options: PromptsOptions, known_row: Callable[[Row], Row]) -> LLMJudge:
    """Make the judge that the options describe. No connection is opened before the first question."""
    assert options.judge_url is not None and options.judge_model is not None  # check_question has asked for them

    def question_of(row: Row) -> Question | None:
        try:
            row = known_row(row)
        except ValueError:
            return None  # a row from elsewhere with a mistake, which `score` reports
        weight = row["rewards"].get("judge")
        if weight is None:
            return None
        rubric = parsed_rubric(row.get("rubric") or options.judge_rubric or "")
        chat = row["prompt"]  # a single question stands for itself
        texts = [f"{message['role']}: {message['content']}" for message in chat] if chat[1:] else [chat[0]["content"]]
        return Question("\n\n".join(texts), rubric, weight, row.get("gold") or row.get("answer"))

    parameters = request_parameters(options)
    api = ChatApi(
        options.judge_url, options.judge_model, options.judge_key_variable, options.judge_timeout, parameters
    )
    prices = (options.judge_price_in, options.judge_price_out)
    limits = JudgeLimits(options.judge_attempts, options.judge_concurrency, options.judge_budget, *prices)
    return LLMJudge("judge", api, question_of, limits, options.judge_cache)


def check_question(row: Row, options: PromptsOptions, place: str) -> None:
    """Raise ValueError if there is no judge for this row, or no rubric."""
    if options.judge_url is None:
        raise ValueError(
            f"{place}: reward 'judge' needs a model to ask: pass --judge_url and --judge_model; prompts and answers "
            "are sent there"
        )
    if not row.get("rubric"):
        if not options.judge_rubric:
            raise ValueError(f"{place}: reward 'judge' needs a rubric: add a column 'rubric', or pass --judge_rubric")
        try:
            parsed_rubric(options.judge_rubric)
        except ValueError as error:
            raise ValueError(f"--judge_rubric {error}") from error


@lru_cache(maxsize=1024)
def parsed_rubric(given: str) -> Rubric:
    """Read a rubric from text, JSON text, or the name of a .json file."""
    if given.endswith(".json"):
        check_local_path(given, "file")
        given = Path(given).expanduser().read_text(encoding="utf-8")
    return Rubric.parse(given)
