"""Trainers that sample nothing: their completions are given, with the masks that sampling would have recorded."""

from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints.rebuilt import replay_all
from trl_grpo_tasks.constraints.table import pad_mask_numbers


class ScriptedTrainer(TaskGRPOTrainer):
    """Its completions are those of `script`, in the order of the rollouts. Those that end with "-" are cut off. The
    sampler's log-probs depend on the token and its place only."""

    script: list = []
    has_logps = True

    def texts(self, count):
        texts, self.script = self.script[:count], self.script[count:]
        return texts

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = self.texts(len(prompt_ids))
        ids = [self._tokenizer(text)["input_ids"] + [self._tokenizer.eos_token_id] for text in texts]
        ids = [one[:-2] if text.endswith("-") else one for one, text in zip(ids, texts, strict=True)]
        if self.generation.constraint is not None:
            table = self.generation.tables.start("train", self.generation.output_size())
            masks = replay_all(self.generation.constraint, self.latest_rollout.rows, ids, table)
            self.latest_rollout.mask_numbers_B_T = pad_mask_numbers(masks)
        logps = [[-2.0 - 0.1 * token - 0.2 * place for place, token in enumerate(one)] for one in ids]
        return ids, logps if self.has_logps else None


class FixedTrainer(ScriptedTrainer):
    """A completion is a function of the step and of its place in the batch of its process."""

    fixed: list = []
    has_logps = False

    def first(self, count):
        return self.state.global_step * count

    def texts(self, count):
        return [self.fixed[(self.first(count) + i) % len(self.fixed)] for i in range(count)]


class PlacedTrainer(FixedTrainer):
    """A completion is a function of the step and of its place in the batch that is gathered over processes."""

    def first(self, count):
        return self.accelerator.process_index * count + 5 * self.state.global_step
