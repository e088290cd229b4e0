"""A frozen judge: a sequence-classification model that says how real a text looks, from 0 to 1.

It scores in batches, on the accelerator where there is one, remembers what it said, and is never trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..files import looks_local
from ..task import Row

REAL = "real"  # the name of the label that stands for real text, where a model has two
BATCH_SIZE = 128
CACHE_SIZE = 20_000


class FrozenJudge:
    """The judge at `source`, a folder or a Hub id. `text_of(row, completion)` is the text it judges; None is worth 0.

    Loaded when it is first asked. As a reward function of TRL it takes the rows from the column `row`. What it said is
    part of a checkpoint: a text judged again in another batch could differ in the last bit.
    """

    def __init__(self, name: str, source: str, text_of: Callable[[Row, str], str | None]):
        self.__name__ = name
        self._source, self._text_of = source, text_of
        self._model: Any = None
        self._tokenizer: Any = None
        self._said: dict[str, float] = {}

    def __call__(self, completions: Sequence[Any], row: Sequence[str], **_: Any) -> list[float]:
        return self.score([json.loads(text) for text in row], [text_of(completion) for completion in completions])

    def score(self, rows: Sequence[Row], completions: Sequence[str]) -> list[float]:
        """How real each completion looks in its row."""
        texts = [self._text_of(row, completion) for row, completion in zip(rows, completions, strict=True)]
        return self.judge(texts)

    def judge(self, texts: Sequence[str | None]) -> list[float]:
        """How real each text looks; 0 for None."""
        keys = ["" if text is None else hashlib.sha256(text.encode(errors="replace")).hexdigest() for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if text is not None and key not in self._said}
        known = {key: self._said[key] for key in keys if key in self._said}
        known |= dict(zip(new, self._ask(list(new.values())), strict=True))
        self._said |= known
        while len(self._said) > CACHE_SIZE:
            del self._said[next(iter(self._said))]
        return [known.get(key, 0.0) for key in keys]

    @torch.inference_mode()
    def _ask(self, texts: Sequence[str]) -> list[float]:
        if not texts:
            return []
        if self._model is None:
            self._model, self._tokenizer = load_judge(self._source)
        model = self._model
        if model.training or any(p.requires_grad for p in model.parameters()):
            raise RuntimeError(f"the judge {self._source!r} is being trained; a judge must stay frozen")
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
        return {"said": dict(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said = dict(state["said"])


def frozen_of(judges: Mapping[str, Any]) -> dict[str, FrozenJudge]:
    """Those of a task's judges that score in batches themselves; the others are models that TRL asks."""
    return {name: judge for name, judge in judges.items() if isinstance(judge, FrozenJudge)}


def text_of(completion: Any) -> str:
    """The text of a completion as TRL hands it over: a string, or a list with one assistant message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def check_judge(source: str) -> None:
    """ValueError, from its configuration alone, where `source` can be no judge."""
    from transformers import AutoConfig

    path = Path(source).expanduser()
    if (looks_local(source) or path.is_dir()) and not (path / "config.json").is_file():
        raise ValueError(
            f"judge {source!r}: there is no model in that folder; make one with trl-grpo-tasks task infill "
            f"prepare-judge --output_dir {source}, or leave the option out to have one made"
        )
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"judge {source!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    name = (config.architectures or ["a model without a head"])[0]
    if not name.endswith("ForSequenceClassification"):
        raise ValueError(
            f"judge {source!r} is {name}, which classifies no texts; give a ...ForSequenceClassification, such as "
            "trl-grpo-tasks task infill prepare-judge makes"
        )
    if config.num_labels > 2:
        raise ValueError(f"judge {source!r} has {config.num_labels} labels; a judge has one score, or real and not")


def load_judge(source: str) -> tuple[Any, Any]:
    """A judge's model, frozen and on the accelerator where there is one, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_judge(source)
    model = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="right")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = "cpu"
    if torch.cuda.is_available():
        from accelerate import PartialState

        device = PartialState().device
    return model.to(device).eval().requires_grad_(False), tokenizer
