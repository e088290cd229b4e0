"""Frozen judges: sequence-classification models that rate how real a text looks, from 0 to 1.

A judge scores in batches, on the accelerator if there is one, caches its scores, and is never trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..files import from_pretrained, looks_local
from ..task import Row, Score

REAL = "real"  # the label for real text in judges with two labels
BATCH_SIZE = 128
CACHE_SIZE = 20_000


class FrozenClassifier:
    """A judge loaded from `source`, a folder or a Hub id, on first use.

    `text_of(row, completion)` returns the text to judge, or None for a score of 0. A valid completion that gets at
    least `accepts` is a success; None: the judge does not decide. The cached scores are part of a checkpoint, because
    a text that is judged again in another batch may differ in the last bit.
    """

    def __init__(
        self, name: str, source: str, text_of: Callable[[Row, str], str | None], accepts: float | None = None
    ):
        self.name, self._accepts = name, accepts
        self._source, self._text_of = source, text_of
        self._model: Any = None
        self._tokenizer: Any = None
        self._cache: dict[str, float] = {}  # hash of the text -> score

    def added_to(self, score: Score, value: float) -> Score:
        """Return the score of a completion with this judge's component, and its decision if it makes one."""
        score = replace(score, components={**score.components, self.name: value})
        if self._accepts is None or not score.valid or score.success:
            return score
        if value >= self._accepts:
            return replace(score, success=True, reason="")
        return replace(score, reason=f"{self.name} {value:.2f}, below {self._accepts:g}")

    def score(self, rows: Sequence[Row], completions: Sequence[str]) -> list[float]:
        """Rate how real each completion looks in its row."""
        texts = [self._text_of(row, completion) for row, completion in zip(rows, completions, strict=True)]
        return self.judge(texts)

    def judge(self, texts: Sequence[str | None]) -> list[float]:
        """Rate how real each text looks; 0 for None."""
        keys = ["" if text is None else hashlib.sha256(text.encode(errors="replace")).hexdigest() for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if text is not None and key not in self._cache}
        known = {key: self._cache[key] for key in keys if key in self._cache}
        known |= dict(zip(new, self._predict(list(new.values())), strict=True))
        self._cache |= known
        while len(self._cache) > CACHE_SIZE:
            del self._cache[next(iter(self._cache))]
        return [known.get(key, 0.0) for key in keys]

    @torch.inference_mode()
    def _predict(self, texts: Sequence[str]) -> list[float]:
        if not texts:
            return []
        if self._model is None:
            self._model, self._tokenizer = load_judge(self._source)
        model = self._model
        if model.training or any(p.requires_grad for p in model.parameters()):
            raise RuntimeError(
                f"judge {self._source!r} is in training mode or has trainable weights; a judge must stay frozen"
            )
        scores: list[float] = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = self._tokenizer(
                list(texts[start : start + BATCH_SIZE]), return_tensors="pt", padding=True, truncation=True,
                return_token_type_ids=False,
            )  # fmt: skip
            logits = model(**batch.to(model.device)).logits.float()
            if logits.shape[1] == 1:
                scores += logits[:, 0].sigmoid().tolist()
            else:
                labels = {str(name).lower(): int(number) for number, name in (model.config.id2label or {}).items()}
                scores += logits.softmax(1)[:, labels.get(REAL, 1)].tolist()
        return scores

    def state_dict(self) -> dict[str, Any]:
        return {"scores": dict(self._cache)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cache = dict(state["scores"])


def frozen_of(judges: Mapping[str, Any]) -> dict[str, FrozenClassifier]:
    """Select the FrozenJudges among a task's judges; the others are models that TRL evaluates."""
    return {name: judge for name, judge in judges.items() if isinstance(judge, FrozenClassifier)}


def text_of(completion: Any) -> str:
    """Return the text of a completion in TRL's format: a string, or a list with one assistant message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def check_judge(source: str) -> None:
    """Raise ValueError if the configuration of `source` shows that it cannot be a judge. Loads no weights."""
    from transformers import AutoConfig

    path = Path(source).expanduser()
    if (looks_local(source) or path.is_dir()) and not (path / "config.json").is_file():
        raise ValueError(
            f"judge {source!r}: the folder contains no model; create one with trl-grpo-tasks tool infill "
            f"prepare-judge --output_dir {source}, or omit the option to have one created"
        )
    try:
        config = from_pretrained(AutoConfig, source)
    except (OSError, ValueError) as error:
        raise ValueError(f"judge {source!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    name = (config.architectures or ["a model without a head"])[0]
    if not name.endswith("ForSequenceClassification"):
        raise ValueError(
            f"judge {source!r} is {name}, which does not classify text; pass a ...ForSequenceClassification model, "
            "such as one made by trl-grpo-tasks tool infill prepare-judge"
        )
    if config.num_labels > 2:
        raise ValueError(
            f"judge {source!r} has {config.num_labels} labels; use a model with one output (a score) or two labels "
            "(real and not real)"
        )


def load_judge(source: str) -> tuple[Any, Any]:
    """Load a judge's model, frozen and on the accelerator if there is one, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from ..constraints.sharding import loading_whole_models

    check_judge(source)
    with loading_whole_models():
        model = from_pretrained(AutoModelForSequenceClassification, source, dtype=torch.float32)
    tokenizer = from_pretrained(AutoTokenizer, source, padding_side="right")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = "cpu"
    if torch.cuda.is_available():
        from accelerate import PartialState

        device = PartialState().device
    return model.to(device).eval().requires_grad_(False), tokenizer
