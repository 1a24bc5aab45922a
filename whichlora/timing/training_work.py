"""What one optimizer step computes and moves, and an evaluation during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from whichlora.memory import weights
from whichlora.memory.embeddings import ENCODER_OUT
from whichlora.memory.gradients import saved_modules
from whichlora.memory.optimizer import Update, update_bytes, update_flops, update_launches
from whichlora.methods.base import AdapterWork, Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, Real, floor_div
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import (
    adapted,
    adapted_linears,
    adapts_head,
    adapts_table,
    token_table,
)
from whichlora.timing import traffic
from whichlora.timing.expansion import backward_bytes, forward_bytes, recast_bytes, visited_matrices
from whichlora.timing.mamba_work import scan_flops_per_token, scan_loop_backward_bytes
from whichlora.timing.products import idle_flops
from whichlora.timing.quant_launches import backward_launches, forward_launches
from whichlora.timing.running import RunningModel
from whichlora.timing.traffic import StepTraffic, Traffic
from whichlora.timing.work import (
    Work,
    active_weights,
    adapter_works,
    attention_work,
    by_shape,
    expanded_again,
    further_reading_flops,
    grouped_ops,
    head_weights,
    loop_kernels,
    num_keys,
    num_logits,
    outside_ops,
    product_work,
    states_bytes_around,
    unpacked_work,
    wide_weights,
    widens_head,
)
from whichlora.trainers import get_trainer
from whichlora.trainers.base import LogitsLoss

# Launches that take the host as long as one call of `checkpoint`, around a layer, and as the Python
# hooks of one tensor that non-reentrant checkpointing saves: packed in the forward, packed again in
# the second one, unpacked in the backward.
# Kind: measured, `benchmarks/host_costs.py`: 26 to 33 and 1.3 to 2.4.
CHECKPOINT_CALL, SAVED_TENSOR_HOOKS = 31, 1.6
LAYER_MODULES = 6  # beside its linear layers: itself, attention, MLP, activation and two norms
# As `LossHeadSpec.passes`, of a trainer's own loss of fp32 logits. Kind: estimate, read. Those of
# 16 bit are widened (6), and their gradient is narrowed (6). It is placed among those of all
# positions (12), and metrics read the logits (4). Between, a kernel reads them (4), and writes
# their gradient (8).
# Row by row `logsumexp` subtracts, exponentiates and sums (24), then does so again and multiplies
# (24), rows are stacked (8), and `gather` adds its gradient (16). A log-softmax of all copies (8),
# reads and writes (12), and so does its backward (12), beside `gather`'s zeros (4).
# The cross entropy of the chosen half adds copy, log-softmax and their backwards (16), two placed
# gradients (14) and a sum (12). Source: as of `memory.logits_loss`.
_LOGITS_LOSS_PASSES = {"kernel": 28, "rows": 88, "softmax": 52}
_WIDENING_PASSES = 12
_CROSS_ENTROPY_PASSES = 42
# The same of TRL's fused head where there is no Triton: each operator of its tiles reads and writes
# fp32 tensors. Kind: estimate, read. Forward: scaled twice (16), a mask (16), two largest (8),
# exponents with their sum and their product (36). Backward: scaled twice (16), log-softmax and its
# exponent (16), the target (6), gradients (52), a copy (8). Source: TRL 1.16
# `_torch_transform`, `_forward_tile`, `_backward_tile` of kernels/chunked_logprob.py.
_FOLDED_FORWARD_PASSES, _FOLDED_BACKWARD_PASSES = 76, 98
# Of a loss without a graph: widened logits and what is computed of them.
_FORWARD_PASSES = {"kernel": 12, "rows": 30, "softmax": 26}


def wide_gradient_weights(layer: Layer, dtypes: Dtypes) -> int:
    """Weights in 8 bit whose product of the backward is computed in fp32: those with fp32 inputs.

    Kind: exact. Source: bitsandbytes 0.50.2 `MatMul8bitLt.backward`: `CB.to(ctx.dtype_A)`.
    """
    if dtypes.quant != "int8" or dtypes.compute_bytes == 4:
        return 0
    inputs = {linear.name: dtypes.stream_bytes for linear in layer.linears}
    inputs |= {attention.linears[-1].name: dtypes.compute_bytes for attention in layer.attentions}
    if layer.mlp is not None:
        inputs[layer.mlp.linears[-1].name] = dtypes.mlp_bytes
    return sum(
        linear.active * linear.in_features * linear.out_features
        for linear in layer.linears
        if is_quantised(linear, dtypes) and inputs[linear.name] == 4
    )


def _further_rows(running: RunningModel, *, tokens: Count, seq_len: Count) -> Count:
    """Rows times parameters of adapters, where an encoder's rows are more than a decoder's.

    They are those in the encoder, and those that read what it returns; less where it has fewer.

    Kind: exact. Source: `spec.architecture.with_source_len`.
    """
    model, r = running.model, running.r
    total = 0 * tokens * r
    if not model.groups[0].layer.own_len:
        return total
    for layer, count in model.layers():
        in_layer = floor_div(tokens, seq_len) * (layer.own_len or seq_len)
        for linear in adapted(layer, running.targets):
            rows = _rows_read(model, in_layer, layer.own_len or seq_len, linear)
            total = total + (rows - tokens) * count * running.method.adapter_params(linear, r)
    return total


def _rows_read(model: ModelSpec, tokens: Count, seq_len: Count, linear: Linear) -> Count:
    """Rows that a matrix reads in a layer of `tokens`: an encoder's output has its own."""
    own_len = model.groups[0].layer.own_len
    encoded = own_len and linear.reads == ENCODER_OUT
    return floor_div(tokens, seq_len) * own_len if encoded else tokens


def trained_layers(
    layer: Layer, count: int, running: RunningModel, *, tokens: Count, seq_len: Count
) -> Work:
    """One micro-step of `count` equal layers. Kind: estimate. Source: `docs/time.md`."""
    run, dtypes, method = running.run, running.dtypes, running.method
    whole, layer = layer, layer.running
    tokens, seq_len = layer.padded(tokens, seq_len)
    recompute = 1 if run.gradient_checkpointing else 0
    passes = 3 if method.trains_base else 2
    multiplied = count * 2 * tokens * (passes + recompute)
    wide = wide_weights(layer, dtypes)
    stored = sum(weights.linear_bytes(linear, dtypes) for linear in layer.linears)
    weight_read = count * stored * (passes + recompute)
    scanned = count * tokens * scan_flops_per_token(layer, seq_len, decoding=False)
    attended = _trained_attentions(
        whole, dtypes, tokens=tokens, seq_len=seq_len, forwards=1 + recompute
    )
    adapters = adapter_works(layer, running)
    between = _between_products(whole, running, tokens=tokens, seq_len=seq_len)
    unpacked, expanded_read = forward_bytes(layer, dtypes, tokens)
    expanded_back, read_back = backward_bytes(layer, dtypes)
    recast, recast_back = recast_bytes(layer, dtypes, tokens)
    dequant = count * (unpacked * (1 + recompute) + expanded_back)
    weight_read = weight_read + count * (expanded_read * (1 + recompute) + read_back)
    of_quants = forward_launches(layer, dtypes, tokens)
    of_quants_back = backward_launches(layer, dtypes, tokens)
    in_forward = between.forward.kernels + of_quants.kernels
    again = (between.repeated.kernels + of_quants.kernels) * recompute
    first_is_recorded = not (recompute and run.use_reentrant)
    hooks = SAVED_TENSOR_HOOKS * first_is_recorded * between.forward.saves
    in_fp32 = count * 2 * tokens * wide_gradient_weights(layer, dtypes)
    layers = Work(
        product_flops=multiplied * (active_weights(layer) - wide)
        - in_fp32
        + count * (passes + recompute) * further_reading_flops(layer, tokens // seq_len, tokens),
        wide_product_flops=multiplied * wide + in_fp32,
        idle_flops=count
        * _trained_idle_flops(layer, tokens, method, recompute, running.chip.num_multiprocessors),
        weight_read_bytes=weight_read,
        attention_flops=scanned * (3 + recompute),
        elementwise_bytes=count
        * (between.forward.moved + between.repeated.moved + between.backward.moved)
        + count * (recast * (1 + recompute) + recast_back),
        dequant_bytes=dequant,
        launches=count * (in_forward + again),
        recorded_launches=count * (in_forward * first_is_recorded + again),
        autograd_launches=count * (between.backward.kernels + of_quants_back.kernels),
        host_launches=count
        * (recompute * (CHECKPOINT_CALL + hooks + of_quants.host) + of_quants.host)
        + count * of_quants_back.host,
        walked_modules=count * _walked_modules(layer, run, adapters),
    )
    rows_of = partial(_rows_read, running.model, tokens, seq_len)
    in_step = (
        _trained_adapter(linear, adapter, dtypes, recompute, count, rows_of(linear))
        for linear, adapter in adapters
    )
    total = Work.total((layers, attended.times(count), *in_step))
    return unpacked_work(total, dtypes, running.chip)


def _trained_attentions(
    layer: Layer, dtypes: Dtypes, *, tokens: Count, seq_len: Count, forwards: int
) -> Work:
    """Products of the attentions of one layer in `forwards` forwards and a backward."""
    return Work.total(
        attention_work(
            attention,
            dtypes,
            batch_size=tokens // seq_len,
            queries=seq_len,
            keys=num_keys(attention, seq_len) * attention.ring,
            triangular=True,
            forwards=forwards,
            backward=True,
        )
        for attention in layer.attentions
    )


def _between_products(
    layer: Layer, running: RunningModel, *, tokens: Count, seq_len: Count
) -> StepTraffic:
    """What the kernels of one layer move in a micro-step, and how many there are."""
    run = running.run
    counted = traffic.trained_layer(layer, running, tokens=tokens, span=seq_len)
    in_forward = loop_kernels(layer, tokens, seq_len)
    in_backward = loop_kernels(layer, tokens, seq_len, backward=True)
    passes = 2 + running.method.trains_base + bool(run.gradient_checkpointing)
    in_backward = in_backward + passes * grouped_ops(layer, running.dtypes, tokens)  # by C++
    moved_back = tokens * scan_loop_backward_bytes(layer, seq_len)
    return counted + StepTraffic(
        Traffic(kernels=in_forward),
        Traffic(kernels=in_forward * bool(run.gradient_checkpointing)),
        Traffic(moved_back, in_backward),
    )


def _walked_modules(
    layer: Layer, run: RunConfig, adapters: Sequence[tuple[Linear, AdapterWork]]
) -> int:
    """Modules of one layer through which the trainer walks; a script of one's own does not.

    Kind: exact of Llama, an estimate of others. Source: transformers 5.23 `Trainer.training_step`,
    `Trainer.floating_point_ops`.
    """
    if not get_trainer(run.trainer).library_class:
        return 0
    of_adapters = sum(adapter.modules for _, adapter in adapters)
    return LAYER_MODULES + len(layer.linears) + of_adapters


def _trained_idle_flops(
    layer: Layer, tokens: Count, method: Method, recompute: int, num_multiprocessors: int | None
) -> Real:
    """`idle_flops` of the products of one layer: forward, input's gradient, trained weight's."""
    total = 0.0 * tokens
    for linear, number in by_shape(layer):
        inputs, outputs = linear.in_features, linear.out_features
        visited = visited_matrices(linear, tokens)
        rows = tokens * linear.active / visited
        forward = idle_flops(rows, outputs, inputs, num_multiprocessors, count=visited)
        idle = (1 + recompute) * forward + idle_flops(
            rows, inputs, outputs, num_multiprocessors, count=visited
        )
        if method.trains_base:
            idle = idle + idle_flops(outputs, inputs, rows, num_multiprocessors, count=visited)
        total = total + number * idle
    return total


def _trained_adapter(
    linear: Linear,
    adapter: AdapterWork,
    dtypes: Dtypes,
    recompute: int,
    count: int,
    tokens: Count,
) -> Work:
    """Products of one micro-step of one matrix's adapter in `count` layers."""
    # the input's gradient is one product more
    token_flops = tokens * (adapter.token_flops * (2 + recompute) + adapter.backward_token_flops)
    weight_flops = adapter.weight_flops * (1 + recompute) + adapter.backward_weight_flops
    expanded = count * expanded_again(linear, adapter, dtypes) * (1 + recompute)
    in_fp32 = dtypes.widens_adapters if adapter.wide is None else adapter.wide
    parts = [
        product_work(
            count * (token_flops + weight_flops), wide=in_fp32 and dtypes.compute_bytes == 2
        ),
        Work(dequant_bytes=expanded),
    ]
    if adapter.replaces_base and dtypes.widens_adapters:
        base = count * tokens * 2 * (2 + recompute) * linear.active
        base = base * linear.in_features * linear.out_features
        parts.append(Work(product_flops=-base, wide_product_flops=base))
    return Work.total(parts)


def training_work(
    running: RunningModel,
    *,
    batch_size: Count,
    seq_len: Count,
    scored: Count | None = None,
    logits_loss: LogitsLoss | None = None,
    update: Update,
    num_forwards: Count = 1,
) -> Work:
    """One optimizer step: all accumulation micro-steps, then the update.

    Args:
        num_forwards: of a micro-step, each of `batch_size` sequences.

    Frozen weights need one product backward (the input's gradient), trained ones two;
    checkpointing repeats the forward.

    Kind: estimate. Source: `docs/time.md`.
    """
    model, run, dtypes, method = running.model, running.run, running.dtypes, running.method
    tokens = batch_size * seq_len
    scored = tokens if scored is None else scored
    recompute = 1 if run.gradient_checkpointing else 0
    passes = 3 if method.trains_base else 2
    head, around = head_weights(model)

    layers = Work.total(
        trained_layers(layer, count, running, tokens=tokens, seq_len=seq_len)
        for layer, count in model.layers()
    )
    # TRL's fused head makes each tile of the logits again in its backward
    copied = method.copies_table * model.embeddings[0].num_params
    tied = bool(copied) and model.head_tied
    of_head = scored * head * (passes + LOSS_HEADS[run.loss_head].recomputes + tied)
    of_head = of_head + scored * _copied_weights(running, is_table=False)
    around_layers = 2 * (of_head + tokens * around * passes)
    weight_read = layers.weight_read_bytes + head * dtypes.embedding_bytes * passes + 0 * tokens
    multiplied = Work.total((layers, product_work(around_layers, wide=widens_head(dtypes))))
    if not method.trains_base:
        rows = _adapter_rows(running, update, batch_size=batch_size, seq_len=seq_len)
        multiplied_again = 2 * recompute * (rows - tokens * _params_around(running))
        of_adapters = product_work(6 * rows + multiplied_again, wide=dtypes.widens_adapters)
        multiplied = Work.total((multiplied, of_adapters))
    at_end = _at_end(running, scored=scored, seq_len=seq_len, logits_loss=logits_loss)
    elementwise = layers.elementwise_bytes + at_end.elementwise_bytes
    elementwise = elementwise + tokens * states_bytes_around(model, dtypes) * 5 // 2
    # a copy is read and written, and so is its gradient
    elementwise = elementwise + 4 * copied * (1 + tied) * dtypes.embedding_bytes
    micro_step = replace(
        multiplied,
        weight_read_bytes=weight_read,
        elementwise_bytes=elementwise,
        dequant_bytes=layers.dequant_bytes + 0 * tokens,
        launches=layers.launches + at_end.launches,
        recorded_launches=layers.recorded_launches + at_end.launches,
        autograd_launches=layers.autograd_launches + at_end.autograd_launches,
    )
    steps = run.gradient_accumulation_steps * num_forwards
    return Work.total((micro_step.times(steps), _work_of_update(update, like=tokens)))


def _copied_weights(running: RunningModel, *, is_table: bool) -> int:
    """Of modules that PEFT copies and trains whole: tables, or matrices.

    The latter's own product and the gradient of its input are those of the base.

    Kind: exact. Source: `memory.gradients.saved_modules`.
    """
    copies = saved_modules(running.model, running.run.modules_to_save, 0)
    return sum(int(copy.num_params) for copy in copies if copy.is_embedding == is_table)


def _params_around(running: RunningModel) -> Count:
    """Multiplied parameters of adapters of the head and of the token table: no checkpoint has them.

    Kind: exact. Source: `methods.lora.low_rank_shapes`; peft 0.21.2 `lora.Embedding.forward`.
    """
    model, targets, r = running.model, running.targets, running.r
    params: Count = 0 * r
    if adapts_head(model, targets):
        assert model.head is not None
        params = params + r * (model.head.in_features + model.head.out_features)
    if adapts_table(model, targets):
        params = params + r * token_table(model).out_features
    return params


def _adapter_rows(
    running: RunningModel, update: Update, *, batch_size: Count, seq_len: Count
) -> Count:
    """Parameters of adapters times the rows that each is multiplied with, summed up.

    Those of copies are none, and rows of tables, and of A of an adapter of one, are looked up.
    """
    method, tokens = running.method, batch_size * seq_len
    read = batch_size * method.added_tokens if method.added_tokens else tokens
    shared = method.shared_tensors(adapted_linears(running.model, running.targets), running.r)
    params = update.num_params - sum(tensor.num_params for tensor in shared)
    params = params - sum(_copied_weights(running, is_table=kind) for kind in (True, False))
    if adapts_table(running.model, running.targets):
        params = params - running.r * token_table(running.model).in_features
    return read * params + _further_rows(running, tokens=tokens, seq_len=seq_len)


def _at_end(
    running: RunningModel, *, scored: Count, seq_len: Count, logits_loss: LogitsLoss | None
) -> Work:
    """What kernels around the layers move in a micro-step, and how many there are."""
    model, run, dtypes = running.model, running.run, running.dtypes
    head = traffic.head(
        running,
        get_trainer(run.trainer),
        computed=logits_loss is not None,
        tokens=scored,
        span=seq_len,
    )
    moved = head.forward.moved + head.backward.moved
    moved = moved + _loss_passes(run, dtypes, logits_loss) * num_logits(model) * scored
    if running.method.trains_base:
        # zeros, to which rows are added; of a tied head a sum of two gradients
        table = model.embeddings[0].num_params * dtypes.embedding_bytes
        moved = moved + (1 + 3 * model.head_tied) * table
    moved = moved + _copied_weights(running, is_table=True) * dtypes.embedding_bytes
    if adapts_table(model, running.targets):  # zeros of A's gradient, which is laid out anew
        in_a = running.r * token_table(model).in_features
        moved = moved + 3 * in_a * dtypes.adapter_bytes
    return Work(
        elementwise_bytes=moved,
        launches=outside_ops(model) + head.forward.kernels,
        autograd_launches=head.backward.kernels,
    )


def _work_of_update(update: Update, *, like: Count) -> Work:
    return Work(
        optimizer_bytes=update_bytes(update) + 0 * like,
        optimizer_flops=update_flops(update),
        update_launches=update_launches(update),
    )


def _forward_loss_passes(run: RunConfig, dtypes: Dtypes, logits_loss: LogitsLoss | None) -> int:
    """Bytes per token and vocabulary entry of a forward without a graph.

    Kind: estimate. Source: the tables above.
    """
    if logits_loss is not None:
        return _FORWARD_PASSES[logits_loss.way_on(dtypes.device_kind)]
    if LOSS_HEADS[run.loss_head].folds_in_torch and not dtypes.backend.has_triton:
        return _FOLDED_FORWARD_PASSES
    return _FORWARD_PASSES["kernel"]


def _loss_passes(run: RunConfig, dtypes: Dtypes, logits_loss: LogitsLoss | None) -> int:
    """So of forward and backward, where a trainer or a kernel computes the loss.

    Kind: estimate. Source: the tables above.
    """
    if logits_loss is not None:
        of_chosen = logits_loss.has_cross_entropy * _CROSS_ENTROPY_PASSES
        widened = _WIDENING_PASSES * (dtypes.compute_bytes == 2)
        return _LOGITS_LOSS_PASSES[logits_loss.way_on(dtypes.device_kind)] + of_chosen + widened
    if LOSS_HEADS[run.loss_head].folds_in_torch and not dtypes.backend.has_triton:
        return _FOLDED_FORWARD_PASSES + _FOLDED_BACKWARD_PASSES
    return LOSS_HEADS[run.loss_head].passes


def forward_share(run: RunConfig, method: Method) -> float:
    """Of a micro-step, the first forward; recomputing and the backward are the others.

    A backward has one product for each of the forward, two where the weights are trained.

    Kind: estimate. Source: `training_work`; the head is not recomputed.
    """
    return 1 / ((3 if method.trains_base else 2) + bool(run.gradient_checkpointing))


def evaluation_work(
    running: RunningModel,
    *,
    batch_size: Count,
    seq_len: Count,
    logits_loss: LogitsLoss | None = None,
    update: Update,
) -> Work:
    """One forward with its loss and without a graph; every token is scored.

    What checkpointing adds to a step is one more forward of the layers; the head and the loss
    come on top. Kind: estimate.
    Source: transformers 5.23 `Trainer.evaluation_loop`.
    """
    model, run, dtypes = running.model, running.run, running.dtypes
    # reentrant checkpointing repeats the whole forward
    micro_step = replace(run, use_reentrant=True, gradient_accumulation_steps=1)
    again, once = (
        training_work(
            replace(running, run=replace(micro_step, gradient_checkpointing=checkpointed)),
            batch_size=batch_size,
            seq_len=seq_len,
            update=update,
        )
        for checkpointed in (True, False)
    )
    tokens = batch_size * seq_len
    head, around = head_weights(model)
    vocab = num_logits(model)
    loss_passes = _forward_loss_passes(run, dtypes, logits_loss)
    scored = product_work(2 * tokens * (head + around), wide=widens_head(dtypes))
    return Work(
        product_flops=again.product_flops - once.product_flops + scored.product_flops,
        wide_product_flops=again.wide_product_flops
        - once.wide_product_flops
        + scored.wide_product_flops,
        idle_flops=again.idle_flops - once.idle_flops,
        weight_read_bytes=again.weight_read_bytes
        - once.weight_read_bytes
        + head * dtypes.embedding_bytes,
        attention_flops=again.attention_flops - once.attention_flops,
        wide_attention_flops=again.wide_attention_flops - once.wide_attention_flops,
        attention_bytes=0 * tokens,
        elementwise_bytes=again.elementwise_bytes
        - once.elementwise_bytes
        + loss_passes * tokens * vocab,
        dequant_bytes=again.dequant_bytes - once.dequant_bytes,
        optimizer_bytes=0 * tokens,
        launches=again.launches - once.launches + outside_ops(model),
        host_launches=again.host_launches
        - once.host_launches
        - CHECKPOINT_CALL * sum(count for _, count in model.layers()),
    )
