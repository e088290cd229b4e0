"""Automatically trained judges: small encoders that learn to distinguish real text from corrupted text."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ...models.loading import building, is_made_from, origin_of
from ...models.tiny import encoder_config, make_tokenizer
from ...rewards.classifier import REAL
from ...task import TinySpec
from .data import window
from .masking import SCHEDULES, choose_places

TESTED = 1024  # number of texts, half of them real, on which a judge is tested
BATCH_SIZE = 32
RATIOS = (0.05, 0.1, 0.2, 0.4)  # corrupted fractions of a text, from subtle to obvious
# The learning rate is 4e-3 at width 64 and must decrease with the width: at width 192, nothing was learned with 4e-3.
RATE_TIMES_WIDTH = 0.256
PLACES_WEIGHT = 5.0  # weight of the loss for locating corrupted places, relative to classifying the text


class Corruption:
    """Corrupts places of a text, with letter statistics from `passages`."""

    def __init__(self, passages: Sequence[str]):
        self._letters = Counter(letter for text in passages for letter in text)
        self._after: dict[str, Counter[str]] = defaultdict(Counter)
        for text in passages:
            for one, two in pairwise(text):
                self._after[one][two] += 1
        self._kinds = (self._frequent, self._following, self._shuffled)

    def spoil(self, text: str, rng: random.Random) -> str:
        """Return `text` with about one of `RATIOS` of its places changed; at least one letter differs."""
        for _ in range(20):
            places = choose_places(text, rng.choice(list(SCHEDULES)), rng.choice(RATIOS), rng)
            letters = list(text)
            rng.choice(self._kinds)(letters, places, rng)
            if (spoiled := "".join(letters)) != text:
                return spoiled
        other = next((letter for letter in self._letters if letter != text[0]), "?")
        return other + text[1:]

    def _frequent(self, letters: list[str], places: list[int], rng: random.Random) -> None:
        """Replace places by letters drawn with their frequency in the corpus."""
        drawn = rng.choices(list(self._letters), weights=list(self._letters.values()), k=len(places))
        for place, letter in zip(places, drawn, strict=True):
            letters[place] = letter

    def _following(self, letters: list[str], places: list[int], rng: random.Random) -> None:
        """Replace places by letters that follow the previous letter in the corpus."""
        for place in places:
            after = (self._after.get(letters[place - 1]) if place else None) or self._letters
            letters[place] = rng.choices(list(after), weights=list(after.values()))[0]

    def _shuffled(self, letters: list[str], places: list[int], rng: random.Random) -> None:
        """Permute the letters at these places."""
        drawn = rng.sample([letters[place] for place in places], len(places))
        for place, letter in zip(places, drawn, strict=True):
            letters[place] = letter


def train_judge(
    folder: str | Path,
    train: Sequence[str],
    test: Sequence[str],
    *,
    spec: TinySpec,
    length: int,
    steps: int,
    seed: int,
    origin: dict[str, Any],
    say: Callable[[str], None] = print,
) -> None:
    """Train a judge on passages, test it on others, report the accuracy, and save it to `folder`.

    Raises ValueError if the judge is no better than chance, or if `folder` contains anything else. A judge in `folder`
    that was trained with the same settings is kept.
    """
    import torch
    from torch.nn import functional
    from transformers import ModernBertForSequenceClassification, get_cosine_schedule_with_warmup, set_seed

    folder = Path(folder)
    if is_made_from(folder, origin):
        return
    _check_folder_is_free(folder, origin)
    set_seed(seed)
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    labels = {0: "corrupted", 1: REAL}
    config = encoder_config(spec, tokenizer, num_labels=2, id2label=labels, classifier_pooling="mean")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ModernBertForSequenceClassification(config).to(device).train()
    # One label per text is a weak signal, so a temporary head also learns which places are wrong.
    places_head = torch.nn.Linear(spec.hidden_size, 1).to(device)
    states: dict[str, torch.Tensor] = {}
    hook = model.model.register_forward_hook(lambda *call: states.update(last=call[2].last_hidden_state))
    parameters = [*model.parameters(), *places_head.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE_TIMES_WIDTH / spec.hidden_size, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, steps // 20), steps)
    corruption = Corruption(train)

    def encoded(texts: Sequence[str]) -> Any:
        inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right", truncation=True)
        return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}

    def drawn(passages: Sequence[str], rng: random.Random) -> tuple[list[str], list[str]]:
        """Return real texts, and the same texts with the second half of the batch corrupted."""
        weights = list(accumulate(map(len, passages)))
        real = [window(passages, weights, length, rng) for _ in range(BATCH_SIZE)]
        half = BATCH_SIZE // 2
        return real, real[:half] + [corruption.spoil(text, rng) for text in real[half:]]

    is_real = (torch.arange(BATCH_SIZE, device=device) < BATCH_SIZE // 2).long()
    rng = random.Random(f"{seed}-judge")
    for step in range(1, steps + 1):
        real, seen = drawn(train, rng)
        inputs = encoded(seen)
        label_loss = model(**inputs, labels=is_real).loss
        is_wrong = (inputs["input_ids"] != encoded(real)["input_ids"]).float()  # corruption keeps lengths
        places_loss = functional.binary_cross_entropy_with_logits(
            places_head(states["last"])[..., 0], is_wrong, weight=inputs["attention_mask"].float()
        )
        (label_loss + PLACES_WEIGHT * places_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, steps // 4) == 0:
            say(f"{folder.name} {step}/{steps}  loss {label_loss.item():.3f}")
    hook.remove()
    model.eval()
    right, rng = 0, random.Random(f"{seed}-test")
    with torch.inference_mode():
        for _ in range(TESTED // BATCH_SIZE):
            right += int((model(**encoded(drawn(test, rng)[1])).logits.argmax(1) == is_real).sum())
    accuracy = right / TESTED
    chance = 0.5 + 2 * math.sqrt(0.25 / TESTED)  # guessing plus two standard deviations
    say(f"{folder.name}: {accuracy:.1%} of {TESTED} held-out texts classified correctly as real or corrupted")
    if accuracy <= chance:
        raise ValueError(
            f"the judge for {folder} classifies {accuracy:.1%} of held-out texts correctly, but guessing may reach "
            f"{chance:.1%}: it was not saved; increase --judge_steps, or use a larger corpus"
        )
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with building(partial, origin):
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:
        if origin_of(folder) != origin:
            raise
        shutil.rmtree(partial)  # another run has trained the same judge meanwhile


def _check_folder_is_free(folder: Path, origin: dict[str, Any]) -> None:
    """Raise ValueError unless `folder` is empty: a different judge in it may be the reward of an unfinished run."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    way_out = "choose another --judges_folder (prepare-judge: --output_dir), or move the existing folder"
    made = origin_of(folder)
    if not isinstance(made, dict):
        raise ValueError(f"{folder} is not empty and not a judge, so no judge can be saved there: {way_out}")
    other = [f"{name} {made.get(name)}, not {value}" for name, value in origin.items() if made.get(name) != value]
    raise ValueError(f"the judge in {folder} was trained with other settings ({', '.join(other)}): {way_out}")
