"""Options of the prompts task, and checks of their values."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from ...files import check_local_path
from ...rewards.chat_api import check_url
from ...task import nearest, option
from . import generators
from .reward import REWARDS


@dataclass(frozen=True)
class PromptsOptions:
    """Options of the prompts task: the source of the prompts, the rewards, the sandbox, and the judge."""

    prompts_file: str | None = option(
        None,
        "A .json, .jsonl, .csv or .parquet file, or a Hub data set (owner/name); example_prompts.json comes with the "
        "package. Default: use --generator.",
    )
    generator: str = option(
        "arithmetic", f"Generator of prompts if there is no file: {', '.join(generators.GENERATORS)} or mixed."
    )
    generator_levels: list[str] = option([], "Levels of the generator, such as 1 2 3. Empty means all of them.")
    rewards: list[str] = option(
        [],
        "Rewards of rows that choose none, as name or name=weight; they override those of a generator. "
        f"Names: {', '.join(REWARDS)}, or my_module:my_function, which rows may choose only if it is listed here.",
    )
    prompt_column: str = option("prompt", "Column of the file with the prompt: text or chat messages.")
    answer_column: str = option("answer", "Column of the file with the answer.")
    system_prompt: str | None = option(None, "System message for every prompt that has none.")
    target_length: int | None = option(None, "Target of reward 'length' in words, for rows without a target_length.")
    think: bool = option(
        False,
        "The answer is what follows --think_marker; the text before it is a thought, which is free with --constrain "
        "and is never scored.",
    )
    think_marker: str = option("####", "With --think: the text that ends the thought.")
    think_tokens: int | None = option(
        None, "With --think and --constrain: maximum tokens of a thought, marker included."
    )
    reward_model: str | None = option(None, "Sequence-classification model (Hub id or folder) that scores answers.")
    test_fraction: float = option(0.1, "Fraction of the prompts held out for testing.")
    allow_code_execution: bool = option(
        False, "Run model-written programs, in a sandbox that is not a container. Reward 'tests' needs this."
    )
    sandbox_timeout: float = option(10.0, "Time limit for all tests of one program, in seconds.")
    sandbox_memory_mb: int = option(512, "Memory limit of one program, in MB.")
    require_sandbox: bool = option(
        False,
        "Refuse to run programs if this machine lacks a layer of the sandbox. Without it, a warning names the layer.",
    )
    judge_url: str | None = option(
        None, "Base URL of an OpenAI-compatible chat API, such as http://localhost:8000/v1, for reward 'judge'."
    )
    judge_model: str | None = option(None, "Model that the chat API is asked for.")
    judge_key_variable: str | None = option(
        None, "Name of the environment variable that holds the API key. Default: no key is sent."
    )
    judge_rubric: str | None = option(None, "Rubric of rows without a column 'rubric': text, JSON, or a .json file.")
    judge_parameters: str = option(
        '{"temperature": 0}', "Further parameters of each request to the judge, as a JSON object."
    )
    judge_timeout: float = option(60.0, "Time limit of one request to the judge, in seconds.")
    judge_attempts: int = option(4, "Requests per completion before it counts as not scored.")
    judge_concurrency: int = option(8, "Requests to the judge at the same time, per process.")
    judge_price_in: float = option(0.0, "Price of a million tokens that the judge reads.")
    judge_price_out: float = option(0.0, "Price of a million tokens that the judge writes.")
    judge_budget: float | None = option(
        None, "The judge is not asked any more once it has cost this much, in the unit of the prices."
    )
    judge_cache: str = option("outputs/judge_cache.jsonl", "File that keeps the judge's scores for later runs.")


def check_options(options: PromptsOptions) -> None:
    """Raise ValueError for values that cannot be used, before anything is read."""
    kinds = [*generators.GENERATORS, "mixed"]
    if options.generator not in kinds:
        hint = nearest(options.generator, kinds)
        raise ValueError(f"unknown generator {options.generator!r}{hint}; generators are: {', '.join(kinds)}")
    known = generators.levels_of(options.generator)
    unknown = [str(level) for level in options.generator_levels if str(level) not in known]
    if unknown:
        raise ValueError(
            f"generator {options.generator!r} has no level {', '.join(unknown)}; levels are: {', '.join(known)}"
        )
    if options.reward_model:
        check_local_path(options.reward_model, "--reward_model")
    if not 0 <= options.test_fraction < 1:
        raise ValueError(f"--test_fraction {options.test_fraction} must be at least 0 and less than 1")
    for name, least in {
        "sandbox_timeout": 0.1,
        "sandbox_memory_mb": 64,
        "target_length": 1,
        "think_tokens": 1,
    }.items():
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    if not options.think_marker.strip():
        raise ValueError(f"--think_marker {options.think_marker!r} must contain a character other than white space")
    if options.think_tokens is not None and not options.think:
        raise ValueError(f"--think_tokens {options.think_tokens} needs --think")
    for name in ("reward_model", "judge_url"):
        if options.think and getattr(options, name):
            raise ValueError(f"--think does not work with --{name}, which would read the thought; leave one out")
    _check_judge(options)


def _check_judge(options: PromptsOptions) -> None:
    if (options.judge_url is None) != (options.judge_model is None):
        raise ValueError("--judge_url and --judge_model belong together; pass both, or neither")
    if options.judge_url is not None:
        check_url(options.judge_url)
    # A key that was passed by mistake must not be shown, so the value is not part of the message.
    if options.judge_key_variable is not None and not re.fullmatch(r"[A-Za-z_]\w*", options.judge_key_variable):
        raise ValueError("--judge_key_variable must be the name of an environment variable, never the key itself")
    for name, least in (("timeout", 0.1), ("attempts", 1), ("concurrency", 1), ("price_in", 0), ("price_out", 0)):
        value = getattr(options, f"judge_{name}")
        if not least <= value < math.inf:
            raise ValueError(f"--judge_{name} {value} must be at least {least}")
    if options.judge_budget is not None:
        if not 0 < options.judge_budget < math.inf:
            raise ValueError(f"--judge_budget {options.judge_budget} must be above 0")
        if not options.judge_price_in and not options.judge_price_out:
            raise ValueError("--judge_budget needs prices: pass --judge_price_in and --judge_price_out")
    request_parameters(options)


def request_parameters(options: PromptsOptions) -> dict[str, Any]:
    """Return --judge_parameters as an object; ValueError if it is none, or sets what the judge sets itself."""
    try:
        parameters = json.loads(options.judge_parameters)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--judge_parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict) or parameters.keys() & {"model", "messages", "stream", "n"}:
        raise ValueError(
            f"--judge_parameters {options.judge_parameters!r:.80} must be a JSON object without model, messages, "
            "stream and n"
        )
    return parameters
