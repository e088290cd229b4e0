"""What each metric means: the text of docs/reference/metrics.md. Tests compare the names with those the code logs."""

# What TaskGRPOTrainer adds. `k` stands for a number, `NAME` for the name of a component.
TRAINING = {
    "pass@k": "Probability that at least one of k completions of a prompt succeeds: the unbiased estimate from the "
    "group, averaged over prompts, for k = 1, 2, 4, ... and the group size. `pass@1` is the success rate.",
    "max@k": "Expected best reward among k completions of a prompt, estimated in the same way. `max@1` is the mean "
    "reward.",
    "distinct_answers": "Number of different valid answers to a prompt, divided by its completions. Logged in "
    "evaluations during training only.",
    "groups_without_signal": "Share of groups that teach nothing, because all rewards are equal, all advantages are "
    "0, or `mask_truncated_completions` masks all completions. With `normalize_then_sum`, a group "
    "whose components differ has a signal. At 1 nothing is learned: use easier prompts, more generations, "
    "a cold start, or graded rewards.",
    "advantage_mean": "Mean advantage over completions. Without `gamma` and `thought_weight`, it is 0 for "
    "estimators that subtract the group mean.",
    "advantage_clipped_fraction": "Share of advantages that `advantage_clip` changed. Logged if that option is set.",
    "pg_loss": "Policy-gradient loss before clipping: the mean over tokens of minus the ratio times the advantage.",
    "logp_mean": "Mean log-probability of the sampled tokens under the policy.",
    "kl_penalty": "The KL term of the loss: `beta` times `kl`. Logged if `beta` is above 0.",
    "beta": "Current KL coefficient. Logged if `kl_target` is set, which adapts it.",
    "guard/weight": "Weight that `guard` added to the usual weight of its component in this rollout.",
    "guard/floor": "Mean of the component that `guard` keeps. Logged as soon as it has been measured.",
    "reward_failures": "Share of completions without a score: the task returned None, the time limit was reached, or "
    "the worker died. They get advantage 0.",
    "constraint/allowed_tokens": "Mean number of tokens that the constraint allowed per position.",
    "constraint/forced_fraction": "Share of positions at which the constraint allowed only one token.",
    "constraint/allowed_mass": "Probability that the model without the constraint gives to allowed tokens, on some of "
    "the positions. It approaches 1 as the model learns the format.",
    "thought/ended": "Share of completions whose thought ended. Logged with `constrain` if the task has thoughts.",
    "thought/tokens": "Mean number of tokens of the thoughts that ended, the marker included.",
    "thought/answer_tokens": "Mean number of tokens after the thought.",
    "thought/entropy": "Mean entropy over the tokens of thoughts that were not forced.",
    "thought/answer_entropy": "The same for answers.",
    "environment/turns": "Mean number of turns of a completion. Logged for tasks with an environment.",
    "repair/turns": "Mean number of turns of a completion. Logged with `repair_turns`.",
    "repair/repaired": "Share of completions that failed in their first turn and succeeded in a later one.",
    "sampling/allowed_tokens": "Mean number of tokens that top_k, top_p and min_p left per position. Logged if one of "
    "them is set and there is no constraint.",
    "sampling/forced_fraction": "Share of positions at which these filters left one token.",
    "sampling/logp_difference_mean": "Mean absolute difference between the log-probabilities with which tokens were "
    "sampled and those that training computes for them. A hint is printed if it is larger than rounding explains.",
    "sampling/logp_difference_max": "The largest such difference.",
    "rollout/staleness": "Optimizer steps from the weights that sampled a rollout to those trained on it, with "
    "`rollouts_ahead`.",
    "rollout/staleness_max": "The largest since the last log.",
    "resample/sampled_groups": "Groups sampled in addition, to replace those without signal. Logged with "
    "`resample_rounds`, which leaves all other metrics as they are: they describe the first rollout.",
    "resample/replaced_groups": "How many groups without signal were replaced by them.",
    "resample/dropped_solved": "Share of the replaced groups in which every completion had succeeded.",
    "discount/mean": "Mean factor of the advantage over tokens that were not forced. Logged with `gamma` below 1.",
    "curriculum/level": "Index of the current level, from 0. Logged with `curriculum`.",
    "replay/size": "Groups in the replay buffers of all processes.",
    "replay/replaced_groups": "Groups without signal that stored groups replaced in this rollout.",
    "replay/age": "Mean age of these stored groups in optimizer steps.",
    "replay/mean_reward": "Mean reward of the completions of these stored groups, when they were sampled.",
    "replay/success": "Share of these completions that had succeeded.",
    "own_successes/size": "Successes in the store. Logged with `own_successes`.",
    "own_successes/loss": "Negative log-likelihood per token of the imitated samples, before its weight.",
    "own_successes/relabelled": "Stored samples that failed for their own prompt and solve another. Logged with "
    "`relabel`.",
    "perf/rollout_wait_seconds": "Seconds that training waited for a rollout, with `rollouts_ahead`.",
    "perf/reward_seconds": "Mean seconds that the score of a completion took.",
    "perf/judge_requests": "Requests to the LLM judge, including retries. This and the following are totals of all "
    "processes since the start of the run, logged if there is a judge (`--judge_url` of task prompts).",
    "perf/judge_cache_hits": "Completions whose grades were known.",
    "perf/judge_failures": "Completions that the judge could not grade.",
    "perf/judge_tokens_in": "Tokens that the judge has read.",
    "perf/judge_tokens_out": "Tokens that the judge has written.",
    "perf/judge_cost": "Cost of the judge, in the unit of its prices.",
    "perf/vllm_mask_ms": "Milliseconds per pass that the CPU spends on the masks of a colocated vLLM.",
    "perf/reward_cache_hit_rate": "Share of completions since the start whose score was known already.",
}

# What TRL and transformers log in every run of TaskGRPOTrainer, in their order.
TRL = {
    "loss": "Value of the loss. It is near 0 by construction and says little about progress; watch `reward`.",
    "grad_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate of this step.",
    "epoch": "Passes over the training rows.",
    "num_tokens": "Tokens processed so far, prompts and completions.",
    "reward": "Mean of the weighted sum of all components.",
    "reward_std": "Standard deviation of the reward over the completions of a rollout.",
    "frac_reward_zero_std": "Share of groups whose rewards are all equal.",
    "rewards/NAME/mean": "Mean of one component before weighting; also of `success` and `valid`.",
    "rewards/NAME/std": "Standard deviation of that component.",
    "kl": "Estimated KL divergence from the reference policy, per token. Logged if `beta` is above 0.",
    "entropy": "Mean entropy of the policy, per token.",
    "entropy_coef": "Weight of the entropy in the loss after this step. Logged if `entropy_coef` or "
    "`use_adaptive_entropy` is set; with the latter it is applied after steps whose entropy is at most "
    "`entropy_target`.",
    "policy_loss": "The loss without the entropy bonus. Logged with `entropy_coef`.",
    "clip_ratio/low_mean": "Share of tokens whose ratio was clipped from below; negative advantages.",
    "clip_ratio/high_mean": "Share of tokens whose ratio was clipped from above; positive advantages.",
    "clip_ratio/region_mean": "Share of tokens that were clipped on either side.",
    "clip_ratio/low_min": "Smallest share clipped from below on any process.",
    "clip_ratio/high_max": "Largest share clipped from above on any process.",
    "completions/mean_length": "Mean number of tokens of a completion.",
    "completions/min_length": "Shortest completion in tokens.",
    "completions/max_length": "Longest completion in tokens.",
    "completions/clipped_ratio": "Share of completions that reached `max_completion_length` without ending.",
    "completions/mean_terminated_length": "Mean length of the completions that ended by themselves.",
    "completions/min_terminated_length": "Shortest of these.",
    "completions/max_terminated_length": "Longest of these.",
    "step_time": "Seconds per step.",
}

# What evaluations report, with a 95% bootstrap interval over rows.
EVALUATION = {
    "success": "Share of completions that the task calls a success.",
    "valid": "Share of completions that could be read as an answer.",
    "success/LEVEL": "Success on the rows of one level, where rows have several.",
    "reward": "Mean reward.",
    "NAME": "Mean of one component, or of a fact that the task reports, such as `iou`.",
    "pass@k": "Probability that at least one of k completions of a row succeeds (unbiased).",
    "max@k": "Expected best reward among k completions of a row (unbiased).",
    "distinct_answers": "Number of different valid answers to a row, divided by its completions.",
    "distinct_ngrams": "Share of word triples of a row's completions that differ from each other.",
    "unscored": "Share of completions without a score. Means leave them out.",
    "tokens": "Mean number of tokens of a completion.",
    "cut_off": "Share of completions that reached `max_completion_length` before their end.",
    "seconds": "Seconds that the evaluation took.",
}
