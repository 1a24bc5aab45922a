"""What variables of whoever runs the steps hold, beside what autograd keeps."""

from __future__ import annotations

from whichlora.memory import kv_cache, loss
from whichlora.memory.entries import Entry, Fact, Group, listed
from whichlora.memory.step import TrainingStep

ENCODER_STATES = Fact(
    part="activations",
    what="the encoder's output, which the model's output holds",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="a variable of the caller holds `encoder_last_hidden_state`",
    source="transformers 5.23 Seq2SeqLMOutput",
)
GRAPH_LEAVES = Fact(
    part="activations",
    what="embeddings and their gradient",
    shape="[2, batch_size, seq_len, hidden_size]",
    dtype="of the embedding",
    why="a variable of the caller holds the graph, whose leaf they are",
    source="transformers 5.23 enable_input_require_grads; torch AccumulateGrad",
)
KEPT_CACHE = Fact(
    part="kv_cache",
    what="keys and values that the model's output holds",
    shape="[2, num_hidden_layers, batch_size, num_key_value_heads, seq_len, head_dim]",
    dtype="of the keys",
    why="a variable of the caller holds the output with its cache",
    source="transformers 5.23 CausalLMOutputWithPast; a text config that still says use_cache",
)
HELD_INPUTS = Fact(
    part="activations",
    what="inputs that quantised matrices hold",
    shape="[batch_size, seq_len, in_features]",
    dtype="stream_bytes",
    why="attributes of the graph's nodes: they go with the whole graph, not layer by layer",
    source="bitsandbytes 0.50.2 MatMul8bitLt.forward",
)


def held_outputs(step: TrainingStep) -> Entry:
    """Outputs of the model from the end of its forward on, where the caller holds them."""
    return Entry(loss.KEPT_LOGITS, step.loss.kept_logits_bytes)


def kept_cache(step: TrainingStep) -> Entry:
    """Keys and values in outputs that the caller holds, where autograd has let them go."""
    is_held = step.trainer.outputs_held(step.run) in ("until_step_ends", "until_next_outputs")
    caches = step.model.caches_in_training and not step.run.gradient_checkpointing
    if not (is_held and caches):
        return Entry(KEPT_CACHE, 0 * step.tokens)
    cached = kv_cache.trained_cache_bytes(step.model, step.dtypes, **step.sized)
    per_token = kv_cache.viewed_bytes(step.model, step.dtypes)
    per_token += kv_cache.widened_keys_bytes(step.model, step.dtypes)
    return Entry(KEPT_CACHE, cached + step.tokens * per_token)


def kept_cache_of_later_layers(step: TrainingStep) -> Entry:
    """The same, of all layers but the first."""
    size = kept_cache(step).num_bytes
    return Entry(KEPT_CACHE, size - size // max(step.model.num_hidden_layers, 1))


def held_in_update(step: TrainingStep) -> tuple[Entry, ...]:
    """What is left of a forward and its backward in the optimizer's update.

    Outputs and the graph that they belong to: its nodes, not what they saved for the backward.
    """
    if step.trainer.outputs_held(step.run) not in ("until_step_ends", "until_next_outputs"):
        return ()
    # `release_variables` empties what nodes saved, not the nodes, which the loss's `grad_fn` holds
    # down to the leaves; `ctx.tensors = (CAt, subA, A)` of `MatMul8bitLt` is an attribute of its
    # node. A decoder's cross attention saves the encoder's output, too, until its backward is done
    states = step.model.hidden_size * step.dtypes.stream_bytes if step.second_stack else 0
    held = (Group(tensors=layer.held, count=layer.count, **layer.sized) for layer in step.layers)
    return (
        held_outputs(step),
        Entry(ENCODER_STATES, step.tokens * states),
        kept_cache(step),
        Entry(GRAPH_LEAVES, 2 * step.tokens * step.leaf_embedding_bytes),
        listed(HELD_INPUTS, *held),
    )


def held_between_steps(step: TrainingStep) -> tuple[Entry, ...]:
    """What is left of a step in the forward of the next one."""
    if step.trainer.outputs_held(step.run) != "until_next_outputs":
        return ()
    return held_in_update(step)
