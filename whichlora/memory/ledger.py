"""The ledger: what is alive at each moment that can be the peak of a run.

The peak is the largest moment. A moment is a list of entries; the parts of the entries are the
breakdown that a user sees, and their facts are what `whichlora explain` prints. Here are the
moments of training; those of inference are in `memory.generation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whichlora.architecture import Linear, ModelSpec
from whichlora.memory import activations, allocator, facts, kv_cache, logits, optimizer, weights
from whichlora.memory.depth import after, has_one_order, worst_backward
from whichlora.memory.entries import Entry, Group, Tensor, listed, tensor_bytes
from whichlora.memory.gemma4_code import layer_input_points
from whichlora.memory.layer_bytes import (
    LayerBytes,
    forward_bytes,
    layer_bytes,
)
from whichlora.memory.outside import layer_inputs_saved, masked_head_saved, outside_saved
from whichlora.memory.tape import LAYER_INPUT, most
from whichlora.memory.trained import (
    gradient_bytes,
    saved_modules,
    trained_biases,
    trained_tensors,
    unwanted_gradient_bytes,
)
from whichlora.methods.base import FrozenTensor, Method
from whichlora.numeric import Count, largest, smallest
from whichlora.specs import ALL_LINEAR, GpuSpec, RunConfig
from whichlora.stack import Stack
from whichlora.targets import adapted, adapted_linears

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
_AFTER_LAYERS = ("embedding_backward", "optimizer_step")


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


def trained_params(
    model: ModelSpec,
    targets: tuple[str, ...],
    method: Method,
    r: Count,
    *,
    modules_to_save: tuple[str, ...] = (),
    bias: str = "none",
) -> Count:
    """Trainable parameters: all of them, or adapters and copied modules. Kind: exact."""
    if method.trains_base:
        return model.trainable_params + weights.masked_head_params(model) + 0 * r
    total: Count = 0 * r
    for saved in saved_modules(model, modules_to_save, param_bytes=0):
        total = total + saved.num_params
    for one in trained_biases(model, targets, bias, param_bytes=0):
        total = total + one.num_params * one.count
    for group in model.groups:
        of_layer: Count = 0 * r
        for linear in adapted(group.layer, targets):
            of_layer = of_layer + method.adapter_params(linear, r)
        total = total + of_layer * (1 if group.shared else group.count)
    for linear in model.outer_linears:
        if linear.rank_multiple and linear.name in targets:
            total = total + method.adapter_params(linear, r)
    return total


def _checkpoint(model: ModelSpec, one: LayerBytes) -> Tensor:
    """The input of a checkpointed layer."""
    return Tensor(
        LAYER_INPUT,
        one.stream_bytes * model.hidden_size,
        dims="hidden_size",
        element_bytes=one.stream_bytes,
    )


def _holds_input(one: LayerBytes) -> bool:
    """Whether its first matrix, quantised to 8 bit, holds the very tensor that is checkpointed."""
    return any(held.what == LAYER_INPUT for held in one.held)


def _idle_adapted(model: ModelSpec, run: RunConfig, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """Matrices that get an adapter and no gradient, since no text passes them."""
    everything = ALL_LINEAR in run.target_modules
    return tuple(one for one in model.idle_linears if everything or one.name in targets)


def _lent(one: LayerBytes) -> Tensor:
    return Tensor("keys and values that later layers read", constant=one.lent)


def weight_entries(model: ModelSpec, stack: Stack, *, like: Count) -> list[Entry]:
    """What loading leaves, in the shape of `like` where that is an array."""
    stored = weights.weight_bytes(model, stack)
    return [Entry(facts.WEIGHTS[name], size + 0 * like) for name, size in stored.items()]


def adapter_entries(
    model: ModelSpec,
    run: RunConfig,
    stack: Stack,
    method: Method,
    targets: tuple[str, ...],
    r: Count,
) -> list[Entry]:
    """Weights of the adapters, those that no text passes among them, and of copied modules."""
    num_params = trained_params(model, targets, method, r)
    for linear in _idle_adapted(model, run, targets):
        num_params = num_params + method.adapter_params(linear, r)
    copied = gradient_bytes(saved_modules(model, run.modules_to_save, stack.embedding_bytes))
    frozen = method.frozen_tensors(adapted_linears(model, targets), r)
    return [
        Entry(facts.ADAPTERS, num_params * stack.adapter_bytes),
        listed(facts.FROZEN_ADAPTERS, *(_frozen_group(one, stack) for one in frozen)),
        Entry(facts.SAVED_MODULES, copied + 0 * r),
    ]


def _frozen_group(tensor: FrozenTensor, stack: Stack) -> Group:
    listed_one = Tensor(
        tensor.name,
        constant=tensor.rows * tensor.width * stack.adapter_bytes,
        dims=tensor.dims,
        element_bytes=stack.adapter_bytes,
    )
    return Group(tensors=(listed_one,), count=tensor.count, tokens=0, span=0)


def _inputs(model: ModelSpec, stack: Stack, tokens: Count, span: Count) -> Entry:
    batch = Tensor("token ids, labels, mask", 24, element_bytes=8)
    rotary = Tensor(
        "cosines and sines",
        constant=activations.rotary_bytes(model, stack, span=span),
        dims="2, seq_len, rotary_dim",
        element_bytes=stack.stream_bytes,
    )
    return listed(facts.INPUTS, Group(tensors=(batch, rotary), tokens=tokens, span=span))


def _autocast_copies(model: ModelSpec, stack: Stack, method: Method, trained: Count) -> Count:
    """16-bit copies of what is trained in fp32; the graph and autocast's cache hold them."""
    if not stack.autocast:
        return 0 * trained
    if not method.trains_base:
        return 2 * trained if stack.adapter_bytes == 4 else 0 * trained
    matrices = sum(
        count * sum(linear.num_weights for linear in layer.linears if linear.is_module)
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
    trained = trained_params(model, targets, method, r)
    tensors = trained_tensors(
        model,
        targets,
        method,
        r,
        stack=stack,
        modules_to_save=run.modules_to_save,
        bias=run.bias,
    )
    copied = tuple(saved_modules(model, run.modules_to_save, stack.embedding_bytes))
    param_bytes = stack.base_bytes if method.trains_base else stack.adapter_bytes
    all_gradients = gradient_bytes(tensors) + 0 * trained
    accumulated = all_gradients if run.gradient_accumulation_steps > 1 else 0 * trained

    static = weight_entries(model, stack, like=tokens)
    if not method.trains_base:
        static += adapter_entries(model, run, stack, method, targets, r)
    states = optimizer.state_bytes(tensors, optimizer=run.optimizer, device_kind=gpu.kind)
    in_step = optimizer.step_temporary_bytes(tensors, optimizer=run.optimizer, device_kind=gpu.kind)
    static.append(Entry(facts.OPTIMIZER_STATES, states + 0 * trained))

    layers = [
        layer_bytes(
            layer,
            count,
            model,
            targets,
            stack,
            method,
            r=r,
            tokens=tokens,
            span=seq_len,
            run=run,
        )
        for layer, count in model.layers()
    ]
    first_stack = [
        number for number, one in enumerate(model.groups) if one.stack == model.groups[0].stack
    ]
    trains_embedding = any(one.is_embedding for one in copied)
    needs_grad = method.trains_base or run.gradient_checkpointing or trains_embedding
    sized = {"tokens": tokens, "span": seq_len}
    inputs = layer_input_points(
        model,
        targets,
        stack,
        method,
        needs_grad=needs_grad,
        accumulated=run.gradient_accumulation_steps > 1,
    )
    two_stacks = len(first_stack) < len(model.groups)
    outside, before_layers, before_first = (
        Group(
            where="around the layers",
            tensors=(
                *outside_saved(
                    model,
                    targets,
                    stack,
                    embeddings_need_grad=needs_grad,
                    after_layers=after,
                    in_encoder=encoding and two_stacks,
                ),
                *(masked_head_saved(model, targets, stack, method, r=r) if after else ()),
                *layer_inputs_saved(inputs, r=r, **sized),
            ),
            **sized,
        )
        for after, encoding in ((True, False), (False, False), (False, True))
    )
    copies = _autocast_copies(model, stack, method, trained)
    mask_bytes, kept_mask_bytes = (
        activations.kept_mask_bytes(model, stack, checkpointed=checkpointed, **sized)
        for checkpointed in (True, bool(run.gradient_checkpointing))
    )
    masks = Tensor(
        "masks and biases that layers share",
        constant=kept_mask_bytes,
        dims="batch_size, seq_len, seq_len",
    )
    if run.gradient_checkpointing:
        groups = [
            *(
                Group(
                    tensors=() if _holds_input(one) else (_checkpoint(model, one),),
                    count=one.count,
                    **sized,
                )
                for one in layers
            ),
            Group(tensors=(masks,), **sized),
            *(Group(tensors=x.held, count=x.count, **sized) for x in layers),
            *(Group(tensors=(_lent(x),), count=x.count, **sized) for x in layers),
        ]
        fact = facts.CHECKPOINTS
        # what is made again takes the place of what was lent
        in_backward = [one.recomputed - one.lent for one in layers]
        each = [Group(tensors=(_checkpoint(model, one),), **sized).num_bytes for one in layers]
        of_first = [worst + own for worst, own in zip(in_backward, each, strict=True)]
        in_forward = largest(*(one.forward for one in layers))
    else:
        norms_train = run.bias == "all" and any(one.bias for one in model.groups[0].layer.norms)
        unsaved: dict[str, Count] = {}  # by the first layer of each stack
        for group, x in zip(model.groups[::-1], layers[::-1], strict=True):
            unsaved[group.stack] = 0 * tokens + x.unsaved * (not needs_grad and not norms_train)
        less = Tensor(
            "not kept by the first layer, whose input is frozen",
            constant=-sum(unsaved.values(), start=0 * tokens),
        )
        again: Count = 0 * trained
        for group, x in zip(model.groups, layers, strict=True):
            if group.shared:  # autocast copies a weight once, however many layers read it
                again = again + (x.count - 1) * tensor_bytes(x.copies, **sized)
        once = Tensor("weights of shared layers, copied once", constant=-again)
        whole = Tensor(
            "copy of the matrix that is not quantised",
            constant=weights.unconverted_copy_bytes(model, stack),
        )
        groups = [
            *(Group(tensors=x.tensors, count=x.count, **sized) for x in layers),
            Group(tensors=(less, once, whole, masks), **sized),
        ]
        fact = facts.SAVED
        in_backward = [one.backward - one.saved for one in layers]
        each = [one.saved for one in layers]
        of_first = [
            x.backward - unsaved[group.stack] for group, x in zip(model.groups, layers, strict=True)
        ]
        in_forward = largest(*(one.forward - one.saved for one in layers), 0 * tokens)
        # the model's loop names the looked-up rows, the layer's input and the masks
        named = 2 * model.hidden_size * max(one.stream_bytes for one in layers)
        in_forward = in_forward + tokens * named + mask_bytes - kept_mask_bytes
        copies = 0 * copies  # each layer's are among what it keeps
    # in later micro-steps all gradients are there already
    left = [one.gradients if run.gradient_accumulation_steps == 1 else 0 for one in layers]
    in_layer = worst_backward(model, layers, in_backward, each, left)
    # backward ends in the encoder where there is one
    first_kinds = first_stack[:1] if has_one_order(model) else first_stack
    in_first = largest(*(of_first[number] for number in first_kinds))
    held = [
        Group(
            tensors=x.held,  # without checkpointing the first layer's are in its backward
            count=x.count - (number == 0 and not run.gradient_checkpointing),
            **sized,
        )
        for number, x in enumerate(layers)
    ]
    kept = listed(fact, *groups, outside)
    of_kept: Count = 0 * tokens
    of_trained: Count = 0 * trained
    if not allocator.splits_all(gpu, expandable=run.expandable_segments):
        of_kept = allocator.remainder_bytes(groups, like=tokens)
        for one in tensors:
            block = allocator.expected_remainder(one.param_bytes * one.num_params)
            of_trained = of_trained + one.count * block
    # of adapters and states, the base's weights being cut from one block; and of gradients
    lasting = int(not method.trains_base) + optimizer.num_wide_states(run.optimizer)
    accumulates = int(run.gradient_accumulation_steps > 1)
    remainders = Entry(facts.REMAINDERS, of_kept + (lasting + accumulates) * of_trained)
    late_remainders = Entry(facts.REMAINDERS, (lasting + 1) * of_trained)
    kept_by_layers = listed(fact, *groups, before_layers)

    decoder_cache = 0 * tokens
    if not run.gradient_checkpointing:
        decoder_cache = tokens * kv_cache.trained_cache_elements(model, stack) * 4
    kept_logits = logits.kept_logits_bytes(model, stack, tokens=tokens, loss_head=run.loss_head)
    head_copy = logits.head_copy_bytes(model, stack)
    loss_forward = logits.loss_forward_bytes(model, stack, tokens=tokens, loss_head=run.loss_head)
    loss_backward = logits.loss_backward_bytes(model, stack, tokens=tokens, loss_head=run.loss_head)
    masked = model.masked_head
    head_width = model.embeddings[0].width if masked is None else masked.width
    head_params = head_width * logits.logit_width(model)
    of_head = gradient_bytes(one for one in copied if not one.is_embedding)
    if method.trains_base:
        of_head = head_params * param_bytes
    head_gradient = of_head + 0 * trained
    late_gradients = all_gradients - largest(*(layers[number].gradients for number in first_kinds))
    late_gradients = late_gradients - gradient_bytes(one for one in copied if one.is_embedding)
    if method.trains_base:
        looked_up = model.embeddings[int(model.head_tied) :]
        embedded = sum(one.num_params for one in looked_up if one.trains)
        late_gradients = late_gradients - embedded * param_bytes
    embedding_gradient = model.hidden_size * layers[0].stream_bytes
    is_tied = model.head_tied or (masked is not None and masked.tied)
    waits = method.trains_base and is_tied
    kept_gradients = head_gradient
    if run.gradient_accumulation_steps > 1:
        # all of them are there; of a tied head a second one waits for the embedding's
        kept_gradients = late_gradients = head_gradient * waits
    for number, (layer, count) in enumerate(model.layers()):
        unwanted = unwanted_gradient_bytes(layer, targets, method, stack)
        late_gradients = late_gradients + (count - (number == 0)) * unwanted

    before = (
        *static,
        Entry(facts.ACCUMULATED, accumulated),
        _inputs(model, stack, tokens, seq_len),
    )
    moments = {
        "layer_forward": (
            *before,
            kept_by_layers,
            remainders,
            Entry(facts.DECODER_CACHE, decoder_cache),
            Entry(facts.LAYER_FORWARD, in_forward),
        ),
        "loss_forward": (
            *before,
            kept,
            remainders,
            Entry(facts.DECODER_CACHE, decoder_cache),
            Entry(facts.LOSS_FORWARD, loss_forward),
            Entry(facts.AUTOCAST_COPIES, copies),
            Entry(facts.HEAD_COPY, head_copy + 0 * tokens),
        ),
        "loss_backward": (
            *before,
            kept,
            remainders,
            Entry(facts.LOSS_BACKWARD, loss_backward),
            Entry(facts.HEAD_COPY, head_copy + 0 * tokens),
        ),
        "layer_backward": (
            *before,
            Entry(facts.KEPT_LOGITS, kept_logits),
            Entry(facts.LAST_LAYERS_GRADIENTS, kept_gradients),
            kept_by_layers,
            remainders,
            Entry(facts.LAYER_BACKWARD, in_layer),
        ),
        "first_layer_backward": (
            *before,
            Entry(facts.KEPT_LOGITS, kept_logits),
            Entry(facts.LATER_LAYERS_GRADIENTS, largest(late_gradients, 0 * late_gradients)),
            listed(facts.HELD_INPUTS, *held),
            late_remainders,
            listed(facts.AROUND_LAYERS, before_first, Group(tensors=(masks,), **sized)),
            Entry(facts.LAYER_BACKWARD, in_first),
        ),
        "optimizer_step": (
            *static,
            Entry(facts.ALL_GRADIENTS, all_gradients),
            late_remainders,
            Entry(
                facts.OPTIMIZER_TEMPORARIES,
                in_step + 0 * trained,
            ),
        ),
    }
    others = [number for number in range(len(layers)) if number not in first_stack]
    first_gradients = sum((layers[n].count * layers[n].gradients for n in first_stack), 0 * trained)
    if others:  # the decoder's first layer, while the encoder still waits
        later = late_gradients
        if run.gradient_accumulation_steps == 1:
            own = largest(*(layers[number].gradients for number in others))
            later = largest(later + layers[0].gradients - first_gradients - own, 0 * trained)
        waiting = [groups[number] for number in first_stack]
        in_first_of_decoder = largest(*(of_first[number] for number in others))
        if run.gradient_checkpointing:
            layer = model.groups[others[0]].layer
            zeros = activations.remade_zeros_bytes(layer, stack, span=seq_len)
            in_first_of_decoder = in_first_of_decoder + zeros
        moments["first_decoder_layer_backward"] = (
            *before,
            Entry(facts.KEPT_LOGITS, kept_logits),
            Entry(facts.LATER_LAYERS_GRADIENTS, later),
            remainders,
            listed(fact, *waiting, before_layers, Group(tensors=(masks,), **sized)),
            Entry(facts.LAYER_BACKWARD, in_first_of_decoder),
        )
    if method.trains_base and has_one_order(model):
        for group, one in zip(model.groups[1:], in_backward[1:], strict=True):
            place = group.positions[0]
            left = after(model, [x.gradients for x in layers], place) + head_gradient
            # the first of `groups` are the layers; those after this one have given theirs back
            waiting = [
                replace(x, count=sum(position <= place for position in y.positions))
                for x, y in zip(groups, model.groups, strict=False)
            ]
            moments[f"layer_{place}_backward"] = (
                *before,
                Entry(facts.KEPT_LOGITS, kept_logits),
                Entry(facts.LATER_LAYERS_GRADIENTS, left * (run.gradient_accumulation_steps == 1)),
                listed(fact, *waiting, *groups[len(layers) :], before_layers),
                late_remainders,
                Entry(facts.LAYER_BACKWARD, one),
            )
    if inputs is not None and inputs.backward:
        in_inputs = most(inputs.backward, r=r, **sized)
        moments["layer_inputs_backward"] = (
            *before,
            Entry(facts.KEPT_LOGITS, kept_logits),
            Entry(facts.ALL_GRADIENTS, late_gradients),
            Entry(facts.LAYER_INPUTS_BACKWARD, in_inputs + tokens * embedding_gradient),
        )
    if of_head:
        moments["head_backward"] = (
            *before,
            kept,
            remainders,
            Entry(facts.KEPT_LOGITS, kept_logits),
            Entry(
                facts.LOGITS_GRADIENT,
                tokens * (logits.logit_width(model) + model.hidden_size) * stack.compute_bytes,
            ),
            Entry(facts.HEAD_GRADIENT, head_gradient),
            Entry(facts.HEAD_COPY, head_copy + 0 * tokens),
        )
    if waits:
        # autograd holds the head's gradient until the embedding's is there; their sum is a third,
        # and what earlier micro-steps summed up one more
        of_tied = head_params * param_bytes
        parts = 2 + (run.gradient_accumulation_steps > 1)
        if others:  # so in the decoder; to that sum the encoder's is added in place
            # the head's, cast back from autocast's copy, is no view: summed in place
            is_cast = stack.under_autocast and param_bytes == 4
            there = all_gradients - first_gradients
            if model.splits_embeddings:
                there = there - model.embeddings[1].num_params * param_bytes
            moments["decoder_embedding_backward"] = (
                *before,
                Entry(facts.KEPT_LOGITS, kept_logits),
                Entry(facts.ALL_GRADIENTS, there * (run.gradient_accumulation_steps == 1)),
                remainders,
                listed(fact, *waiting, before_layers, Group(tensors=(masks,), **sized)),
                Entry(facts.TIED_GRADIENTS, (parts - is_cast) * of_tied + 0 * tokens),
            )
            parts -= 1
        if not model.splits_embeddings:  # else the encoder's is not summed with them
            moments["embedding_backward"] = (
                *static,
                Entry(facts.KEPT_LOGITS, kept_logits),
                Entry(facts.ALL_GRADIENTS, all_gradients),
                late_remainders,
                Entry(facts.TIED_GRADIENTS, parts * of_tied + 0 * tokens),
            )
    vocab = logits.logit_width(model) if run.loss_head in ("hf", "unsloth") else 0
    idle = allocator.idle_after_step_bytes(
        gpu,
        loss_bytes=largest(loss_forward, loss_backward),
        layer_bytes=in_layer,
        left_bytes=in_layer
        if stack.libraries.shifts_logits
        else forward_bytes(model, stack, tokens=tokens, span=seq_len),
        narrow_logits_bytes=tokens * vocab * 2,
        expandable=run.expandable_segments,
    )
    found = Ledger(
        moments=moments,
        idle_bytes=idle,
        workspace_bytes=allocator.workspace_bytes(gpu, training=True),
    )
    # these segments are idle while layers run; a later peak is cut from what they left
    in_layers = [found.moment_bytes(name) for name in moments if name not in _AFTER_LAYERS]
    later = largest(*in_layers) + idle - found.peak_allocated_bytes
    idle = largest(later, smallest(idle, allocator.PAGES_BYTES))
    found = replace(found, idle_bytes=idle)
    if gpu.kind == "cpu" or run.expandable_segments:
        return found
    # The optimizer's lists of small tensors find no use for the segments of the activations.
    left_behind = largest(loss_forward, loss_backward, in_layer) + kept.num_bytes
    at_optimizer = found.moment_bytes("optimizer_step") + left_behind
    return replace(found, idle_bytes=largest(idle, at_optimizer - found.peak_allocated_bytes))
