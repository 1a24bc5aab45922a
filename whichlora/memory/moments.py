"""The moments of training: what is alive at each point of a step that can be its peak.

One function per moment; it returns the entries. The text of an entry (`Fact`) stands above the
first function that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.memory import kv_cache, loss, optimizer
from whichlora.memory.embeddings import layer_inputs_saved
from whichlora.memory.entries import Entry, Fact, Group, listed
from whichlora.memory.gradients import gradient_bytes
from whichlora.memory.held import (
    HELD_INPUTS,
    held_between_steps,
    held_in_update,
    held_outputs,
    kept_cache,
    kept_cache_of_later_layers,
)
from whichlora.memory.layer_bytes import forward_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.towers import layer_norm_bytes
from whichlora.memory.worst_layer import after, gathered_after, has_one_order
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, largest
from whichlora.symbolic.linear_form import most

Entries = tuple[Entry, ...]
LAYER_FORWARDS = ("layer_forward", "encoder_forward")  # moments in which a layer runs forward

# --- forward ----------------------------------------------------------------------------------

GRADIENTS_OF_TERM = Fact(
    part="gradients",
    what="gradients of the term that the loss has of the adapters",
    shape="[trained_params]",
    dtype="of the parameter",
    why="the term's nodes are the last of the graph, so the first of the backward",
    source="peft AdaLoraModel.forward; torch InputBuffer::accumulate",
)
LAYER_FORWARD = Fact(
    part="temporary",
    what="one layer's forward",
    shape="[batch_size, seq_len, …]",
    dtype="compute_bytes",
    why="what the layer that runs makes beyond what all layers keep",
    source="symbolic.layer: transformers, peft, bitsandbytes on the symbolic autograd",
)


def layer_forward(step: TrainingStep) -> Entries:
    """In the last layer's forward: all layers hold their saved tensors."""
    return (
        *step.always,
        *held_between_steps(step),
        step.saved_in_layers,
        step.remainders,
        _decoder_cache(step, in_layer=True),
        Entry(LAYER_FORWARD, step.passes.forward),
    )


def _decoder_cache(step: TrainingStep, *, in_layer: bool = False) -> Entry:
    if step.dtypes.prefix_tokens:
        prefix = kv_cache.prefix_cache_bytes(step.model, step.dtypes, **step.sized)
        if in_layer:  # whose own part is among what its forward makes
            prefix = prefix - prefix // step.model.num_hidden_layers
        return Entry(kv_cache.PREFIX_CACHE, prefix)
    checkpointed = bool(step.run.gradient_checkpointing)
    if checkpointed and kv_cache.caches_checkpointed(step.model, step.dtypes):
        per_token = kv_cache.checkpointed_cache_bytes(step.model, step.dtypes)
        return Entry(kv_cache.CHECKPOINTED_CACHE, step.tokens * per_token)
    elements = kv_cache.trained_cache_elements(step.model, step.dtypes)
    # `forward_with_checkpointing` of transformers 5.23 modeling_layers.py sets `past_key_values` of
    # a checkpointed layer to None
    if checkpointed:
        return Entry(kv_cache.DECODER_CACHE, 0 * step.tokens)
    of_memory = step.batch_size * kv_cache.trained_memory_bytes(step.model, step.dtypes)
    if step.has_two_lengths:
        of_source = kv_cache.trained_source_elements(step.model, step.dtypes)
        of_memory = of_memory + step.source_tokens * of_source * 4
    if step.model.caches_in_training:  # attention saves 16-bit copies of keys in fp32
        elements += kv_cache.wide_key_elements(step.model, step.dtypes)
    return Entry(kv_cache.DECODER_CACHE, step.tokens * elements * 4 + of_memory)


AUTOCAST_COPIES = Fact(
    part="temporary",
    what="16-bit copies of trained weights",
    shape="[trained_params]",
    dtype="compute_bytes",
    why="autocast casts fp32 weights; its cache and the graph hold them",
    source="torch autocast_mode.cpp cached_cast",
)


def loss_forward(step: TrainingStep) -> Entries:
    """At the end of the loss's forward: the logits, and the saved tensors of all layers."""
    return (
        *step.always,
        *held_between_steps(step),
        step.saved_for_backward,
        step.remainders,
        _decoder_cache(step),
        *_beside_cache(step),
        *_loss_and_copies(step),
        _head_copy(step),
    )


LAST_STATES = Fact(
    part="activations",
    what="hidden states that the head has read",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="the output with the cache names them until the loss is there",
    source="transformers 5.23 LlamaForCausalLM.forward",
)


ENCODER_OUT = Fact(
    part="activations",
    what="the encoder's output",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="the model's output names it until the loss is there; layers of the decoder keep copies",
    source="transformers 5.23 Seq2SeqLMOutput.encoder_last_hidden_state",
)


def _beside_cache(step: TrainingStep) -> Entries:
    if step.has_two_lengths:
        return (Entry(ENCODER_OUT, step.named_encoder_out),)
    # of other runs the loss's backward is larger, since no cache is held then
    states, dtypes = step.tokens * step.model.hidden_size, step.dtypes
    if step.transcribes:  # `outputs` of `WhisperForConditionalGeneration.forward` names them, too
        size = layer_norm_bytes(dtypes)
        is_saved = dtypes.trains_base and size == dtypes.compute_bytes
        return (Entry(LAST_STATES, states * size * (not is_saved)),)
    if dtypes.prefix_tokens:
        return (Entry(LAST_STATES, states * dtypes.stream_bytes),)
    if not step.model.caches_in_training or step.run.gradient_checkpointing:
        return ()
    if loss.has_narrow_loss(step.model, dtypes):  # which counts them
        return ()
    is_saved = dtypes.trains_base and dtypes.stream_bytes == dtypes.compute_bytes
    return (Entry(LAST_STATES, states * dtypes.stream_bytes * (not is_saved)),)


def _loss_and_copies(step: TrainingStep) -> Entries:
    # `autocast.__exit__` of torch/amp/autocast_mode.py calls `clear_autocast_cache`: the context
    # ends with the model's forward, which computes the loss, unless a trainer does of its logits
    made, copies = step.loss.forward_bytes, step.autocast_copies
    if step.loss.compared is not None:
        logits = step.tokens * loss.logit_width(step.model) * step.dtypes.compute_bytes
        made, copies = largest(made, logits + copies), 0 * copies
    return Entry(step.loss.facts[0], made), Entry(AUTOCAST_COPIES, copies)


LOG_PROBABILITIES = Fact(
    part="logits_and_loss",
    what="hidden states that the fused head saved, log-probabilities and what is logged of them",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="compute_bytes",
    why="the backward of the loss reads them",
    source="TRL 1.16 ChunkedLogProbFunction.forward, DPOTrainer._compute_loss",
)
REFERENCE_FORWARD = Fact(
    part="temporary",
    what="forward of the reference",
    shape="[batch_size, seq_len, …]",
    dtype="compute_bytes",
    why="the frozen reference scores the batch: a layer of it, or its head",
    source="TRL 1.16 DPOTrainer._compute_loss, KTOTrainer._compute_loss",
)


def reference_forward(step: TrainingStep) -> Entries:
    """In the reference's forward without gradients, while the graph of the batch is alive."""
    in_layer = forward_bytes(step.model, step.dtypes, **step.sized)
    return (
        *step.always,
        step.saved_for_backward,
        step.remainders,
        step.loss.compared
        or Entry(
            LOG_PROBABILITIES,
            step.loss.scored_tokens
            * loss.log_probability_bytes(
                step.model, step.dtypes, trained_head=step.gradients.trained_head_bytes
            ),
        ),
        Entry(REFERENCE_FORWARD, largest(in_layer, step.loss.reference_bytes)),
    )


def _head_copy(step: TrainingStep) -> Entry:
    copied = loss.head_copy_bytes(step.model, step.dtypes, loss_head=step.run.loss_head)
    in_points = step.adapts_head or step.trainer.chunked_loss(step.run) is not None
    copied = copied * (not in_points)  # `label_points` has it
    copied = copied + step.loss.further_head_copies
    return Entry(loss.HEAD_COPY, copied + 0 * step.tokens + step.head_copy_bytes)


# --- backward ---------------------------------------------------------------------------------


def loss_backward(step: TrainingStep) -> Entries:
    """In the backward of the loss: the saved tensors of all layers still exist."""
    # saved tensors go node by node, when `Engine::evaluate_function` has run the node
    # (`release_variables`), and the layers' nodes come after the head's. `AUTOCAST_COPIES` are
    # gone: checkpointed layers have not saved them, and `autocast.__exit__` emptied the cache
    return (
        *step.always,
        held_outputs(step),
        step.saved_for_backward,
        step.remainders,
        *([Entry(GRADIENTS_OF_TERM, step.gradients.of_term)] if step.method.in_loss else []),
        Entry(step.loss.facts[1], step.loss.backward_bytes),
        _head_copy(step),
    )


LOGITS_GRADIENT = Fact(
    part="logits_and_loss",
    what="gradients of the logits and of what the head read",
    shape="[batch_size, seq_len, vocab_size + hidden_size]",
    dtype="compute_bytes",
    why="the head goes backward",
    source="torch addmm backward",
)
HEAD_GRADIENT = Fact(
    part="gradients",
    what="gradient of the head",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    why="the first gradient that is there",
    source="torch AccumulateGrad",
)


def head_backward(step: TrainingStep) -> Entries:
    """In the backward of a trained head."""
    # `mm` of torch 2.13 derivatives.yaml: one node reads the gradient of the logits for both of its
    # results, the gradients of the hidden states and of the weight. The latter becomes `.grad`
    # without a copy (`AccumulateGrad::accumulateGrad`, case 1.1 of accumulate_grad.h)
    model, dtypes = step.model, step.dtypes
    width = loss.logit_width(model) + model.hidden_size
    return (
        *step.always,
        step.saved_for_backward,
        step.remainders,
        held_outputs(step),
        Entry(LOGITS_GRADIENT, step.tokens * width * dtypes.compute_bytes),
        Entry(HEAD_GRADIENT, step.gradients.of_head + 0 * step.num_trained),
        _head_copy(step),
    )


LAST_LAYERS_GRADIENTS = Fact(
    part="gradients",
    what="gradient of the head",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    why="backward starts at the head",
    source="torch AccumulateGrad",
)
LAYER_BACKWARD = Fact(
    part="temporary",
    what="one layer's backward",
    shape="[batch_size, seq_len, …]",
    dtype="compute_bytes",
    why="saved tensors of a recomputed layer, and gradients at the worst point of its backward",
    source="symbolic.layer: transformers, peft, bitsandbytes on the symbolic autograd",
)


def layer_backward(step: TrainingStep) -> Entries:
    """In the backward of the worst layer, with the saved tensors of all layers."""
    return (
        *step.always,
        held_outputs(step),
        Entry(LAST_LAYERS_GRADIENTS, step.gradients.in_layers),
        step.saved_in_layers,
        step.remainders,
        Entry(LAYER_BACKWARD, step.layer_backward_bytes),
    )


LATER_LAYERS_GRADIENTS = Fact(
    part="gradients",
    what="gradients of all layers but the first",
    shape="[params of the head and of all layers but one]",
    dtype="of the parameter",
    why="the first layer goes backward last",
    source="torch AccumulateGrad",
)
AROUND_LAYERS = Fact(
    part="activations",
    what="saved before the first layer",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="the embedding's norm, dropout and rows go backward last",
    source="saved-tensor hooks on transformers and peft",
)


SHARED_KEYS = Fact(
    part="activations",
    what="keys and values that later layers read, made again, and what their graph saved",
    shape="[batch_size, seq_len, num_key_value_heads, head_dim]",
    dtype="compute_bytes",
    why="a dict that is an argument of every checkpoint holds them until the first layer is done",
    source="transformers Gemma4TextAttention.forward; torch.utils.checkpoint",
)


def first_layer_backward(step: TrainingStep) -> Entries:
    """In the backward of the first layer, an encoder's where there is one: the last layer to go."""
    # `ctx.state` and `ctx.tensors` of `MatMul8bitLt` are plain attributes, which no
    # `release_variables` frees; without checkpointing the first layer's are in its own backward
    num_first = 0 if step.run.gradient_checkpointing else 1
    inputs = (
        Group(tensors=layer.held, count=layer.count - num_first * (number == 0), **layer.sized)
        for number, layer in enumerate(step.layers)
    )
    return (
        *step.always,
        held_outputs(step),
        kept_cache_of_later_layers(step),
        Entry(LATER_LAYERS_GRADIENTS, largest(step.gradients.late, 0 * step.gradients.late)),
        listed(HELD_INPUTS, *inputs),
        step.late_remainders,
        listed(AROUND_LAYERS, step.outside_in_first_layer, step.masks.in_first_layer),
        *([Entry(SHARED_KEYS, step.keys_in_first_layer)] if step.shares_keys else []),
        Entry(LAYER_BACKWARD, largest(*(_last_backward(step, i) for i in step.first_kinds))),
    )


def _last_backward(step: TrainingStep, kind: int) -> Count:
    """Of the first layer, with what later ones have summed of what it does not read."""
    backward = step.backward_of_last(kind)
    if not step.attends or not has_one_order(step.model):
        return backward
    gathered = gathered_after(step.model, step.layers, step.num_idle_layers)
    return backward - step.layers[kind].gathered + gathered


def layers_backward_at_depth(step: TrainingStep) -> Iterator[tuple[str, Entries]]:
    """In the first layer of each further kind, with its place, where all weights are trained.

    Gradients are as large as the weights then, so that a layer half way down can be the peak:
    later layers have made their gradients and released their saved tensors.
    """
    passes, model = step.passes, step.model
    if not step.method.trains_base or not has_one_order(model):
        return
    by_layer = [layer.gradients for layer in step.layers]
    kinds = zip(model.groups, step.layers, passes.backward, strict=True)
    for group, layer, backward in list(kinds)[1:]:
        place = group.positions[0]
        gathered = gathered_after(model, step.layers, place, of_keys=layer.gathered)
        backward = backward - layer.gathered + gathered
        around = step.gradients.of_head + step.gradients.of_merging
        gradients = after(model, by_layer, place) + around
        waiting = (
            replace(held, count=sum(position <= place for position in of_kind.positions))
            for held, of_kind in zip(passes.groups, model.groups, strict=False)
        )
        shared = passes.groups[len(step.layers) :]
        yield (
            f"layer_{place}_backward",
            (
                *step.always,
                held_outputs(step),
                # else they are among `ACCUMULATED`: case 2.3 of accumulate_grad.h adds in place
                Entry(LATER_LAYERS_GRADIENTS, gradients * (not step.accumulates)),
                listed(passes.fact, *waiting, *shared, step.outside_in_layers),
                step.late_remainders,
                Entry(LAYER_BACKWARD, backward),
            ),
        )


def first_decoder_layer_backward(step: TrainingStep) -> Entries:
    """In the decoder's first layer, while the encoder's saved tensors still exist."""
    gradients = step.gradients.late
    if not step.gradients_wait:
        of_kind = largest(*(step.layers[number].gradients for number in step.first_decoder_kinds))
        gradients = gradients + step.layers[0].gradients - step.gradients.of_first_stack - of_kind
        gradients = largest(gradients, 0 * step.num_trained)
    backward = largest(*(step.backward_of_last(number) for number in step.first_decoder_kinds))
    return (
        *step.always,
        held_outputs(step),
        Entry(LATER_LAYERS_GRADIENTS, gradients),
        step.remainders,
        _kept_by_encoder(step, step.masks.in_first_decoder_layer),
        Entry(LAYER_BACKWARD, backward),
    )


def encoder_forward(step: TrainingStep) -> Entries:
    """In the forward of the encoder's last layer, before there is anything of the decoder."""
    checkpointed = bool(step.run.gradient_checkpointing)
    layers = [step.layers[number] for number in step.first_stack]
    made = largest(*(each.forward - each.saved * (not checkpointed) for each in layers))
    if not checkpointed:  # the loop of `LEDEncoder.forward` names rows, states and the mask
        made = made + 2 * layers[0].tokens * step.model.hidden_size * layers[0].stream_bytes
        made = made + step.masks.encoder_bytes
    return (
        *step.always,
        *held_between_steps(step),
        step.remainders,
        _left_of_encoder(step),
        Entry(LAYER_FORWARD, made),
    )


def encoder_backward(step: TrainingStep) -> Entries:
    """In the backward of the encoder's last layer, after the decoder's."""
    gradients = step.gradients.late
    if not step.gradients_wait:
        gradients = gradients + step.layers[0].gradients - step.gradients.of_first_stack
        gradients = largest(gradients, 0 * step.num_trained)
    return (
        *step.always,
        held_outputs(step),
        Entry(LATER_LAYERS_GRADIENTS, gradients),
        step.remainders,
        _left_of_encoder(step),
        Entry(LAYER_BACKWARD, step.encoder_backward_bytes),
    )


def _left_of_encoder(step: TrainingStep) -> Entry:
    """What the encoder's layers keep, and what is saved around them."""
    passes = step.passes
    kept = (passes.groups[number] for number in step.first_stack)
    return listed(passes.fact, *kept, step.outside_in_first_layer, step.masks.in_encoder)


def _kept_by_encoder(step: TrainingStep, masks: Group) -> Entry:
    # every cross attention adds to the gradient of the encoder's output, and
    # `Engine::evaluate_function` queues a node when all of its inputs are there: no node of the
    # encoder runs, and frees what it saved, before the decoder's first layer is done
    passes = step.passes
    waiting = (passes.groups[number] for number in step.first_stack)
    return listed(passes.fact, *waiting, step.outside_in_layers, masks)


ALL_GRADIENTS = Fact(
    part="gradients",
    what="all gradients",
    shape="[trained_params]",
    dtype="of the parameter",
    why="backward is done, the optimizer reads them",
    source="torch AccumulateGrad",
)
LAYER_INPUTS_BACKWARD = Fact(
    part="temporary",
    what="backward of the inputs of all layers",
    shape="[batch_size, seq_len, num_hidden_layers, width]",
    dtype="stream_bytes",
    why="one tensor for all layers: its gradient, the fp32 norm of it, the embeddings' gradient",
    source="symbolic.gemma4: Gemma4TextModel.project_per_layer_inputs",
)


def layer_inputs_backward(step: TrainingStep) -> Entries:
    """In the backward of what made the second embedding of every layer (Gemma 4)."""
    assert step.layer_inputs is not None
    making = most(step.layer_inputs.backward, r=step.r, **step.sized)
    # `Gemma4TextModel.forward` gives `inputs_embeds` to the first layer and to
    # `project_per_layer_inputs`: the gradient from the layer waits for that from the projection
    embeddings = step.tokens * step.model.hidden_size * step.layers[0].stream_bytes
    return (
        *step.always,
        held_outputs(step),
        Entry(ALL_GRADIENTS, step.gradients.late),
        Entry(LAYER_INPUTS_BACKWARD, making + embeddings),
    )


MERGING_FORWARD = Fact(
    part="temporary",
    what="forward of what makes one hidden state of several",
    shape="[batch_size, seq_len, states, hidden_size]",
    dtype="stream_bytes",
    why="further states are projected, brought to one magnitude, stacked and averaged",
    source="symbolic.altup: Gemma3nTextModel.forward",
)
MERGING_BACKWARD = Fact(
    part="temporary",
    what="backward of what makes one hidden state of several",
    shape="[batch_size, seq_len, states, hidden_size]",
    dtype="stream_bytes",
    why="what it saved, and a gradient of all states for each of them",
    source="symbolic.altup: Gemma3nTextModel.forward",
)
EXPANDING_BACKWARD = Fact(
    part="temporary",
    what="backward of what makes several hidden states of one",
    shape="[batch_size, seq_len, states, hidden_size]",
    dtype="stream_bytes",
    why="what it saved, and gradients of the states; that of the layers' inputs waits",
    source="symbolic.altup: Gemma3nTextModel.forward",
)


def stream_moments(step: TrainingStep) -> dict[str, Entries]:
    """Before the first and after the last layer of a stream of several hidden states (Gemma 3n)."""
    begin, end = step.expanding, step.merging
    if begin is None or end is None:
        return {}
    forward = most(end.forward, r=step.r, **step.sized)
    # the model's forward names masks and keys until it returns
    forward = forward + step.tokens * begin.outer_named_bytes + step.keys_in_forward
    if not step.run.gradient_checkpointing:
        forward = forward + step.masks.unnamed_bytes
    result = step.tokens * step.model.stream_width * step.layers[-1].stream_bytes
    moments: dict[str, Entries] = {
        "merging_forward": (
            *step.always,
            *held_between_steps(step),
            step.saved_in_layers,
            step.remainders,
            Entry(MERGING_FORWARD, forward + result),
        )
    }
    if end.backward:
        moments["merging_backward"] = (
            *step.always,
            held_outputs(step),
            Entry(LAST_LAYERS_GRADIENTS, step.gradients.in_layers - step.gradients.of_merging),
            step.saved_in_layers,
            step.remainders,
            Entry(MERGING_BACKWARD, most(end.backward, r=step.r, **step.sized)),
        )
    if begin.backward:
        inputs = step.layer_inputs
        waiting = 0 * step.tokens
        if inputs is not None:
            kept = layer_inputs_saved(inputs, r=step.r, **step.sized)
            waiting = Group(tensors=kept, **step.sized).num_bytes
        moments["expanding_backward"] = (
            *step.always,
            held_outputs(step),
            Entry(ALL_GRADIENTS, step.gradients.late),
            Entry(EXPANDING_BACKWARD, waiting + most(begin.backward, r=step.r, **step.sized)),
        )
    return moments


# --- tied embeddings --------------------------------------------------------------------------

TIED_GRADIENTS = Fact(
    part="gradients",
    what="parts of the tied embedding's gradient, and their sum",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    count="2, and 1 where an encoder's is added in place",
    why="autograd holds the head's until the embedding's is there; their sum is a third",
    source="torch InputBuffer::accumulate; peaks of T5 and BART on a CPU",
)


def decoder_embedding_backward(step: TrainingStep) -> Entries:
    """In the decoder's use of a table that is also the head, while the encoder waits."""
    is_first = not step.accumulates
    gradients = step.gradients.total - step.gradients.of_first_stack
    if step.model.splits_embeddings:
        gradients = gradients - step.model.embeddings[1].num_params * step.param_bytes
    return (
        *step.always,
        held_outputs(step),
        Entry(ALL_GRADIENTS, gradients * is_first),
        step.remainders,
        _kept_by_encoder(step, step.masks.shared),
        _tied_gradients(step, _num_tied_parts(step)),
    )


def embedding_backward(step: TrainingStep) -> Entries:
    """At the end of the backward, at the embedding table that is also the head."""
    # `InputBuffer` keeps the head's part from the start of the backward: the node of the weight
    # runs once all of its inputs are there. An encoder's part is added in place to the sum of head
    # and decoder, which no node of theirs holds
    parts = 1 + step.accumulates if step.second_stack else _num_tied_parts(step)
    gradients = step.gradients.total
    if step.attends and not step.accumulates:
        gradients = gradients - step.gradients.of_tower
    return (
        *step.static,
        held_outputs(step),
        kept_cache(step),
        Entry(ALL_GRADIENTS, gradients),
        step.late_remainders,
        _tied_gradients(step, parts),
    )


TABLE_GRADIENT = Fact(
    part="gradients",
    what="gradient of the embedding, before it is added to that of earlier micro-steps",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    why="the backward of a lookup makes one for all rows of the table",
    source="torch embedding_dense_backward; AccumulateGrad",
)


def table_moment(step: TrainingStep) -> dict[str, Entries]:
    """At the end of the backward, at a table that is no head, or at the adapter of one.

    A gradient of all rows is there beside the one that it is added to. That of an adapter's A is a
    transposed view, which is copied where there is none yet: `AccumulateGrad`, case 1.3.
    """
    is_apart = (step.accumulates or step.frees_gradients) and not step.gradients.tied_wait
    whole = step.gradients.of_table * is_apart
    made = whole + step.gradients.looked_up + step.gradients.left
    if not (step.adapts_table or whole or step.gradients.left):
        return {}
    entries = (
        *step.static,
        *step.waiting,
        held_outputs(step),
        Entry(ALL_GRADIENTS, step.gradients.total),
        step.late_remainders,
        Entry(TABLE_GRADIENT, made + 0 * step.tokens),
    )
    return {"table_backward": entries}


def _num_tied_parts(step: TrainingStep) -> int:
    """The head's, the embedding's, their sum or the accumulated gradient of earlier micro-steps."""
    return 2 + (step.accumulates or step.frees_gradients) - step.gradients.adds_tied_in_place


def _tied_gradients(step: TrainingStep, parts: int) -> Entry:
    one = step.gradients.tied_params * step.param_bytes
    return Entry(TIED_GRADIENTS, parts * one + 0 * step.tokens)


# --- the optimizer ----------------------------------------------------------------------------


def optimizer_step(step: TrainingStep) -> Entries:
    """In the optimizer's update: the graph is gone, all gradients are there."""
    # `Trainer._run_epoch` of transformers calls `zero_grad` after the step, so that
    # gradients outlive it; `_multi_tensor_adam` of torch makes its lists while they are there.
    # Clipping before it works in place: `_foreach_mul_` in `_clip_grads_with_norm_` of clip_grad.py
    temporaries = optimizer.step_temporary_bytes(
        step.updated_last, optimizer=step.run.optimizer, foreach=step.has_foreach
    )
    gradients = gradient_bytes(step.updated_last) * step.frees_gradients + step.gradients.total
    return (
        *step.static,
        *held_in_update(step),
        Entry(ALL_GRADIENTS, gradients),
        step.late_remainders,
        Entry(optimizer.TEMPORARIES, temporaries + 0 * step.num_trained),
    )


TABLE_GRADIENT = Fact(
    part="gradients",
    what="gradient of the copy of the token table",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    why="of all rows, from which those of the trained tokens are taken",
    source="peft TrainableTokensLayer.get_merged_weights; torch embedding_dense_backward",
)


def table_backward(step: TrainingStep) -> Entries:
    """At the end of the backward, at the copy of the token table."""
    rows = step.tokens * step.model.embeddings[0].width * step.dtypes.embedding_bytes
    return (
        *step.static,
        held_outputs(step),
        Entry(ALL_GRADIENTS, step.gradients.total),
        step.late_remainders,
        Entry(TABLE_GRADIENT, step.table_bytes + rows),
    )


def head_copy_backward(step: TrainingStep) -> Entries:
    """In the backward of a head that is tied to such a table."""
    width = loss.logit_width(step.model) + step.model.hidden_size
    return (
        *step.always,
        step.saved_for_backward,
        step.remainders,
        held_outputs(step),
        Entry(LOGITS_GRADIENT, step.tokens * width * step.dtypes.compute_bytes),
        _head_copy(step),
        Entry(TABLE_GRADIENT, step.table_bytes),
    )


def training_moments(step: TrainingStep) -> dict[str, Entries]:
    """Every moment that can be the peak; of equal ones the first is named."""
    moments = {
        "layer_forward": layer_forward(step),
        "loss_forward": loss_forward(step),
        "loss_backward": loss_backward(step),
        "layer_backward": layer_backward(step),
        "first_layer_backward": first_layer_backward(step),
        "optimizer_step": optimizer_step(step),
    }
    if step.has_reference and step.trainer.forwards(step.run).in_graph:
        moments["reference_forward"] = reference_forward(step)
    if step.second_stack:
        moments["first_decoder_layer_backward"] = first_decoder_layer_backward(step)
        moments["encoder_forward"] = encoder_forward(step)
        moments["encoder_backward"] = encoder_backward(step)
    moments |= layers_backward_at_depth(step)
    if step.layer_inputs is not None and step.layer_inputs.backward:
        moments["layer_inputs_backward"] = layer_inputs_backward(step)
    moments |= stream_moments(step)
    in_points = step.trainer.chunked_loss(step.run) is not None  # those of `loss_backward`
    if step.gradients.of_head and not (LOSS_HEADS[step.run.loss_head].in_tiles or in_points):
        moments["head_backward"] = head_backward(step)
    if step.method.copies_table:
        moments["table_backward"] = table_backward(step)
        if step.model.head_tied:
            moments["head_backward"] = head_copy_backward(step)
    if step.gradients.tied_wait and step.second_stack:
        moments["decoder_embedding_backward"] = decoder_embedding_backward(step)
    if step.gradients.tied_wait and not step.model.splits_embeddings:
        # else the encoder's table is one of its own, whose gradient is summed with no other
        moments["embedding_backward"] = embedding_backward(step)
    return moments
