"""The discount of advantages: factors by hand, what a run without it gives, and the groups that replay keeps."""

import pytest
import torch

from tests.training.test_resampling import MIXED, make


def rolled_out(tiny_path, folder, script, **options):
    trainer = make(tiny_path, folder, script, **options)
    examples = [trainer.train_dataset[i // 4] for i in range(len(script))]
    return trainer, trainer._generate_and_score_completions(examples)


@pytest.mark.parametrize("constrain", [False, True])
def test_factors_by_hand(tiny_path, tmp_path, constrain):
    """Under the constraint, the end after three letters is forced. A completion that is cut off is not in the loss."""
    script = ["a", "ab", "abc", "bb-"]
    options = {"constrain": constrain, "mask_truncated_completions": True, "advantage_estimator": "mean"}
    trainer, output = rolled_out(tiny_path, tmp_path / "on", script, gamma=0.5, **options)
    _, plain = rolled_out(tiny_path, tmp_path / "off", script, **options)
    factors = [
        [0.5, 1, 0, 0],
        [0.25, 0.5, 1, 0],
        [0.25, 0.5, 1, 1] if constrain else [0.125, 0.25, 0.5, 1],
        [0, 0, 0, 0],
    ]
    assert plain["advantages"].abs().min() > 0
    torch.testing.assert_close(output["advantages"], plain["advantages"][:, None] * torch.tensor(factors))
    mean = (1.5 + 1.75 + 1.75) / 8 if constrain else (1.5 + 1.75 + 1.875) / 9
    assert trainer._metrics["train"]["discount/mean"] == [pytest.approx(mean)]
    assert list(trainer._logs["advantages"]) == pytest.approx(plain["advantages"].tolist()), "those of completions"


def test_the_text_of_tools_is_no_decision(tiny_path, tmp_path):
    trainer, _ = rolled_out(tiny_path, tmp_path, MIXED, gamma=0.5)
    output = {"completion_mask": torch.tensor([[1, 1, 1, 1, 0]]), "tool_mask": torch.tensor([[1, 0, 0, 1, 1]])}
    output["advantages"] = torch.tensor([8.0])
    trainer.extras["discount"].after_rewards(output)
    assert output["advantages"].tolist() == [[4.0, 4.0, 4.0, 8.0, 0.0]]
