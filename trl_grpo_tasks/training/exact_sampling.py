"""Checks of options of sampling: where log-probs are exact, those of the samples must be computable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..constraints.filters import NAMES as FILTERS

# Options of `generate` that scoring cannot reproduce, with their neutral value; None is neutral too.
UNSUPPORTED_SAMPLING: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    "do_sample": True,
    "token_healing": False,
    **dict.fromkeys(("top_h", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")),
    **dict.fromkeys(("exponential_decay_length_penalty", "begin_suppress_tokens", "sequence_bias", "constraints")),
    **dict.fromkeys(("watermarking_config", "dola_layers", "force_words_ids", "prompt_lookup_num_tokens")),
}
# Options of `generate` that do not change the probabilities of tokens.
NEUTRAL_SAMPLING = (
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "disable_compile", "eos_token_id",
    "low_memory", "max_cache_len", "max_length", "max_new_tokens", "max_time", "pad_token_id", "prefill_chunk_size",
    "remove_invalid_values", "renormalize_logits", "stop", "stop_strings", "stop_token_ids", "use_cache",
)  # fmt: skip
# Those of them that say where a completion ends.
ENDINGS = ("eos_token_id", "max_length", "max_new_tokens", "max_time", "stop", "stop_strings", "stop_token_ids")


def check_temperature(args: Any) -> None:
    """Raise ValueError if training would sample at temperature 0, which evaluations may."""
    if args.temperature == 0:
        raise ValueError(
            "temperature=0 gives the same completion each time, and GRPO learns from differences; set it above 0, for "
            "example to 1 (only evaluations take 0)"
        )


def inexact_option(options: Mapping[str, Any], source: str) -> str:
    """Return an option of `generate` that scoring cannot reproduce, with its value and source; "" if there is none."""
    for name, neutral in UNSUPPORTED_SAMPLING.items():
        if options.get(name) not in (None, neutral, []):
            return f"{name}={options[name]} in {source} (neutral: {neutral})"
    return ""


def inexact_sampling(args: Any) -> str:
    """Return what in a TaskGRPOConfig makes sampled tokens follow another distribution than their log-probs; ""
    if nothing does."""
    given = args.generation_kwargs or {}
    found = inexact_option({"repetition_penalty": args.repetition_penalty}, "the options")
    found = found or inexact_option(given, "generation_kwargs")
    if not found and given.get("temperature", args.temperature) != args.temperature:
        found = f"temperature={given['temperature']} in generation_kwargs, but temperature={args.temperature}"
    unknown = sorted(set(given) - {*UNSUPPORTED_SAMPLING, *NEUTRAL_SAMPLING, *FILTERS, "temperature"})
    if not found and unknown:
        found = f"generation_kwargs {unknown}, of which it is unknown whether they change the distribution"
    return found


def refuse_inexact(found: str, promise: str) -> None:
    """Raise ValueError for an option that `inexact_sampling` found, if there is a promise of exact log-probs."""
    if found and promise:
        raise ValueError(
            f"{found}: exact log-probs of such samples, which {promise} needs, cannot be computed; leave it out, or "
            "set the neutral value in generation_kwargs if the model's own file sets it (temperature, top_k, top_p "
            "and min_p are supported)"
        )


def check_endings(args: Any) -> None:
    """Raise ValueError for generation_kwargs that end completions of a task: only TRL's and vLLM's generation knows
    them, so that evaluations, `solve` and our rollouts would score other texts than training."""
    found = sorted(name for name in ENDINGS if (args.generation_kwargs or {}).get(name) is not None)
    if found:
        raise ValueError(
            f"generation_kwargs {found}: completions of a task end with the tokenizer's eos_token or after "
            "max_completion_length tokens, in training and in evaluations; set that option, or end the answer in the "
            "task's score or constraint"
        )


def check_sampling_options(args: Any) -> None:
    """Raise ValueError for options of a TaskGRPOConfig whose effect on sampled tokens scoring cannot reproduce."""
    filters = args.sampling_filters
    refuse_inexact(inexact_sampling(args), args.promise_of_exactness)
    is_sequence = args.vllm_importance_sampling_mode.startswith("sequence")
    if args.importance_sampling_correction and args.loss_type == "vespo" and is_sequence:
        raise ValueError(
            f"loss_type='vespo' with vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}: it "
            "needs one ratio per token; set 'token_truncate' or 'token_mask'"
        )
    if args.use_transformers_continuous_batching and filters:
        raise ValueError(
            f"{filters} with use_transformers_continuous_batching: it does not return which tokens the filters "
            "kept, so exact log-probs cannot be computed; set top_k=0, top_p=1 and min_p=0, or turn it off"
        )
    if args.use_vllm and filters and not filters.top_k:
        raise ValueError(
            f"{filters} with use_vllm: vLLM returns the log-probs of a limited number of tokens, which must "
            "include all that the filters keep; set top_k as well, for example top_k=64"
        )
    if args.samples_under_constraint and args.use_transformers_continuous_batching:
        raise ValueError("constrain=True does not work with use_transformers_continuous_batching; set that to False")
