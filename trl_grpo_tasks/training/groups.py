"""Groups of a rollout: taken out of it to be kept, and put into it in place of others.

A group is the completions of one prompt. One whose rewards are all equal, or without a token in the loss, has no
learning signal; extras may replace it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import pad

from ..constraints.table import MaskTable

# Entries of a rollout that belong to the policy that sampled it: its log-probs in training and at sampling time, and
# the ratio of the two that importance_sampling_correction applies, which is one per completion in sequence mode.
OF_SAMPLER = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
PER_TOKEN = (*OF_SAMPLER, "advantages", "ref_per_token_logps", "mask_numbers")  # advantages of tokens


@dataclass
class StoredGroup:
    """The completions of one prompt, as unpadded tensors on the CPU. A completion that `mask_truncated_completions`
    left out of the loss has no tokens."""

    row: str
    prompt_ids: torch.Tensor
    completion_ids: list[torch.Tensor]
    of_sampler: dict[str, list[torch.Tensor]]  # the entries OF_SAMPLER that the rollout had, of each completion
    advantages: torch.Tensor  # one value per completion, or one per token, padded with 0
    priority: float
    step: int
    # The distinct masks that the completions were sampled under (MaskTable.export), and the index of each token's
    # mask.
    masks: list[torch.Tensor] = field(default_factory=list)
    mask_of_token: list[torch.Tensor] = field(default_factory=list)
    # Of the completions when they were sampled; NaN if none could be scored.
    mean_reward: float = math.nan
    success: float = math.nan


def unpadded(rollout: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The prompts and the completions of a rollout as TRL returns it, without padding."""
    prompts = [ids[mask.bool()] for ids, mask in zip(rollout["prompt_ids"], rollout["prompt_mask"], strict=True)]
    completions = [
        ids[mask.bool()] for ids, mask in zip(rollout["completion_ids"], rollout["completion_mask"], strict=True)
    ]
    return prompts, completions


class RolloutGroups:
    """The groups of this process in the latest training rollout. `rows` of the completions, and mean reward and
    success rate of the groups in `results`, change with them. Processes hold whole groups; all of them know which
    groups of a rollout have no signal."""

    def __init__(self, trainer: Any, output: dict[str, Any], rows: list[str]):
        self._trainer, self.output, self.rows = trainer, output, rows
        self.size: int = trainer.num_generations
        self.without_signal_P: list[bool] = trainer.latest_rollout.without_signal_P.tolist()
        self.count = len(self.without_signal_P) // trainer.accelerator.num_processes
        self.first = trainer.accelerator.process_index * self.count  # the number of this process's first group
        values = [values_N.view(-1, self.size).nanmean(1) for values_N in
                  (trainer.rewarding.totals(), trainer.rewarding.component("success"))]  # fmt: skip
        own = torch.stack(values, 1)[self.first : self.first + self.count].tolist()
        self.results: list[tuple[float, float]] = [(reward, success) for reward, success in own]

    @property
    def table(self) -> MaskTable | None:
        """The table of the masks of the rollout; None if it has no masks."""
        return self._trainer.generation.tables["train"] if "mask_numbers" in self.output else None

    def stored(self, numbers: Sequence[int]) -> list[StoredGroup]:
        """These groups, ready to be stored; each must have a token in the loss. The log-probs of the rollout must be
        those of the policy that sampled it; it may have none if the groups are used at once."""
        output, table = self.output, self.table
        prompts, completions = unpadded(output)
        stored = []
        for group in numbers:
            members = range(group * self.size, (group + 1) * self.size)
            advantages = output["advantages"][list(members)].cpu()
            lengths = [len(completions[i]) for i in members]
            if advantages.ndim == 2:
                advantages = advantages[:, : max(lengths)]
                used = torch.cat([row[:length] for row, length in zip(advantages, lengths, strict=True)])
            else:
                used = advantages[torch.tensor(lengths) > 0]
            numbered = [] if table is None else zip(members, lengths, strict=True)
            masks = [output["mask_numbers"][i, :n].tolist() for i, n in numbered]
            index_of = {number: index for index, number in enumerate(dict.fromkeys(itertools.chain(*masks)))}
            stored.append(
                StoredGroup(
                    row=self.rows[members[0]],
                    prompt_ids=prompts[members[0]].cpu(),
                    completion_ids=[completions[i].cpu() for i in members],
                    of_sampler={
                        name: [output[name][i, :n].to("cpu", copy=True) for i, n in zip(members, lengths, strict=True)]
                        for name in OF_SAMPLER
                        if name in output
                    },
                    advantages=advantages,
                    priority=used.abs().mean().item() + 0.01,
                    step=self._trainer.state.global_step,
                    masks=[] if table is None else table.export(index_of),
                    mask_of_token=[torch.tensor([index_of[n] for n in row], dtype=torch.int32) for row in masks],
                )
            )
        return stored

    def replace(self, chosen: Sequence[tuple[int, StoredGroup, float]], replaced_everywhere: int) -> None:
        """Put groups, with importance weights, in place of others, and compute their log-probs under the present
        reference. All processes must call this, with the number of groups that all of them replace."""
        trainer, output, scored_rows = self._trainer, self.output, len(chosen) * self.size
        if trainer.is_sharded:  # all processes score as many rows; the result of those that are too many is not used
            scored_rows = max(gather_object([scored_rows]))
        replaced = self._put(chosen) if chosen else []
        if scored_rows and "ref_per_token_logps" in output:
            scored = replaced + [0] * (scored_rows - len(replaced))
            tensors = {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}
            part = {key: value[scored] for key, value in tensors.items() if value.ndim == 2}
            logps_B_T = trainer.scoring.logps(part, of_reference=True)
            output["ref_per_token_logps"][replaced] = logps_B_T[: len(replaced)]
        if replaced_everywhere:
            output["num_items_in_batch"] = trainer.accelerator.gather(output["completion_mask"].sum()).sum()

    def _put(self, chosen: Sequence[tuple[int, StoredGroup, float]]) -> list[int]:
        """Overwrite groups, and pad again to the new lengths. Return the replaced rows, whose log-probs under the
        reference are still to be computed."""
        rollout, table, pad_id = self.output, self.table, self._trainer._tokenizer.pad_token_id
        device = rollout["prompt_ids"].device
        prompts, completions = unpadded(rollout)
        # Cut to the length of each completion; they are padded again below.
        per_token = {
            name: [values[i, : len(ids)] for i, ids in enumerate(completions)]
            for name, values in rollout.items()
            if name in PER_TOKEN and values.ndim == 2 and values.shape[1] == rollout["completion_ids"].shape[1]
        }
        replaced = []
        for group, stored, weight in chosen:
            numbers = [] if table is None else table.add(stored.masks)
            for j in range(self.size):
                i = group * self.size + j
                replaced.append(i)
                prompts[i] = stored.prompt_ids.to(device)
                completions[i] = stored.completion_ids[j].to(device)
                for name, values in per_token.items():
                    values[i] = rollout[name].new_zeros(len(completions[i]))
                for name, of_completions in stored.of_sampler.items():
                    of_tokens = of_completions[j].to(device)
                    if name in per_token:  # if all completions had one token, a ratio per completion looks the same
                        per_token[name][i] = of_tokens.expand(len(completions[i]))
                    else:
                        rollout[name][i, : len(of_tokens)] = of_tokens
                if table is not None:
                    renumbered = [numbers[index] for index in stored.mask_of_token[j].tolist()]
                    per_token["mask_numbers"][i] = torch.tensor(renumbered, dtype=rollout["mask_numbers"].dtype)
                advantages = weight * stored.advantages[j].to(device)
                if "advantages" in per_token:
                    per_token["advantages"][i] = advantages[: len(completions[i])]
                else:
                    rollout["advantages"][i] = advantages
        for name, tensors, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
            rollout[f"{name}_ids"] = pad(tensors, pad_id, side)
            rollout[f"{name}_mask"] = pad([torch.ones_like(ids) for ids in tensors], 0, side)
        for name, values in per_token.items():
            rollout[name] = pad(values, 0, "right")
        return replaced


def check_whole_groups(args: Any, option: str) -> None:
    """Raise ValueError if groups cannot be replaced with the options of a TaskGRPOConfig."""
    local_batch = args.per_device_train_batch_size * args.steps_per_generation
    if args.use_vllm:
        raise ValueError(f"{option} does not work with use_vllm; set one of them to 0 or False")
    if local_batch % args.num_generations:
        raise ValueError(
            f"{option} needs whole groups on each process: per_device_train_batch_size * steps_per_generation "
            f"({local_batch}) must be a multiple of num_generations ({args.num_generations}); change one of "
            f"them, or set {option}=0"
        )


def check_replaceable(trainer: Any, option: str) -> None:
    """Raise ValueError if groups cannot be replaced in a trainer."""
    if trainer.task is None:
        raise ValueError(f"{option} needs a task, because new and stored groups belong to its rows; set it to 0")
    if trainer.tools or trainer._is_vlm:
        raise ValueError(f"{option} does not work with tools or vision-language models; set it to 0")
