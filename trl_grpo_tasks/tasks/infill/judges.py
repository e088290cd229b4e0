"""Judges made on the spot: a small encoder that learns to tell real text from text with corrupted places."""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ...models.loading import building, is_made_from, origin_of
from ...models.tiny import encoder_config, make_tokenizer
from ...rewards.judge import REAL
from ...task import TinySpec
from .data import window
from .masking import SCHEDULES, choose_places

TESTED = 1024  # texts, half of them real, on which a judge is tested
BATCH_SIZE = 32
RATIOS = (0.05, 0.1, 0.2, 0.4)  # of a text that is corrupted: from two letters to what nobody could miss
# 4e-3 at width 64. Steps must shrink as layers widen: at width 192 nothing was learned with 4e-3.
RATE_TIMES_WIDTH = 0.256
PLACES_WEIGHT = 5.0  # of finding the corrupted places, against telling whether there are any


class Corruption:
    """Spoils places of a text, with letters learned from `passages`."""

    def __init__(self, passages: Sequence[str]):
        self._letters = Counter(letter for text in passages for letter in text)
        self._after: dict[str, Counter[str]] = defaultdict(Counter)
        for text in passages:
            for one, two in pairwise(text):
                self._after[one][two] += 1
        self._kinds = (self._frequent, self._following, self._shuffled)

    def spoil(self, text: str, rng: random.Random) -> str:
        """`text` with about one of `RATIOS` of its places changed; at least one letter differs."""
        for _ in range(20):
            places = choose_places(text, rng.choice(list(SCHEDULES)), rng.choice(RATIOS), rng)
            spoiled = rng.choice(self._kinds)(text, places, rng)
            if spoiled != text:
                return spoiled
        other = next((letter for letter in self._letters if letter != text[0]), "?")
        return other + text[1:]

    def _frequent(self, text: str, places: list[int], rng: random.Random) -> str:
        """Letters as frequent as in the corpus."""
        drawn = rng.choices(list(self._letters), weights=list(self._letters.values()), k=len(places))
        return _replaced(text, places, drawn)

    def _following(self, text: str, places: list[int], rng: random.Random) -> str:
        """Letters that follow the one before them in the corpus."""
        letters = list(text)
        for place in places:
            after = (self._after.get(letters[place - 1]) if place else None) or self._letters
            letters[place] = rng.choices(list(after), weights=list(after.values()))[0]
        return "".join(letters)

    def _shuffled(self, text: str, places: list[int], rng: random.Random) -> str:
        """The same letters in another order."""
        return _replaced(text, places, rng.sample([text[place] for place in places], len(places)))


def _replaced(text: str, places: Sequence[int], letters: Sequence[str]) -> str:
    result = list(text)
    for place, letter in zip(places, letters, strict=True):
        result[place] = letter
    return "".join(result)


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
    """Train a judge on passages, test it on others, say how it did, and save it to `folder`.

    ValueError where it is no better than chance. One that was made in the same way before is left as it is; a folder
    with anything else in it is refused.
    """
    import torch
    from torch.nn import functional
    from transformers import ModernBertForSequenceClassification, get_cosine_schedule_with_warmup, set_seed

    folder = Path(folder)
    if is_made_from(folder, origin):
        return
    _refuse_what_is_there(folder, origin)
    set_seed(seed)
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    labels = {0: "corrupted", 1: REAL}
    config = encoder_config(spec, tokenizer, num_labels=2, id2label=labels, classifier_pooling="mean")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ModernBertForSequenceClassification(config).to(device).train()
    # A label a text teaches little, so the encoder also learns, by a head that is thrown away, which places are wrong.
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
        """Real texts, and the same with the second half of them corrupted."""
        weights = list(accumulate(map(len, passages)))
        real = [window(passages, weights, length, rng) for _ in range(BATCH_SIZE)]
        half = BATCH_SIZE // 2
        return real, real[:half] + [corruption.spoil(text, rng) for text in real[half:]]

    is_real = torch.tensor([1] * (BATCH_SIZE // 2) + [0] * (BATCH_SIZE // 2), device=device)
    rng = random.Random(f"{seed}-judge")
    for step in range(1, steps + 1):
        real, seen = drawn(train, rng)
        inputs = encoded(seen)
        told = model(**inputs, labels=is_real).loss
        is_wrong = (inputs["input_ids"] != encoded(real)["input_ids"]).float()  # corruption keeps lengths
        found = functional.binary_cross_entropy_with_logits(
            places_head(states["last"])[..., 0], is_wrong, weight=inputs["attention_mask"].float()
        )
        (told + PLACES_WEIGHT * found).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, steps // 4) == 0:
            say(f"{folder.name} {step}/{steps}  loss {told.item():.3f}")
    hook.remove()
    model.eval()
    right, rng = 0, random.Random(f"{seed}-test")
    with torch.inference_mode():
        for _ in range(TESTED // BATCH_SIZE):
            right += int((model(**encoded(drawn(test, rng)[1])).logits.argmax(1) == is_real).sum())
    accuracy = right / TESTED
    chance = 0.5 + 2 * math.sqrt(0.25 / TESTED)  # two standard deviations of guessing
    say(f"{folder.name}: {accuracy:.1%} of {TESTED} held-out texts told right, real from corrupted")
    if accuracy <= chance:
        raise ValueError(
            f"the judge for {folder} tells real from corrupted text in {accuracy:.1%} of held-out cases, and guessing "
            f"may reach {chance:.1%}: it is not handed over; give it more --judge_steps, or more text"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with building(partial, origin):
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    if folder.is_dir():
        folder.rmdir()
    partial.rename(folder)


def _refuse_what_is_there(folder: Path, origin: dict[str, Any]) -> None:
    """ValueError unless a judge can go to `folder`. Another one may be the reward of a run that is to go on."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    way_out = "give another --judges_folder (prepare-judge: --output_dir), or move it away"
    made = origin_of(folder)
    if not isinstance(made, dict):
        raise ValueError(f"{folder} is no judge and not empty, so no judge is put there: {way_out}")
    other = ", ".join(
        f"{name} {made.get(name)}, not {value}" for name, value in origin.items() if made.get(name) != value
    )
    raise ValueError(f"the judge in {folder} was made with other settings ({other}): {way_out}")
