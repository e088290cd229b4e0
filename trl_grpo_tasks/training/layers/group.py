"""GroupLayer: groups without a learning signal are replaced by new groups of other prompts, and by stored groups.

A group whose rewards are all equal, or without a token in the loss, teaches nothing. `resample_rounds` samples new
groups in its place, `replay_size` keeps groups of earlier rollouts.
"""

from __future__ import annotations

import copy
import math
import random
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl.trainer.utils import use_adapter

from ..control.reference import ADAPTER
from ..stores.replay import ReplayBuffer, StoredGroup, groups_of, put_groups
from .imitation import ImitationLayer


class GroupLayer(ImitationLayer):
    """Processes hold whole groups; all of them know which groups of a rollout have no signal."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._replay = self._make_replay()
        for name in ("resample_rounds", "replay_size"):
            if getattr(self.args, name) and self.task is None:
                raise ValueError(f"{name} needs a task, because new and stored groups belong to its rows; set it to 0")
            if getattr(self.args, name) and (self.tools or self._is_vlm):
                raise ValueError(f"{name} does not work with tools or vision-language models; set it to 0")

    def _make_replay(self) -> ReplayBuffer | None:
        args = self.args
        if not args.replay_size:
            return None
        seed = args.seed + self.accelerator.process_index
        return ReplayBuffer(args.replay_size, args.replay_max_age, args.replay_alpha, seed=seed)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and (self.args.resample_rounds or self._replay is not None):
            rows = [example["row"] for example in inputs]
            results = self._group_results()
            if self.args.resample_rounds:
                self._resample_groups(output, rows, results)
            if self._replay is not None:
                self._replay_groups(self._replay, output, rows, results)
        return output

    def _train_example(self, index: int) -> dict[str, Any]:
        """The example of the training data that stands for this index."""
        return self.train_dataset[index]

    def _local_groups(self) -> tuple[int, int]:
        """The number of groups of this process in the latest rollout, and the number of the first."""
        assert self.latest_rollout.without_signal_P is not None
        groups = len(self.latest_rollout.without_signal_P) // self.accelerator.num_processes
        return groups, self.accelerator.process_index * groups

    def _group_results(self) -> list[tuple[float, float]]:
        """The mean reward and the success rate of each group of this process in the latest rollout."""
        groups, first = self._local_groups()
        values = [values_N.view(-1, self.num_generations).nanmean(1) for values_N in
                  (self._totals(), self._component("success"))]  # fmt: skip
        return [(reward, success) for reward, success in torch.stack(values, 1)[first : first + groups].tolist()]

    # ---- new groups

    @torch.no_grad()
    def _resample_groups(self, output: dict[str, Any], rows: list[str], results: list[tuple[float, float]]) -> None:
        """Replace groups without signal by new groups of other prompts, in at most `resample_rounds` more rollouts.

        Each round samples as many groups per process as the process with most empty ones needs. Metrics and logged
        completions stay those of the first rollout, whose prompts were not selected by their outcome. `rows` of the
        completions and `results` of the groups change with them.
        """
        size, record, table = self.num_generations, self.latest_rollout, self._tables_of(output)
        metrics, logs = copy.deepcopy(dict(self._metrics["train"])), copy.deepcopy(self._logs)
        groups, first = self._local_groups()
        assert record.without_signal_P is not None
        empty_P = record.without_signal_P.tolist()
        solved_P = (self._component("success").view(-1, size) == 1).all(1).tolist()
        dropped: list[int] = []
        chosen: list[tuple[int, StoredGroup, float]] = []
        sampled = 0
        for number in range(self.args.resample_rounds):
            most = max(sum(empty_P[i : i + groups]) for i in range(0, len(empty_P), groups))
            if most == 0:
                break
            drawn = [self._train_example(self._draw(number, j)) for j in range(most)]
            examples = [example for example in drawn for _ in range(size)]
            fresh = super()._generate_and_score_completions(examples)
            assert self.latest_rollout.without_signal_P is not None
            fresh_empty_P = self.latest_rollout.without_signal_P.tolist()
            sampled += len(fresh_empty_P)
            pairs = _paired(empty_P, fresh_empty_P, self.accelerator.num_processes)
            mine = [
                (old - first, new - self._local_groups()[1]) for old, new in pairs if first <= old < first + groups
            ]
            stored = groups_of(fresh, [example["row"] for example in examples], [new for _, new in mine], size,
                               self.state.global_step, self._tables_of(fresh))  # fmt: skip
            chosen += [(old, group, 1.0) for (old, _), group in zip(mine, stored, strict=True)]
            fresh_results = self._group_results()
            for old, new in mine:
                results[old] = fresh_results[new]
            for old, _ in pairs:
                empty_P[old] = False
                dropped.append(old)
        self.latest_rollout = record
        for values, before in ((self._metrics["train"], metrics), (self._logs, logs)):
            values.clear()
            values.update(before)
        if table is not None:
            self._tables["train"] = table
        record.without_signal_P = torch.tensor(empty_P)
        self._replace(output, chosen, len(dropped))
        for group, stored_group, _ in chosen:
            rows[group * size : (group + 1) * size] = [stored_group.row] * size
        self._metrics["train"]["resample/sampled_groups"].append(float(sampled))
        self._metrics["train"]["resample/replaced_groups"].append(float(len(dropped)))
        if dropped:
            self._metrics["train"]["resample/dropped_solved"].append(sum(solved_P[i] for i in dropped) / len(dropped))

    def _draw(self, round_number: int, place: int) -> int:
        """The index of a training row; it depends on nothing that a checkpoint would have to store."""
        key = f"{self.args.seed}-{self._step}-{round_number}-{self.accelerator.process_index}-{place}"
        return random.Random(key).randrange(len(self.train_dataset))

    def _tables_of(self, output: dict[str, Any]) -> Any:
        """The table of the masks of a rollout; None if it has no masks."""
        return self._tables["train"] if "mask_numbers" in output else None

    def _replace(
        self, output: dict[str, Any], chosen: list[tuple[int, StoredGroup, float]], replaced_everywhere: int
    ) -> None:
        """Put groups into a rollout. All processes must call this: other ones may have replaced groups."""
        replaced_rows = len(chosen) * self.num_generations
        if self._is_sharded:
            replaced_rows = max(gather_object([replaced_rows]))
        if replaced_rows:
            self._put_groups(output, chosen, replaced_rows)
        if replaced_everywhere:
            output["num_items_in_batch"] = self.accelerator.gather(output["completion_mask"].sum()).sum()

    # ---- stored groups

    @torch.no_grad()
    def _replay_groups(
        self, buffer: ReplayBuffer, output: dict[str, Any], rows: list[str], results: list[tuple[float, float]]
    ) -> None:
        """Store groups with signal and their results, and replace groups without signal by stored ones."""
        step, size = self.state.global_step, self.num_generations
        groups, first = self._local_groups()
        assert self.latest_rollout.without_signal_P is not None
        is_empty_P = self.latest_rollout.without_signal_P.tolist()
        is_empty = is_empty_P[first : first + groups]
        if "old_per_token_logps" not in output:
            # TRL leaves them out where they equal the current ones, which those of a stored group do not.
            output["old_per_token_logps"] = self._score(output, of_reference=False)
        buffer.drop_older(step)
        buffer.drop_unlike(output)
        allotted = buffer.allot(is_empty_P, gather_object([len(buffer)]), self.args.replay_fraction)
        mine = sorted(group - first for group in allotted if first <= group < first + groups)
        drawn = buffer.sample(len(mine))
        chosen = [(group, stored, weight) for group, (stored, weight) in zip(mine, drawn, strict=True)]
        kept = [group for group in range(groups) if not is_empty[group]]
        new = groups_of(output, rows, kept, size, step, self._tables_of(output))
        for number, group in zip(kept, new, strict=True):
            group.mean_reward, group.success = results[number]
            buffer.add(group)
        self._replace(output, chosen, len(allotted))
        replayed = [stored for _, stored, _ in chosen]
        facts = [
            [1.0, float(step - one.step), one.mean_reward, one.success, float(not math.isnan(one.success))]
            for one in replayed
        ]
        sums = torch.tensor([[0.0] * 5, *facts], device=self.accelerator.device).nansum(0)
        sums = gather(torch.cat([sums, sums.new_tensor([len(buffer)])])).view(-1, 6).sum(0)
        replaced_groups, age, reward, success, with_results, stored_groups = sums.tolist()
        metrics = self._metrics["train"]
        metrics["replay/size"].append(stored_groups)
        metrics["replay/replaced_groups"].append(replaced_groups)
        if replaced_groups:
            metrics["replay/age"].append(age / replaced_groups)
        if with_results:
            metrics["replay/mean_reward"].append(reward / with_results)
            metrics["replay/success"].append(success / with_results)

    def _put_groups(
        self, output: dict[str, Any], chosen: list[tuple[int, StoredGroup, float]], scored_rows: int
    ) -> None:
        """Write stored groups into a rollout and compute their reference log-probs with the present reference, which
        scores this number of rows: where they are more than those replaced, the rest is not used."""
        replaced: list[int] = []
        if chosen:
            replaced = put_groups(
                output, chosen, self.num_generations, self._tokenizer.pad_token_id, self._tables_of(output)
            )
        if "ref_per_token_logps" in output:
            scored = replaced + [0] * (scored_rows - len(replaced))
            part = {
                key: value[scored]
                for key, value in output.items()
                if isinstance(value, torch.Tensor) and value.ndim == 2
            }
            output["ref_per_token_logps"][replaced] = self._score(part, of_reference=True)[: len(replaced)]

    def _score(self, output: dict[str, Any], of_reference: bool) -> torch.Tensor:
        """Log-probs of a rollout's completions under the present policy or reference."""
        model, adapter = self.model, nullcontext()
        if of_reference and self.ref_model is not None:
            model = self.ref_model
        elif of_reference:
            policy = self.accelerator.unwrap_model(self.model)
            adapter = use_adapter(policy, ADAPTER if ADAPTER in policy.peft_config else None)
        with self._scoring(self._record_of(output)), adapter:
            return self._get_per_token_logps_and_entropies(
                model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
            )[0]

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | ({} if self._replay is None else {"replay": self._replay})


def _paired(empty_P: list[bool], fresh_empty_P: list[bool], processes: int) -> list[tuple[int, int]]:
    """Pair each process's groups without signal with its new groups that have one: (number of the old group, number
    of the new one)."""
    old, new = len(empty_P) // processes, len(fresh_empty_P) // processes
    pairs = []
    for process in range(processes):
        empty = [i for i in range(process * old, (process + 1) * old) if empty_P[i]]
        usable = [i for i in range(process * new, (process + 1) * new) if not fresh_empty_P[i]]
        pairs += list(zip(empty, usable, strict=False))
    return pairs
