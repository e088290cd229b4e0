"""RolloutRecord: what is known about one rollout of this process, from its prompts to its rewards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from ..rewards.executor import Outcome


@dataclass
class RolloutRecord:
    """One rollout of one process. Each stage of a training step fills in its fields and reads those before it.

    TRL's methods take no argument of ours, so the record is an attribute of the trainer, `latest_rollout`, while they
    run. Shapes: B completions of this process, N completions of all processes, P groups of all processes, T tokens,
    F reward components.
    """

    mode: str  # "train" or "eval"
    examples: list[dict[str, Any]] = field(default_factory=list)  # entries of the data set, one per completion

    # Generation
    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    sampling_logps: list[list[float]] | None = None  # None: the generator did not return them
    mask_numbers_B_T: torch.Tensor | None = None  # the mask of each token, in the trainer's table; None: no masks
    completions: list[str] = field(default_factory=list)
    last_turns: list[int] = field(default_factory=list)  # the first token of each completion's last turn

    # Scoring
    logps_B_T: torch.Tensor | None = None  # the latest log-probs that were computed for these completions
    entropies_B_T: torch.Tensor | None = None  # those that came with them, where TRL asked for them

    # Rewards and advantages
    outcomes: list[Outcome] = field(default_factory=list)  # the task's verdicts, one per completion
    rewards_N_F: torch.Tensor | None = None
    without_signal_P: torch.Tensor | None = None  # True for groups whose advantages are all 0

    def keep(self, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor | None) -> None:
        """Keep what was computed for the completions, without its graph."""
        self.logps_B_T = logps_B_T.detach()
        self.entropies_B_T = None if entropies_B_T is None else entropies_B_T.detach()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The task's rows; without a task, the entries of the data set."""
        return [json.loads(example["row"]) if "row" in example else example for example in self.examples]
