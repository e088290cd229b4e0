"""GRPO under a constraint, in one file: generate, reward, advantages, score, loss.

    python examples/grpo_in_one_file.py

A small Llama with random weights reads a number from 2 to 9 and writes a sum of two digits, such as 7 -> 3+4. A
grammar allows sums only; a program checks them. Success rises from about 10% to over 90% in less than a minute on one
CPU core. `TaskGRPOTrainer` does the same with TRL: faster, on many devices, with checkpoints and every loss of TRL.
"""

import random

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_grpo_tasks.constraints import Grammar, GrammarConstraint, unpack
from trl_grpo_tasks.constraints.scoring import Head, HeadScale, masked_logps_and_entropies
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.training.advantages import estimate

PROMPTS, GROUP, LENGTH = 16, 8, 4  # prompts per step, completions per prompt, tokens per completion: d + d <end>
STEPS, LEARNING_RATE, TEMPERATURE = 120, 1e-3, 1.0
BETA, EPSILON = 0.02, 0.2  # weight of the KL divergence from the reference, clip of the ratio


def make_model(tokenizer) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=16, tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    )  # fmt: skip


def reward(number: int, text: str) -> float:
    """The verifier: 1 for a right sum, and less the more it is wrong, so that there is always something to learn."""
    left, _, right = text.partition("+")
    error = abs(int(left) + int(right) - number)  # under the grammar, both are digits
    return 1.0 if error == 0 else 0.2 / error


@torch.no_grad()
def generate(model, constraint, table, prompts_B_1):
    """Sample completions token by token. Return them with the number of the mask that each token was sampled under.

    A mask is what the grammar allows next. Tokens outside it have probability 0; the others are renormalised.
    """
    states = [constraint.start({}) for _ in prompts_B_1]
    ids_B_T, masks_B_T = prompts_B_1, []
    for _ in range(LENGTH):
        words = [state.mask().copy() for state in states]
        masks_B_T.append([table.number_of(word) for word in words])
        allowed_B_V = torch.from_numpy(unpack(np.stack(words), table.vocab_size))
        logits_B_V = model(ids_B_T).logits[:, -1] / TEMPERATURE
        chosen_B = torch.multinomial(logits_B_V.masked_fill(~allowed_B_V, -torch.inf).softmax(-1), 1)
        for state, token in zip(states, chosen_B[:, 0].tolist(), strict=True):
            state.accept(token)
        ids_B_T = torch.cat([ids_B_T, chosen_B], 1)
    return ids_B_T[:, 1:], torch.tensor(masks_B_T).T


def score(model, table, prompts_B_1, completions_B_T, masks_B_T):
    """Log-probs of the completions under the masks that they were sampled under.

    This is what makes the gradient exact: it belongs to the distribution that was sampled from. Without the masks, a
    negative advantage would push probability onto tokens that the grammar forbids. A forced token, such as the +, has
    log-prob 0 and no gradient. Only the rows of the LM head that some mask allows are multiplied.
    """
    inputs_B_T = torch.cat([prompts_B_1, completions_B_T], 1)[:, :-1]
    hidden_N_H = model.model(inputs_B_T).last_hidden_state.flatten(0, 1)
    head = Head(model.lm_head.weight, None, HeadScale(TEMPERATURE))
    logps_N, _ = masked_logps_and_entropies(
        hidden_N_H, head, completions_B_T.flatten(), masks_B_T.flatten().numpy(), table
    )
    return logps_N.view_as(completions_B_T)


def main(seed: int = 0, steps: int = STEPS) -> list[float]:
    """Train, and return the success of each step."""
    torch.set_num_threads(1)  # more would only slow down a model this small
    random.seed(seed)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer("0123456789+", context=16)
    constraint = GrammarConstraint(tokenizer, Grammar.regex("[0-9][+][0-9]"))
    model, reference = make_model(tokenizer), make_model(tokenizer)
    reference.load_state_dict(model.state_dict())  # the policy must not move far from where it began
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    history = []
    for step in range(steps):
        asked = [random.randint(2, 9) for _ in range(PROMPTS)]
        numbers = [number for number in asked for _ in range(GROUP)]  # the completions of a group share their prompt
        prompts_B_1 = tokenizer([str(n) for n in numbers], return_tensors="pt")["input_ids"]
        table = MaskTable(len(tokenizer))

        completions_B_T, masks_B_T = generate(model, constraint, table, prompts_B_1)
        texts = tokenizer.batch_decode(completions_B_T, skip_special_tokens=True)
        rewards_B = torch.tensor([reward(n, text) for n, text in zip(numbers, texts, strict=True)])
        # How much better a completion is than the others of its group. "maxk" or "passk" would favour the best of k.
        advantages_B_1 = estimate(rewards_B.view(PROMPTS, GROUP), "grpo").view(-1, 1)
        rollout = (table, prompts_B_1, completions_B_T, masks_B_T)
        with torch.no_grad():
            old_B_T, reference_B_T = score(model, *rollout), score(reference, *rollout)

        for _ in range(2):  # two updates from one rollout, which the ratio corrects for
            logps_B_T = score(model, *rollout)
            ratio_B_T = (logps_B_T - old_B_T).exp()
            clipped_B_T = ratio_B_T.clamp(1 - EPSILON, 1 + EPSILON)
            policy_B_T = -torch.min(ratio_B_T * advantages_B_1, clipped_B_T * advantages_B_1)
            away_B_T = reference_B_T - logps_B_T
            kl_B_T = away_B_T.exp() - away_B_T - 1  # an unbiased estimate that is never negative
            loss = (policy_B_T + BETA * kl_B_T).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        history.append((rewards_B == 1).float().mean().item())
        if step % 10 == 9:
            example = f"{numbers[0]} -> {texts[0]}"
            print(f"step {step + 1:3}  success {sum(history[-10:]) / 10:.2f}  KL {kl_B_T.mean():.3f}  {example}")
    return history


if __name__ == "__main__":
    main()
