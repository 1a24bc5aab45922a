"""The ledger: what is alive at each moment that can be the peak of a run.

The peak is the largest moment. A moment is a list of entries; the parts of the entries are the
breakdown that a user sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whichlora.architecture import Layer, ModelSpec
from whichlora.memory import activations, allocator, kv_cache, logits, optimizer, weights
from whichlora.methods.base import Method
from whichlora.numeric import Count, largest
from whichlora.specs import GpuSpec, RunConfig
from whichlora.stack import Stack
from whichlora.targets import adapted

PARTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer_states",
    "activations",
    "logits_and_loss",
    "temporary",
    "kv_cache",
    "allocator",
    "context",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, or one group of equal tensors, alive at a moment."""

    part: str
    what: str
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Every candidate moment of one run.

    Args:
        moments: entries by moment, in the order they happen.
        idle_bytes: the allocator's cached but unusable bytes at the peak.
        workspace_bytes: library workspaces, inside the allocator's pool.
    """

    moments: dict[str, tuple[Entry, ...]]
    idle_bytes: Count
    workspace_bytes: int

    def moment_bytes(self, moment: str) -> Count:
        total: Count = self.workspace_bytes
        for entry in self.moments[moment]:
            total = total + entry.num_bytes
        return total

    @property
    def peak_allocated_bytes(self) -> Count:
        return largest(*(self.moment_bytes(moment) for moment in self.moments))

    @property
    def peak_moment(self) -> str:
        """Name of the largest moment; of one run only, not of an array."""
        return max(self.moments, key=self.moment_bytes)


def trained_params(model: ModelSpec, targets: tuple[str, ...], method: Method, r: Count) -> Count:
    """Trainable parameters: all of them, or those of the adapters. Kind: exact."""
    if method.trains_base:
        return model.num_params + 0 * r
    total: Count = 0 * r
    for group in model.groups:
        one: Count = 0 * r
        for linear in adapted(group.layer, targets):
            one = one + method.adapter_params(linear, r)
        total = total + one * (1 if group.shared else group.count)
    for linear in model.head_linears:
        if linear.rank_multiple and linear.name in targets:
            total = total + method.adapter_params(linear, r)
    return total


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Kept by one of `count` equal layers, and alive on top during its backward."""

    count: int
    saved: Count
    transient: Count


def _layer(
    layer: Layer,
    count: int,
    model: ModelSpec,
    targets: tuple[str, ...],
    stack: Stack,
    method: Method,
    r: Count,
    tokens: Count,
    span: Count,
) -> _LayerBytes:
    saved = activations.layer_saved(layer, targets, stack, method, r, span=span)
    per_token, pair = activations.layer_backward_transient(
        layer, targets, stack, method, model.hidden_size
    )
    return _LayerBytes(
        count,
        activations.saved_bytes(saved, tokens=tokens, span=span),
        tokens * (per_token + pair * span),
    )


def _weights(model: ModelSpec, stack: Stack, *, like: Count) -> list[Entry]:
    stored = weights.weight_bytes(model, stack)
    return [Entry("weights", name, size + 0 * like) for name, size in stored.items()]


def _inputs(model: ModelSpec, stack: Stack, tokens: Count, span: Count) -> Entry:
    return Entry(
        "activations",
        "token ids, labels, mask, rotary tables",
        24 * tokens + activations.rotary_bytes(model, stack, span=span),
    )


def _autocast_copies(model: ModelSpec, stack: Stack, method: Method, trained: Count) -> Count:
    """16-bit copies of what is trained in fp32; the graph and autocast's cache hold them."""
    if not stack.autocast:
        return 0 * trained
    if not method.trains_base:
        return 2 * trained if stack.adapter_bytes == 4 else 0 * trained
    matrices = sum(
        count * sum(linear.num_weights for linear in layer.linears)
        for layer, count in model.layers()
    )
    return (2 * matrices if stack.base_bytes == 4 else 0) + 0 * trained


def training_ledger(
    model: ModelSpec,
    run: RunConfig,
    stack: Stack,
    method: Method,
    gpu: GpuSpec,
    targets: tuple[str, ...],
    *,
    batch_size: Count,
    seq_len: Count,
    r: Count,
) -> Ledger:
    """Moments of one steady optimizer step (the second or later: optimizer states exist).

    `batch_size`, `seq_len` and `r` may be arrays; everything else is one setting.
    """
    tokens = batch_size * seq_len
    num_layers = model.num_hidden_layers
    trained = trained_params(model, targets, method, r)
    param_bytes = stack.base_bytes if method.trains_base else stack.adapter_bytes
    gradient_bytes = trained * param_bytes
    accumulated = gradient_bytes if run.gradient_accumulation_steps > 1 else 0 * trained

    static = _weights(model, stack, like=tokens)
    if not method.trains_base:
        static.append(Entry("adapters", "adapter weights", trained * stack.adapter_bytes))
    states = optimizer.state_bytes(trained, optimizer=run.optimizer, param_bytes=param_bytes)
    static.append(Entry("optimizer_states", run.optimizer, states))

    layers = [
        _layer(layer, count, model, targets, stack, method, r, tokens, seq_len)
        for layer, count in model.layers()
    ]
    saved_by_all = sum((one.saved * one.count for one in layers), start=0 * tokens)
    needs_grad = method.trains_base or run.gradient_checkpointing
    outside = activations.saved_bytes(
        activations.outside_saved(model, targets, stack, embeddings_need_grad=needs_grad),
        tokens=tokens,
        span=seq_len,
    )
    copies = _autocast_copies(model, stack, method, trained)
    if run.gradient_checkpointing:
        checkpoint = stack.stream_bytes * model.hidden_size * tokens
        masks = activations.kept_mask_bytes(model, stack, tokens=tokens, span=seq_len)
        held = 0 * tokens  # outside of autograd, so it outlives a checkpointed forward
        for layer, count in () if run.use_reentrant else model.layers():
            inputs = activations.distinct(activations.held_by_linear4bit(layer, stack))
            held += count * activations.saved_bytes(inputs, tokens=tokens, span=seq_len)
        kept = Entry(
            "activations",
            f"checkpoints of {num_layers} layers",
            num_layers * checkpoint + outside + masks + held,
        )
        in_layer = largest(*(one.saved + one.transient for one in layers))
        in_forward = largest(*(one.saved for one in layers))  # recomputed
        loss_copies, layer_copies = copies * 0, copies // num_layers
    else:
        firsts = {group.stack: group.layer for group in reversed(model.groups)}.values()
        unsaved = sum(activations.unsaved_by_first_layer(one, targets, stack) for one in firsts)
        kept = Entry(
            "activations",
            f"saved by {num_layers} layers",
            saved_by_all + outside - unsaved * tokens,
        )
        in_layer = largest(*(one.transient for one in layers))
        in_forward = 0 * tokens
        loss_copies = layer_copies = copies

    head_copy = logits.head_copy_bytes(model, stack)
    loss_forward = logits.loss_forward_bytes(model, stack, tokens=tokens, loss_head=run.loss_head)
    loss_backward = logits.loss_backward_bytes(model, stack, tokens=tokens, loss_head=run.loss_head)
    dense = stack.compute_bytes * weights.largest_quantised_matrix(model, stack)
    norms = activations.method_transient_bytes(model, targets, stack, method)
    merged = 0
    if not method.trains_base:
        merged = activations.merged_gradient_bytes(model, targets, stack)
    head_params = model.hidden_size * logits.logit_width(model)
    first_gradients = accumulated
    if method.trains_base:
        # the head and the last layer already have their gradients when layers go backward
        last = max(group.layer.num_params for group in model.groups)
        first_gradients = largest(accumulated, (head_params + last) * param_bytes)

    before = (
        *static,
        Entry("gradients", "accumulated", accumulated),
        _inputs(model, stack, tokens, seq_len),
    )
    moments = {
        "layer_forward": (
            *before,
            kept,
            Entry("activations", "of the layer that is recomputed", in_forward),
            Entry("temporary", "norm of an adapted weight", norms + 0 * tokens),
            Entry("temporary", "16-bit copies of adapters", layer_copies),
        ),
        "loss_forward": (
            *before,
            kept,
            Entry("logits_and_loss", "logits, fp32 logits, log-softmax", loss_forward),
            Entry("temporary", "16-bit copies of adapters and head", copies + head_copy),
        ),
        "loss_backward": (
            *before,
            kept,
            Entry("logits_and_loss", "log-softmax and its gradients", loss_backward),
            Entry("temporary", "16-bit copies of adapters and head", loss_copies + head_copy),
        ),
        "layer_backward": (
            *before,
            Entry("gradients", "of the last layers", first_gradients - accumulated),
            kept,
            Entry("temporary", "one layer's backward", in_layer + merged),
            Entry("temporary", "one matrix expanded", dense + 0 * tokens),
            Entry("temporary", "16-bit copies of adapters", layer_copies),
        ),
        "optimizer_step": (
            *static,
            Entry("gradients", "all", gradient_bytes),
            Entry(
                "temporary",
                "optimizer temporaries",
                optimizer.step_temporary_bytes(
                    trained,
                    optimizer=run.optimizer,
                    param_bytes=param_bytes,
                    device_kind=gpu.kind,
                ),
            ),
        ),
    }
    if method.trains_base and (model.head_tied or model.task == "encoder"):
        # autograd holds the head's gradient until the embedding's is there; their sum is a third
        both = 2 * head_params * param_bytes + 0 * tokens
        moments["embedding_backward"] = (
            *static,
            Entry("gradients", "all", gradient_bytes),
            Entry("gradients", "two parts of the tied embedding's", both),
        )
    vocab = logits.logit_width(model) if run.loss_head in ("hf", "unsloth") else 0
    idle = allocator.idle_after_step_bytes(
        gpu,
        loss_bytes=largest(loss_forward, loss_backward),
        layer_bytes=in_layer,
        narrow_logits_bytes=tokens * vocab * 2,
    )
    found = Ledger(
        moments=moments,
        idle_bytes=idle,
        workspace_bytes=allocator.workspace_bytes(gpu, training=True),
    )
    if gpu.kind == "cpu":
        return found
    # The optimizer's lists of small tensors find no use for the segments of the activations.
    in_step = largest(loss_forward, loss_backward, in_layer) + kept.num_bytes
    at_optimizer = found.moment_bytes("optimizer_step") + in_step
    return replace(found, idle_bytes=largest(idle, at_optimizer - found.peak_allocated_bytes))


def inference_ledger(
    model: ModelSpec,
    run: RunConfig,
    stack: Stack,
    gpu: GpuSpec,
    *,
    batch_size: Count,
    prompt_len: Count,
    max_new_tokens: Count,
) -> Ledger:
    """Moments of one generation: the prompt pass and the last decoding step."""
    static = _weights(model, stack, like=batch_size)
    element_bytes = stack.compute_bytes
    # an encoder reads the prompt of a seq2seq model; its decoder begins with one token
    first_tokens = prompt_len if model.task != "seq2seq-lm" else 1 + 0 * prompt_len
    last_tokens = first_tokens + max_new_tokens - 1
    common = {"batch_size": batch_size, "kv_cache": run.kv_cache, "element_bytes": element_bytes}
    at_start = last_tokens if run.kv_cache == "static" else first_tokens
    prompt_cache, full_cache = (
        kv_cache.cache_bytes(model, tokens=tokens, encoder_tokens=prompt_len, **common)
        for tokens in (at_start, last_tokens)
    )
    scores = logits.generation_bytes(model, batch_size=batch_size, compute_bytes=element_bytes)
    dense = stack.compute_bytes * weights.largest_quantised_matrix(model, stack)
    prompt_tokens = batch_size * prompt_len
    working = activations.forward_bytes(
        model, stack, tokens=prompt_tokens, span=prompt_len
    ) + activations.rotary_bytes(model, stack, span=prompt_len)
    if model.task == "encoder":
        every = logits.encoder_bytes(model, tokens=prompt_tokens, compute_bytes=element_bytes)
        hidden_states = prompt_tokens * model.hidden_size * 2 * element_bytes
        return Ledger(
            moments={
                "forward": (
                    *static,
                    Entry("activations", "one layer's forward over the input", working),
                    Entry("temporary", "one matrix expanded", dense + 0 * batch_size),
                ),
                "logits": (
                    *static,
                    Entry("activations", "last hidden states", hidden_states),
                    Entry("logits_and_loss", "every position", every),
                ),
            },
            idle_bytes=allocator.idle_cache_bytes(
                gpu, logits_bytes=0 * batch_size, layer_bytes=working
            ),
            workspace_bytes=allocator.workspace_bytes(gpu, training=False),
        )
    decoding = activations.forward_bytes(model, stack, tokens=batch_size, span=last_tokens)
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
            Entry("kv_cache", "prompt", prompt_cache),
            Entry("activations", "one layer's forward over the prompt", working),
            Entry("temporary", "one matrix expanded", dense + 0 * batch_size),
        ),
        "first_logits": (
            *static,
            Entry("kv_cache", "prompt", prompt_cache),
            Entry("activations", "last hidden states", last_hidden),
            Entry("logits_and_loss", "of the prompt", first_scores),
        ),
        "decode": (
            *static,
            Entry("kv_cache", "whole sequences", full_cache),
            Entry("temporary", "second copy of what is appended to", append),
            Entry("activations", "one layer's forward over one token", decoding),
            Entry("logits_and_loss", "last positions", scores),
            Entry("temporary", "one matrix expanded", dense + 0 * batch_size),
        ),
    }
    if stack.libraries.scores_whole_prompt:
        twice = 1 + stack.libraries.cache_of_tuples * (max_new_tokens > 1)
        moments["second_token"] = (
            *static,
            Entry(
                "kv_cache", "prompt, and a second copy with one token more", twice * prompt_cache
            ),
            Entry("logits_and_loss", "of the prompt, in fp32", held_scores),
            Entry("logits_and_loss", "last positions", scores),
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
    idle = allocator.idle_cache_bytes(gpu, logits_bytes=outgrown, layer_bytes=append)
    return Ledger(
        moments=moments,
        idle_bytes=idle,
        workspace_bytes=allocator.workspace_bytes(gpu, training=False),
    )
