"""The model imitates its own verified successes, which a store keeps (`own_successes`).

All processes hold the same store, so that they agree on whether there is something to imitate, and the store does not
depend on the number of processes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import pad

from ...constraints.rebuilt import replay_all
from ...constraints.table import MaskTable, pad_mask_numbers
from ...task import Row, option
from ..record import RolloutRecord
from .base import Extra

MODE = "own successes"  # the name of the table with the masks of the imitated samples
MOST_PER_REQUEST = 4  # different successes that are kept per request


@dataclass
class OwnSuccessesOptions:
    """Own successes"""

    own_successes: int = option(
        0,
        "Number of verified successes of the model that are stored and imitated. 0: none. The store keeps the best of "
        "each row, and prefers rows that are seldom solved.",
    )
    own_successes_fraction: float = option(
        0.25, "Stored samples that each batch imitates, relative to per_device_train_batch_size; at least one."
    )
    own_successes_weight: float = option(
        1.0, "Weight of the imitation in the loss: of the negative log-likelihood per token of the stored samples."
    )
    relabel: bool = option(
        False, "Also store failed completions as successes of another row that they solve, where the task finds one."
    )


@dataclass(frozen=True)
class Success:
    """A completion that solves a row of a request. `answer` is its canonical form, `total` its reward."""

    row: str
    request: str
    answer: str
    prompt_ids: list[int]
    completion_ids: list[int]
    total: float
    step: int
    is_relabelled: bool = False


class SuccessStore:
    """Keeps the best successes of each request, at most MOST_PER_REQUEST different ones and `capacity` in total.

    If it is full, the request with the most samples loses its worst one. Among equal numbers it is the request with
    the most successes so far, so that requests which are seldom solved stay; then the one whose sample is oldest.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._requests: dict[str, list[Success]] = {}  # from the best to the worst
        self._found: dict[str, int] = {}  # how often each stored request was solved, since it is stored

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    @property
    def relabelled(self) -> int:
        """The number of stored samples whose prompt was chosen after the fact."""
        return sum(success.is_relabelled for kept in self._requests.values() for success in kept)

    def update(self, successes: Iterable[Success]) -> None:
        """Add the successes of a rollout, then drop what exceeds the capacity."""
        for success in successes:
            kept = self._requests.setdefault(success.request, [])
            self._found[success.request] = self._found.get(success.request, 0) + 1
            same = [other for other in kept if other.answer == success.answer]
            if not same or same[0].total < success.total:
                kept[:] = sorted([other for other in kept if other not in same] + [success], key=lambda s: -s.total)
                del kept[MOST_PER_REQUEST:]
        for _ in range(len(self) - self._capacity):
            kept_of = self._requests
            request = max(kept_of, key=lambda one: (len(kept_of[one]), self._found[one], -kept_of[one][-1].step))
            kept_of[request].pop()
            if not kept_of[request]:
                del kept_of[request], self._found[request]

    def draw(self, count: int, rng: random.Random) -> list[Success]:
        """Draw `count` samples; none if the store is empty. No request is drawn again before every other one, and no
        sample before every other one."""
        shuffled = [rng.sample(kept, len(kept)) for kept in self._requests.values()]
        rng.shuffle(shuffled)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
        order = [success for success in turns if success is not None]
        return list(itertools.islice(itertools.cycle(order), count))

    def state_dict(self) -> dict[str, Any]:
        return {
            "requests": [[vars(s) for s in kept] for kept in self._requests.values()],
            "found": list(self._found.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stored = [[Success(**success) for success in kept] for kept in state["requests"]]
        self._requests = {kept[0].request: kept for kept in stored}
        self._found = dict(zip(self._requests, state["found"], strict=True))


class OwnSuccessesExtra(Extra):
    """Stores the successes of training rollouts. The negative log-likelihood of stored ones is added to the loss."""

    name = "own_successes"
    Options = OwnSuccessesOptions
    switch = "own_successes"
    needs_fsdp2 = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.relabel and not args.own_successes:
            raise ValueError("relabel=True needs a store: set own_successes, for example to 512, or relabel=False")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        if trainer.task is None:
            raise ValueError("own_successes needs a task, which says what is a success; set it to 0")
        if trainer.tools or trainer._is_vlm or trainer.generation.masked_policy is not None:
            raise ValueError(
                "own_successes does not work with tools, vision-language models or masked language models; set it to 0"
            )
        if self._args.relabel and not trainer.task.defines("relabel"):
            raise ValueError(f"relabel=True, but task {trainer.task.name!r} does not define relabel; set it to False")
        self.state = SuccessStore(self._args.own_successes)

    def after_rewards(self, output: dict[str, Any]) -> None:
        self.state.update(gather_object(self._own_successes() + self._relabelled()))

    # ---- what is stored

    def _own_successes(self) -> list[Success]:
        """The successes of this process's latest rollout."""
        record, found = self._record, []
        for i, outcome in enumerate(record.outcomes):
            if outcome.score is not None and outcome.score.success:
                row, prompt_ids = record.examples[i]["row"], record.prompt_ids[i]
                # Failed turns are not imitated. The last one has the masks of a first turn, because it begins anew.
                start, ids = record.last_turns[i], record.completion_ids[i]
                prompt_ids = [*prompt_ids, *ids[:start]]
                found.append(self._success(row, prompt_ids, record.completions[i], ids[start:], outcome.score.total))
        return found

    def _relabelled(self) -> list[Success]:
        """Failed completions of the latest rollout that the task relabels, with rows that they do solve."""
        if not self._args.relabel:
            return []
        trainer, record, given = self._trainer, self._record, self._record.rows
        made: list[tuple[Row, str, list[int]]] = []
        for i, outcome in enumerate(record.outcomes):
            if outcome.score is not None and not outcome.score.success:
                new = trainer.task.relabel(given[i], record.completions[i])
                if isinstance(new, tuple):
                    row, answer = new
                    ids = [
                        *trainer._tokenizer.encode(answer, add_special_tokens=False),
                        trainer._tokenizer.eos_token_id,
                    ]
                elif new is not None:
                    row, answer, ids = new, record.completions[i], record.completion_ids[i]
                if new is not None and self._allows(row, ids):
                    made.append((row, answer, list(ids)))
        texts = [json.dumps(row, ensure_ascii=False) for row, _, _ in made]
        outcomes = trainer.rewarding.rewards.executor.submit(texts, [answer for _, answer, _ in made]).result()
        found = []
        for (row, answer, ids), text, outcome in zip(made, texts, outcomes, strict=True):
            if outcome.score is not None and outcome.score.success:
                prompt_ids = trainer._tokenize_prompts([row["prompt"]])[0][0]
                found.append(self._success(text, prompt_ids, answer, ids, outcome.score.total, is_relabelled=True))
        return found

    def _allows(self, row: Row, completion_ids: list[int]) -> bool:
        """Whether the constraint of a row allows a completion that was sampled for another row, or is part of one."""
        generation = self._trainer.generation
        if generation.constraint is None:
            return True
        try:
            replay_all(generation.constraint, [row], [completion_ids], MaskTable(generation.output_size()))
        except ValueError:
            return False
        return True

    def _success(
        self, row: str, prompt_ids: Any, completion: str, ids: Any, total: float, is_relabelled: bool = False
    ) -> Success:
        trainer = self._trainer
        request, answer = trainer.task.request(json.loads(row)), trainer.rewarding.forms.of(row, completion)
        step = trainer.state.global_step
        return Success(row, request, answer, list(prompt_ids), list(ids), total, step, is_relabelled)

    # ---- the loss

    def extra_loss(self, model: Any) -> torch.Tensor | None:
        self._metrics["own_successes/size"].append(float(len(self.state)))
        if self._args.relabel:
            self._metrics["own_successes/relabelled"].append(float(self.state.relabelled))
        if len(self.state) == 0:
            return None
        imitation = self._args.own_successes_weight * self._imitation_loss(model, self.drawn())
        return imitation / self._trainer.current_gradient_accumulation_steps

    def drawn(self) -> list[Success]:
        """The samples that this process imitates in this batch. The draw depends on the store and on the number of
        the batch, which checkpoints hold."""
        args, accelerator = self._args, self._trainer.accelerator
        count = max(1, round(args.own_successes_fraction * args.per_device_train_batch_size))
        rng = random.Random(f"{args.seed}-{self._trainer._step}")
        drawn = self.state.draw(count * accelerator.num_processes, rng)
        return drawn[accelerator.process_index :: accelerator.num_processes]

    def _imitation_loss(self, model: Any, drawn: list[Success]) -> torch.Tensor:
        """The negative log-likelihood of these samples, per token of all processes. It is scored under the constraint
        but not under sampling filters, which kept other tokens when the sample was drawn."""
        trainer, accelerator, generation = self._trainer, self._trainer.accelerator, self._trainer.generation
        device, processes = accelerator.device, accelerator.num_processes
        prompts = [torch.tensor(success.prompt_ids, device=device) for success in drawn]
        completions = [torch.tensor(success.completion_ids, device=device) for success in drawn]
        pad_id = trainer._tokenizer.pad_token_id
        input_ids = torch.cat([pad(prompts, pad_id, "left"), pad(completions, pad_id, "right")], dim=1)
        mask_B_T = pad([torch.ones_like(ids) for ids in completions], 0, "right")
        attention_mask = torch.cat([pad([torch.ones_like(ids) for ids in prompts], 0, "left"), mask_B_T], dim=1)
        record = RolloutRecord(MODE)
        if generation.constraint is not None:
            table = generation.tables.start(MODE, generation.output_size())
            rows = [json.loads(success.row) for success in drawn]
            numbers = replay_all(generation.constraint, rows, [success.completion_ids for success in drawn], table)
            record.mask_numbers_B_T = pad_mask_numbers(numbers)
        with trainer.scoring.under(record):
            scored = trainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, mask_B_T.shape[1])
        nll = -(scored[0] * mask_B_T).sum()
        total, tokens = accelerator.reduce(torch.stack([nll.detach().float(), mask_B_T.sum().float()]))
        self._metrics["own_successes/loss"].append((total / tokens.clamp(min=1)).item())
        return nll * processes / tokens.clamp(min=1)  # gradients are averaged over processes
