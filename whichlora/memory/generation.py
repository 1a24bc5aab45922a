"""The ledger of inference: the prompt pass and the last decoding step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.architecture import ModelSpec
from whichlora.memory import activations, allocator, facts, kv_cache, logits, quantised_cache
from whichlora.memory.entries import Entry
from whichlora.memory.layer_bytes import forward_bytes
from whichlora.memory.ledger import Ledger, adapter_entries, weight_entries
from whichlora.methods.base import Method
from whichlora.numeric import Count, largest, smallest
from whichlora.specs import GpuSpec, RunConfig
from whichlora.stack import Stack


def inference_ledger(
    model: ModelSpec,
    run: RunConfig,
    stack: Stack,
    method: Method,
    gpu: GpuSpec,
    targets: tuple[str, ...],
    *,
    batch_size: Count,
    prompt_len: Count,
    max_new_tokens: Count,
    r: Count,
) -> Ledger:
    """Moments of one generation: the prompt pass and the last decoding step.

    Args:
        targets: names of the matrices whose adapters are not merged, if any.
    """
    static = weight_entries(model, stack, like=batch_size)
    if targets:
        static += adapter_entries(model, run, stack, method, targets, r)
    adapters: dict[str, Any] = {"targets": targets, "method": method, "r": r}
    element_bytes = stack.compute_bytes
    # an encoder reads the prompt of a seq2seq model; its decoder begins with one token
    first_tokens = prompt_len if model.task != "seq2seq-lm" else 1 + 0 * prompt_len
    last_tokens = first_tokens + max_new_tokens - 1
    stored = run.cache_format
    common = {"batch_size": batch_size, "kv_cache": run.kv_cache, "element_bytes": element_bytes}
    at_start = last_tokens if run.kv_cache == "static" else first_tokens
    prompt_cache, full_cache = (
        kv_cache.cache_bytes(
            model,
            tokens=tokens,
            encoder_tokens=prompt_len,
            after_prompt=after_prompt,
            stored=stored,
            **common,
        )
        for tokens, after_prompt in ((at_start, True), (last_tokens, False))
    )
    scores = logits.generation_bytes(model, batch_size=batch_size, compute_bytes=element_bytes)
    prompt_tokens = batch_size * prompt_len
    two_stacks = model.task == "seq2seq-lm"
    sized = {"tokens": prompt_tokens, "span": prompt_len}
    reader, positions = stack, prompt_len
    if model.task == "causal-lm":
        positions = prompt_tokens  # `generate` numbers the tokens of each sequence
        if run.kv_cache == "static":  # attended to as a whole, so that its end must be masked
            reader = replace(stack, padded=True)
            sized["span"] = at_start
    if stored is not None:
        reader = replace(stack, stores=stored)
    working = forward_bytes(
        model,
        reader,
        side="encoder" if two_stacks else "",
        prompt=True,
        queries=prompt_len,
        **sized,
        **adapters,
    ) + activations.rotary_bytes(model, stack, span=positions)
    if model.task == "causal-lm":
        working = working + activations.kept_mask_bytes(model, reader, checkpointed=True, **sized)
    if model.task == "encoder":
        working = working + activations.sequence_bias_bytes(model, reader, **sized)
        every = logits.encoder_bytes(model, tokens=prompt_tokens, compute_bytes=element_bytes)
        row_bytes = prompt_tokens * element_bytes
        found = Ledger(
            moments={
                "forward": (
                    *static,
                    Entry(facts.PROMPT_FORWARD, working),
                ),
                "logits": (
                    *static,
                    Entry(facts.LAST_HIDDEN, 2 * model.hidden_size * row_bytes),
                    Entry(facts.EVERY_LOGIT, every),
                ),
            },
            idle_bytes=0 * batch_size,
            workspace_bytes=allocator.workspace_bytes(gpu, training=False),
        )
        if gpu.kind == "cpu":
            return found
        # blocks as wide as the vocabulary can't be cut from what the layers leave
        apart = allocator.in_whole_segments(working, model.hidden_size * row_bytes)
        apart = apart + allocator.in_whole_segments(every, model.vocab_size * row_bytes)
        reserved = found.moment_bytes("forward") - working + apart
        idle = largest(0, reserved - found.peak_allocated_bytes)
        if run.expandable_segments:  # one page more of each pool at the most
            idle = smallest(idle, working + allocator.PAGES_BYTES)
        return replace(found, idle_bytes=idle)
    decoding = forward_bytes(
        model,
        stack,
        tokens=batch_size,
        span=last_tokens,
        side="decoder" if two_stacks else "",
        decoding=True,
        **adapters,
    )
    append = kv_cache.append_transient_bytes(model, tokens=last_tokens, **common)
    if run.kv_cache == "dynamic" and stack.libraries.cache_of_tuples:
        old = kv_cache.cache_bytes(
            model, tokens=last_tokens - 1, encoder_tokens=prompt_len, **common
        )
        append = old * (max_new_tokens > 1)  # the first token needs no second pass
    first_scores = scores
    last_hidden = prompt_tokens * model.hidden_size * 6
    held_scores = 0 * scores
    if stack.libraries.scores_whole_prompt:
        scored = batch_size * first_tokens
        last_hidden = scored * model.hidden_size * element_bytes
        first_scores = logits.prompt_bytes(model, stack, tokens=scored)
        # the caller holds the first output, in fp32, until the second is there
        held_scores = 4 * scored * logits.logit_width(model) * (max_new_tokens > 1)
    moments = {
        "prefill": (
            *static,
            Entry(facts.PROMPT_CACHE, prompt_cache),
            Entry(facts.PROMPT_FORWARD, working),
        ),
        "first_logits": (
            *static,
            Entry(facts.PROMPT_CACHE if stored is None else facts.QUANTISED_CACHE, prompt_cache),
            Entry(facts.LAST_HIDDEN, last_hidden),
            Entry(facts.PROMPT_LOGITS, first_scores),
        ),
        "decode": (
            *static,
            Entry(facts.FULL_CACHE, full_cache),
            Entry(facts.APPENDED, append),
            Entry(facts.TOKEN_FORWARD, decoding),
            Entry(facts.LAST_LOGITS, scores),
        ),
    }
    if stored is not None:
        earlier = quantised_cache.stored_by_earlier_layers(
            model, stored, batch_size=batch_size, tokens=prompt_len, element_bytes=element_bytes
        )
        moments["prefill"] = (
            *static,
            Entry(facts.QUANTISED_CACHE, earlier),
            Entry(facts.PROMPT_FORWARD, working),
        )
        later = quantised_cache.decode_moments(
            model,
            stack,
            stored,
            batch_size=batch_size,
            prompt_len=prompt_len,
            max_new_tokens=max_new_tokens,
        )
        in_step = (
            Entry(facts.TOKEN_FORWARD, decoding),
            Entry(facts.LAST_SCORES, 4 * batch_size * logits.logit_width(model)),
        )
        moments |= {name: (*static, *entries, *in_step) for name, entries in later.items()}
        kept = [one for one in later["decode"] if one.fact is not facts.EXPANDED]
        moments["last_logits"] = (*static, *kept, Entry(facts.LAST_LOGITS, scores))
    if two_stacks:
        encoded = Entry(facts.ENCODED, prompt_tokens * model.hidden_size * stack.stream_bytes)
        bias = activations.kept_mask_bytes(
            model, stack, tokens=0 * prompt_tokens, span=prompt_len, side="encoder"
        )
        positions = _named_positions(model, tokens=prompt_tokens, span=prompt_len) * element_bytes
        moments |= {
            "prefill": (*static, Entry(facts.PROMPT_FORWARD, working + bias + positions)),
            "first_token": (
                *static,
                Entry(facts.PROMPT_CACHE, prompt_cache),
                encoded,
                Entry(facts.CROSS_PROJECTED, _largest_cross(model) * element_bytes * prompt_tokens),
            ),
            "first_logits": (
                *static,
                Entry(facts.PROMPT_CACHE, prompt_cache),
                encoded,
                Entry(facts.PROMPT_LOGITS, first_scores),
            ),
            "decode": (*moments["decode"], encoded),
        }
    if stack.libraries.scores_whole_prompt:
        twice = 1 + stack.libraries.cache_of_tuples * (max_new_tokens > 1)
        moments["second_token"] = (
            *static,
            Entry(facts.TWO_CACHES, twice * prompt_cache),
            Entry(facts.HELD_LOGITS, held_scores),
            Entry(facts.LAST_LOGITS, scores),
        )
    outgrown = 0 * full_cache
    if run.kv_cache == "dynamic":
        outgrown = kv_cache.left_behind_bytes(
            model,
            batch_size=batch_size,
            first_tokens=first_tokens,
            last_tokens=last_tokens,
            element_bytes=element_bytes,
        )
    idle = allocator.idle_cache_bytes(
        gpu, logits_bytes=outgrown, layer_bytes=append, expandable=run.expandable_segments
    )
    found = Ledger(
        moments=moments,
        idle_bytes=idle,
        workspace_bytes=allocator.workspace_bytes(gpu, training=False),
    )
    after_prompt = found.moment_bytes("prefill") + allocator.idle_after_prompt_bytes(
        gpu, forward_bytes=working, cache_bytes=prompt_cache * (not two_stacks)
    )
    return replace(found, idle_bytes=largest(idle, after_prompt - found.peak_allocated_bytes))


def _named_positions(model: ModelSpec, *, tokens: Count, span: Count) -> Count:
    """Elements of the looked-up positions, which BART's encoder names beside the tokens."""
    found = [one for one in model.embeddings if "position" in one.name]
    if not found:
        return 0 * tokens
    return found[0].width * (tokens if found[0].per_sequence else span)


def _largest_cross(model: ModelSpec) -> int:
    """Elements per token of the keys and values that one layer takes from the encoder's output."""
    return max(
        attention.k_width + attention.v_width
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.cross
    )
