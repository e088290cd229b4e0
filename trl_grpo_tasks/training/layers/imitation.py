"""ImitationLayer: the model imitates its own verified successes, which a store keeps (`own_successes`).

All processes hold the same store, so that they agree on whether there is something to imitate, and the store does not
depend on the number of processes.
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import pad

from ...constraints.replayed import replay_all
from ...constraints.table import MaskTable, pad_mask_numbers
from ...task import Row
from ..record import RolloutRecord
from ..stores.own_successes import Success, SuccessStore
from .archive import ArchiveLayer

MODE = "own successes"  # the name of the table with the masks of the imitated samples


class ImitationLayer(ArchiveLayer):
    """Adds the negative log-likelihood of stored successes to the loss."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._successes: SuccessStore | None = None
        if not self.args.own_successes:
            return
        if self.task is None:
            raise ValueError("own_successes needs a task, which says what is a success; set it to 0")
        if self.tools or self._is_vlm or self._policy is not None:
            raise ValueError(
                "own_successes does not work with tools, vision-language models or masked language models; set it to 0"
            )
        if self.args.relabel and not self.task.defines("relabel"):
            raise ValueError(f"relabel=True, but task {self.task.name!r} does not define relabel; set it to False")
        self._successes = SuccessStore(self.args.own_successes)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and self._successes is not None:
            self._successes.update(gather_object(self._own_successes() + self._relabelled()))
        return output

    # ---- what is stored

    def _own_successes(self) -> list[Success]:
        """The successes of this process's latest rollout."""
        record, found = self.latest_rollout, []
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
        if not self.args.relabel:
            return []
        assert self.task is not None and self._rewards is not None
        record, given = self.latest_rollout, self.latest_rollout.rows
        made: list[tuple[Row, str, list[int]]] = []
        for i, outcome in enumerate(record.outcomes):
            if outcome.score is not None and not outcome.score.success:
                new = self.task.relabel(given[i], record.completions[i])
                if isinstance(new, tuple):
                    row, answer = new
                    ids = [*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id]
                elif new is not None:
                    row, answer, ids = new, record.completions[i], record.completion_ids[i]
                if new is not None and self._allows(row, ids):
                    made.append((row, answer, list(ids)))
        texts = [json.dumps(row, ensure_ascii=False) for row, _, _ in made]
        outcomes = self._rewards.executor.submit(texts, [answer for _, answer, _ in made]).result()
        found = []
        for (row, answer, ids), text, outcome in zip(made, texts, outcomes, strict=True):
            if outcome.score is not None and outcome.score.success:
                prompt_ids = self._tokenize_prompts([row["prompt"]])[0][0]
                found.append(self._success(text, prompt_ids, answer, ids, outcome.score.total, is_relabelled=True))
        return found

    def _allows(self, row: Row, completion_ids: list[int]) -> bool:
        """Whether the constraint of a row allows a completion that was sampled for another row, or is part of one."""
        if self._constraint is None:
            return True
        try:
            replay_all(self._constraint, [row], [completion_ids], MaskTable(self._output_size()))
        except ValueError:
            return False
        return True

    def _success(
        self, row: str, prompt_ids: Any, completion: str, ids: Any, total: float, is_relabelled: bool = False
    ) -> Success:
        assert self._forms is not None and self.task is not None
        request, answer = self.task.request(json.loads(row)), self._forms.of(row, completion)
        return Success(row, request, answer, list(prompt_ids), list(ids), total, self.state.global_step, is_relabelled)

    # ---- the loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self._successes is None or not self.model.training:
            return loss
        metrics = self._metrics["train"]
        metrics["own_successes/size"].append(float(len(self._successes)))
        if self.args.relabel:
            metrics["own_successes/relabelled"].append(float(self._successes.relabelled))
        if len(self._successes) == 0:
            return loss
        imitation = self.args.own_successes_weight * self._imitation_loss(model, self._drawn(self._successes))
        return loss + imitation / self.current_gradient_accumulation_steps

    def _drawn(self, store: SuccessStore) -> list[Success]:
        """The samples that this process imitates in this batch. The draw depends on the store and on the number of
        the batch, which checkpoints hold."""
        count = max(1, round(self.args.own_successes_fraction * self.args.per_device_train_batch_size))
        rng = random.Random(f"{self.args.seed}-{self._step}")
        drawn = store.draw(count * self.accelerator.num_processes, rng)
        return drawn[self.accelerator.process_index :: self.accelerator.num_processes]

    def _imitation_loss(self, model: Any, drawn: list[Success]) -> torch.Tensor:
        """The negative log-likelihood of these samples, per token of all processes. It is scored under the constraint
        but not under sampling filters, which kept other tokens when the sample was drawn."""
        device, processes = self.accelerator.device, self.accelerator.num_processes
        prompts = [torch.tensor(success.prompt_ids, device=device) for success in drawn]
        completions = [torch.tensor(success.completion_ids, device=device) for success in drawn]
        pad_id = self._tokenizer.pad_token_id
        input_ids = torch.cat([pad(prompts, pad_id, "left"), pad(completions, pad_id, "right")], dim=1)
        mask_B_T = pad([torch.ones_like(ids) for ids in completions], 0, "right")
        attention_mask = torch.cat([pad([torch.ones_like(ids) for ids in prompts], 0, "left"), mask_B_T], dim=1)
        record = RolloutRecord(MODE)
        if self._constraint is not None:
            table = self._tables.start(MODE, self._output_size())
            rows = [json.loads(success.row) for success in drawn]
            numbers = replay_all(self._constraint, rows, [success.completion_ids for success in drawn], table)
            record.mask_numbers_B_T = pad_mask_numbers(numbers)
        with self._scoring(record):
            logps_B_T = self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, mask_B_T.shape[1])[0]
        nll = -(logps_B_T * mask_B_T).sum()
        total, tokens = self.accelerator.reduce(torch.stack([nll.detach().float(), mask_B_T.sum().float()]))
        self._metrics["train"]["own_successes/loss"].append((total / tokens.clamp(min=1)).item())
        return nll * processes / tokens.clamp(min=1)  # gradients are averaged over processes

    def _common_parts(self) -> dict[str, Any]:
        return super()._common_parts() | ({} if self._successes is None else {"own_successes": self._successes})
