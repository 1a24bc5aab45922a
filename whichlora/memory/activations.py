"""What autograd keeps of one layer's forward, tensor by tensor.

Frozen matrices keep nothing; an adapted one keeps the input of A and the rank-r output of A.
Whether targets share that input is the precision mode's doing (`stack.py`). Every line was
compared with saved-tensor hooks on the real libraries; `docs/memory.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from whichlora.architecture import Attention, Layer, Linear, Mlp, ModelSpec, Moe, Norm
from whichlora.memory.entries import Tensor, per_pair, per_token
from whichlora.methods.base import Method
from whichlora.numeric import Count, largest
from whichlora.specs import FOUR_BIT_BNB
from whichlora.stack import Stack
from whichlora.targets import adapted

# Tensors of the MLP's width that the activation keeps beside its output. Fused kernels keep their
# input; the Python implementations keep every factor of their products.
_ACTIVATION_SAVED = {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2, "relu": 0}
# Tensors of that width alive at the worst point of a forward without gradients; 2 for a fused
# kernel, its input and output. `bloom_gelu` is the written-out tanh formula of `BloomGelu`.
_ACTIVATION_WORKING = {"gelu_new": 4, "gelu_fast": 5, "bloom_gelu": 5, "quick_gelu": 3, "relu2": 3}
ENCODER_OUT = "encoder_out"  # what the cross attention of every decoder layer reads
HEADS = "num_attention_heads"
_INDEX_BYTES = 8  # torch indexes with int64
MAX_FUSED_HEAD_DIM = 256  # beyond it CUDA has no fused kernel

Kernel = Literal["fused", "math", "eager"]


def norm_saved(norm: Norm, stack: Stack, *, reads: str = "") -> Iterator[Tensor]:
    """RMSNorm keeps an fp32 copy of its input; LayerNorm its input as it is.

    Args:
        reads: label of the input, where another norm reads the same tensor.

    Kind: exact.
    """
    size = norm.width * norm.rows
    dims = "hidden_size" if norm.rows == 1 else f"{HEADS}, head_dim"
    if norm.kind in ("layer", "layer_narrow"):
        # CUDA's autocast runs layer_norm in fp32 and keeps that copy, and its statistics are
        # fp32; on a CPU everything has the dtype of the stream.
        on_cpu = stack.device_kind == "cpu"
        width = 4 if norm.kind == "layer" else stack.compute_bytes
        copied = stack.under_autocast and not on_cpu and stack.stream_bytes != width
        input_bytes = width if copied else stack.stream_bytes
        yield per_token(
            f"{norm.name}: input", input_bytes, size, dims, tensor="" if copied else reads
        )
        stat_bytes = stack.stream_bytes if on_cpu else 4
        yield per_token(
            f"{norm.name}: mean and reciprocal deviation", stat_bytes, 2 * norm.rows, "2"
        )
        return
    if norm.kind == "layer_steps":
        yield per_token(f"{norm.name}: input less its mean, twice", 4, 2 * size, f"2, {dims}")
    else:
        yield per_token(f"{norm.name}: fp32 input", 4, size, dims)
    yield per_token(
        f"{norm.name}: reciprocal deviation", 4, norm.rows, "1" if norm.rows == 1 else HEADS
    )
    if stack.libraries.mean_keeps_input:
        yield per_token(f"{norm.name}: squared input", 4, size, dims)
    if norm.kind == "rms_mixed" and stack.stream_bytes != 4:
        yield per_token(f"{norm.name}: input", stack.stream_bytes, size, dims)
    in_fp32 = norm.kind in (
        "rms_offset",
        "rms_power",
        "layer_steps",
    )  # scaled before the result is cast back to the stream's dtype
    if stack.trains_base and norm.weight:
        bytes_each = 4 if in_fp32 else stack.stream_bytes
        yield per_token(f"{norm.name}: normalised output", bytes_each, size, dims)


def fused_qkv(attention: Attention) -> Linear | None:
    """The projection that returns q, k and v in one tensor, if there is one."""
    if attention.gated:  # its query and gate together may be as wide
        return None
    width = attention.q_width + attention.k_width + attention.v_width
    return next((one for one in attention.linears if one.out_features == width), None)


def attention_kernel(attention: Attention, stack: Stack) -> Kernel:
    """What computes the attention: `attn` is a wish, the class and the device decide.

    Source: torch 2.13 `sdp_utils.cpp` and `sdp_utils_cpp.cpp`; the classes of transformers 5.23.
    """
    if stack.attn == "flash_attention_2":
        return "fused"
    if stack.attn == "eager" or attention.sdpa == "eager":
        return "eager"
    if attention.sdpa == "math":
        return "math"
    if stack.device_kind == "cpu":  # its flash kernel has no dropout
        return "math" if attention.dropout and stack.training else "fused"
    return "math" if attention.head_dim > MAX_FUSED_HEAD_DIM else "fused"


def is_masked(attention: Attention, stack: Stack, span: Count) -> Count:
    """1 where SDPA gets a mask tensor, else 0: padding, or a window that the tokens fill.

    Source: transformers 5.23 `_ignore_causal_mask_sdpa`.
    """
    if stack.padded or attention.always_masked:
        return 1 + 0 * span
    if attention.sliding_window is None:
        return 0 * span
    return 1 * (span >= attention.sliding_window)


def has_mask_per_head(attention: Attention) -> bool:
    """Whether the model adds ALiBi to its mask, which all layers then share. Falcon does."""
    return attention.always_masked and attention.position == "alibi"


def attention_saved(attention: Attention, stack: Stack, *, span: Count) -> Iterator[Tensor]:
    """Queries, keys, values, and what the kernel keeps to recompute the probabilities.

    Kind: exact for softmax attention; recurrent and convolutional blocks are a lower bound (their
    projections only).
    """
    size = stack.compute_bytes
    q, k, v = attention.q_width, attention.k_width, attention.v_width
    heads = attention.num_attention_heads
    if attention.kind != "softmax":
        yield per_token(
            f"{attention.kind} mixing: projections",
            size,
            2 * q + k + v,
            "2·q_width + k_width + v_width",
        )
        return
    for norm in attention.norms:
        yield from norm_saved(norm, stack)

    kernel = attention_kernel(attention, stack)
    masked = is_masked(attention, stack, span)
    every_k, every_v = heads * attention.head_dim, heads * attention.v_head_dim
    kv_dims = "k_width + v_width"
    if kernel != "fused":
        k, v = every_k, every_v
    else:
        if fused_qkv(attention) and stack.linear_out_bytes == size:
            # q and k are new tensors after a rotation; v stays a view that keeps the projection,
            # unless autocast narrows it
            v = q + k + v
            kv_dims = "k_width + whole qkv projection"
            if attention.position != "rope":
                q = k = 0
        if stack.attn == "sdpa" and attention.num_key_value_heads < heads:
            # grouped keys go to the kernel as they are only where there is no mask
            k, v = k + (every_k - k) * masked, v + (every_v - v) * masked

    if kernel == "math":
        yield from _math_saved(attention, stack)
        return
    yield per_token("query", size, q, f"{HEADS}, head_dim")
    yield per_token("key and value", size, k + v, kv_dims)
    if kernel == "eager":
        yield from _eager_saved(attention, stack)
        if attention.relative_rows:
            yield from _disentangled_saved(attention, stack, span=span)
        return
    # A kernel writes its output in the layout of the query. Rotation by concatenation leaves
    # [batch, heads, seq, head_dim], so the projection reads a transposed copy.
    reads = "" if attention.joins_rotation else attention.linears[-1].reads
    yield per_token(
        "attention output", size, attention.out_width, f"{HEADS}, v_head_dim", tensor=reads
    )
    yield per_token("log-sum-exp", 4, heads, HEADS)
    if attention.position == "relative":
        yield per_pair("position bias", size, heads, HEADS)
    elif stack.attn == "sdpa":
        yield per_pair("additive mask", size, masked, "1")


def _math_saved(attention: Attention, stack: Stack) -> Iterator[Tensor]:
    """SDPA composed of plain operators, in fp32 whatever the inputs are."""
    heads = attention.num_attention_heads
    yield per_token("scaled query", 4, attention.q_width, f"{HEADS}, head_dim")
    yield per_token(
        "scaled key and value",
        4,
        heads * (attention.head_dim + attention.v_head_dim),
        f"{HEADS}, head_dim + v_head_dim",
    )
    yield per_pair("softmax", 4, heads, HEADS)
    if attention.dropout and stack.training:
        yield per_pair("dropped probabilities", 4, heads, HEADS)
        yield per_pair("dropout mask", _mask_bytes(4, stack), heads, HEADS)


def _eager_saved(attention: Attention, stack: Stack) -> Iterator[Tensor]:
    """Scores, softmax in fp32 and probabilities as the Python code of the class writes them."""
    heads, size = attention.num_attention_heads, stack.compute_bytes
    widened = stack.under_autocast and stack.device_kind != "cpu"
    softmax_bytes = 4 if attention.wide_softmax or widened else size
    yield per_pair("softmax", softmax_bytes, heads, HEADS)
    dropped = attention.dropout and stack.training
    if size != 4 or dropped:
        yield per_pair("probabilities", size, heads, HEADS)
    if dropped:
        yield per_pair("dropout mask", _mask_bytes(size, stack), heads, HEADS)
    if attention.softcap is not None:
        yield per_pair("tanh of the soft cap", size, heads, HEADS)


def _disentangled_saved(attention: Attention, stack: Stack, *, span: Count) -> Iterator[Tensor]:
    """DeBERTa's scores of contents and positions, beside those of contents.

    Kind: exact but for the adapters' inputs, which are the table's. Source: transformers 5.23
    `DisentangledSelfAttention.disentangled_attention_bias`.
    """
    size, rows = stack.compute_bytes, attention.relative_rows
    heads, width = attention.num_attention_heads, attention.q_width
    yield per_token("key, scaled", size, width, f"{HEADS}, head_dim")
    yield per_token(
        "scores of all positions, before theirs are gathered", size, 2 * heads * rows, f"2, {HEADS}"
    )
    # the projected table once per sequence, for queries and for keys
    yield Tensor("projected positions, repeated", 2 * size * width * rows // span)
    yield Tensor("indices of positions", constant=2 * _INDEX_BYTES * span * span, dims="seq_len")
    yield per_pair("mask, negated", 1, 1, "1")


def _mask_bytes(input_bytes: int, stack: Stack) -> int:
    """One element of a dropout mask: a byte on CUDA, on a CPU the dtype of what is dropped."""
    return input_bytes if stack.device_kind == "cpu" else 1


def mlp_saved(mlp: Mlp, stack: Stack, *, active: int = 1) -> Iterator[Tensor]:
    """Input of the activation, its output, and the other factor of a gated product."""
    size, width = stack.mlp_bytes, active * mlp.width
    dims = "intermediate_size" if active == 1 else "experts_per_token, moe_intermediate_size"
    num_saved = _ACTIVATION_SAVED.get(mlp.activation, 1)
    yield per_token(
        "activation: input",
        size,
        num_saved * width,
        dims if num_saved == 1 else f"{num_saved}, {dims}",
    )
    down_reads = mlp.linears[2 if mlp.gated and len(mlp.linears) > 2 else 1].reads
    if mlp.gated:
        yield per_token("gated product: both factors", size, 2 * width, f"2, {dims}")
    elif mlp.activation == "relu":  # keeps its output, which is the input of the next matrix
        yield per_token(
            "activation: output", size, width, dims, tensor="" if mlp.dropout else down_reads
        )
    if mlp.dropout and stack.training:
        yield per_token(
            "dropout mask inside", _mask_bytes(size, stack), mlp.width, "intermediate_size"
        )


def moe_saved(moe: Moe, stack: Stack, *, experts_trained: bool) -> Iterator[Tensor]:
    """Routing, the gathered and sorted tokens of the active experts, and the shared expert.

    Args:
        experts_trained: the experts' weights get gradients, their own or for an adapter.

    Kind: exact for `grouped_mm`, which transformers 5 uses on CPU and CUDA.
    """
    k, hidden = moe.experts_per_token, moe.router.in_features
    chosen = "experts_per_token, hidden_size"
    yield from mlp_saved(moe.expert, stack, active=k)
    yield per_token(
        "experts: outputs before they are weighted", stack.compute_bytes, k * hidden, chosen
    )
    yield per_token("router: probabilities", 4, moe.num_experts, "num_experts")
    # which experts, the sorting permutation twice and its inverse; one weight each
    yield Tensor(
        "router: indices and weights", (4 * _INDEX_BYTES + 4) * k, dims="experts_per_token"
    )
    if experts_trained:
        yield per_token("experts: gathered inputs", stack.compute_bytes, k * hidden, chosen)
        yield per_token(
            "experts: inner products",
            stack.mlp_bytes,
            k * moe.expert.width,
            "experts_per_token, moe_intermediate_size",
        )
    if moe.shared is not None:
        yield from mlp_saved(moe.shared, stack)
        if any(linear.out_features == 1 for linear in moe.shared.linears):
            yield per_token(
                "shared expert: output and gate", stack.compute_bytes, hidden + 1, "hidden_size + 1"
            )


def inputs_saved(layer: Layer, targets: tuple[str, ...], stack: Stack) -> Iterator[Tensor]:
    """Inputs of trained or adapted matrices, and adapter dropout.

    Kind: exact.
    """
    linears = layer.linears if stack.trains_base else adapted(layer, targets)
    kept = {
        attention.linears[-1].reads
        for attention in layer.attentions
        if attention_kernel(attention, stack) == "fused" and not attention.joins_rotation
    }
    for linear in linears:
        if linear.count > 1 and not linear.is_module:
            continue  # experts gather their inputs: `moe_saved`
        if linear.reads == ENCODER_OUT and stack.shared_inputs and not stack.lora_dropout:
            continue  # one tensor for all layers: `outside_saved`
        width = linear.active * linear.in_features
        # Matrices under autocast cast what they read, each for itself, unless it is in 16 bit
        # already, as what attention returns. PEFT's 4-bit layer widens its input first where
        # CUDA's autocast is off, so on a CPU there is a copy all the same.
        widened = not stack.trains_base and stack.device_kind == "cpu"
        is_narrow = stack.mode == "Q" and linear.reads in kept and not widened
        if stack.lora_dropout and not stack.trains_base:
            yield per_token(
                f"{linear.name}: dropped input", stack.input_bytes, width, "in_features"
            )
            mask_bytes = _mask_bytes(stack.dropped_bytes, stack)
            yield per_token(f"{linear.name}: dropout mask", mask_bytes, width, "in_features")
        elif stack.shared_inputs or is_narrow:
            yield per_token(
                f"{linear.name}: input",
                stack.input_bytes,
                width,
                "in_features",
                tensor=linear.reads,
            )
        else:
            yield per_token(
                f"{linear.name}: own copy of the input", stack.input_bytes, width, "in_features"
            )


def held_by_quantised(layer: Layer, stack: Stack) -> Iterator[Tensor]:
    """Inputs that bitsandbytes' matrices hold on their own until the graph is gone. Kind: exact.

    8-bit ones as they come, 4-bit ones of old versions in 16 bit. A CPU has another 8-bit product.
    Source: bitsandbytes 0.50.2 `MatMul8bitLt`, 0.43.1 `MatMul4Bit`: `ctx.tensors` instead of saved
    tensors.
    """
    is_8bit = stack.quant == "int8" and stack.device_kind != "cpu"
    is_4bit = stack.quant in FOUR_BIT_BNB and stack.libraries.linear4bit_keeps_input
    if not (is_8bit or is_4bit):
        return
    for linear in layer.linears:
        if linear.is_module and linear.quantisable:
            from_stream = is_8bit and linear.reads not in ("attn_out", "cross_out")
            yield per_token(
                f"{stack.quant} matrix: input",
                stack.stream_bytes if from_stream else stack.compute_bytes,
                linear.active * linear.in_features,
                "in_features",
                tensor=linear.reads,
            )


def adapters_saved(
    layer: Layer, targets: tuple[str, ...], stack: Stack, method: Method, r: Count
) -> Iterator[Tensor]:
    """The rank-r output of A, and what the method keeps beyond LoRA."""
    if method.trains_base:
        return
    for linear in adapted(layer, targets):
        if not linear.is_module:
            # A bare parameter is replaced by W + BA, which the product keeps: a second copy of
            # the weights. Source: peft 0.21.2 `ParamWrapper`.
            merged = linear.num_weights * stack.base_bytes
            yield Tensor(
                f"{linear.name}: weight with its adapter",
                constant=merged,
                dims="num_experts, out_features, in_features",
                element_bytes=stack.base_bytes,
            )
            continue
        yield per_token(f"{linear.name}: A·x", stack.adapter_product_bytes, r * linear.active, "r")
        extra = method.saved_bytes_per_token(linear, stack)
        constant = method.saved_bytes(linear, stack)
        if extra or constant:
            yield Tensor(
                f"{linear.name}: {method.name}", extra, constant=constant, dims="out_features"
            )


def layer_saved(
    layer: Layer,
    targets: tuple[str, ...],
    stack: Stack,
    method: Method,
    r: Count,
    *,
    span: Count,
) -> tuple[Tensor, ...]:
    """Everything that one layer keeps for backward, each storage once."""
    saved: list[Tensor] = []
    for norm in layer.norms:
        saved.extend(norm_saved(norm, stack, reads="layer_in" if layer.parallel else ""))
    for attention in layer.attentions:
        saved.extend(attention_saved(attention, stack, span=span))
    if layer.mlp is not None:
        saved.extend(mlp_saved(layer.mlp, stack))
    if layer.moe is not None:
        expert = layer.moe.expert.linears[0]
        trained = stack.trains_base or expert in adapted(layer, targets)
        saved.extend(moe_saved(layer.moe, stack, experts_trained=trained))
    if stack.training:
        mask_bytes = _mask_bytes(stack.stream_bytes, stack)
        saved.extend(
            per_token("dropout mask", mask_bytes, width, "hidden_size") for width in layer.dropouts
        )
    saved.extend(inputs_saved(layer, targets, stack))
    saved.extend(_positions_saved(layer, targets, stack, method, r))
    saved.extend(adapters_saved(layer, targets, stack, method, r))
    saved.extend(held_by_quantised(layer, stack))
    return distinct(saved)


def _positions_saved(
    layer: Layer, targets: tuple[str, ...], stack: Stack, method: Method, r: Count
) -> Iterator[Tensor]:
    """What DeBERTa's query and key projections keep of the table of positions. Kind: exact."""
    for attention in layer.attentions:
        rows = attention.relative_rows
        projections = attention.linears[:2] if rows else ()
        if not stack.trains_base:
            projections = tuple(one for one in projections if one.name in targets)
        if not projections:
            continue
        shared = stack.shared_inputs and (stack.trains_base or not stack.lora_dropout)
        inputs = projections[:1] if shared else projections
        for linear in inputs:
            yield Tensor(
                f"{linear.name}: positions",
                constant=rows * linear.in_features * stack.input_bytes,
                dims="2·position_buckets, hidden_size",
            )
        if stack.trains_base:
            continue
        for linear in projections:
            per_row = stack.adapter_product_bytes * r + method.saved_bytes_per_token(linear, stack)
            yield Tensor(
                f"{linear.name}: positions, A·x", constant=rows * per_row, dims="position rows, r"
            )


def distinct(saved: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each storage once, though several operators keep it."""
    labels: set[str] = set()
    found = []
    for one in saved:
        if one.tensor not in labels:
            found.append(one)
        if one.tensor:
            labels.add(one.tensor)
    return tuple(found)


def outside_saved(
    model: ModelSpec,
    targets: tuple[str, ...],
    stack: Stack,
    *,
    embeddings_need_grad: bool,
    after_layers: bool = True,
) -> list[Tensor]:
    """What is kept between the embedding and the first layer, and from the last layer on.

    Args:
        after_layers: so long as the backward has not reached the last layer.
        embeddings_need_grad: trained, or made to need a gradient so that checkpointing works.

    Kind: exact.
    """
    hidden = model.hidden_size
    saved: list[Tensor] = []
    norms, dropped = model.final_norms, model.final_dropouts
    if not after_layers:  # an encoder's end stands before the decoder
        norms, dropped = norms[: len(norms) // 2], dropped[: len(dropped) // 2]
    if embeddings_need_grad:
        norms, dropped = norms + model.embedding_norms, dropped + model.embedding_dropouts
    for norm in norms:
        saved.extend(norm_saved(norm, stack))
    mask_bytes = _mask_bytes(stack.stream_bytes, stack)
    saved.extend(per_token("dropout mask", mask_bytes, width, "hidden_size") for width in dropped)
    if stack.trains_base and after_layers and model.masked_head is None:
        saved.append(per_token("head: input", stack.compute_bytes, hidden, "hidden_size"))
    elif not stack.trains_base and embeddings_need_grad and _embeds_in_steps(model):
        # the looked-up rows are what was made to need a gradient: a leaf lives as long as the graph
        stacks = len({group.stack for group in model.groups})
        rows = stacks * model.embeddings[0].width
        saved.append(per_token("looked-up embeddings", stack.embedding_bytes, rows, "hidden_size"))
    readers = (linear for layer, _ in model.layers() for linear in layer.linears)
    if any(
        linear.reads == ENCODER_OUT and (stack.trains_base or linear.name in targets)
        for linear in readers
    ):
        saved.append(per_token("encoder output", stack.stream_bytes, hidden, "hidden_size"))
    return saved


def _embeds_in_steps(model: ModelSpec) -> bool:
    """Whether the first layer reads something else than the looked-up rows themselves.

    A norm of the rows keeps them anyway, unless positions are added first.
    """
    return model.adds_positions or bool(model.embedding_dropouts)


def kept_mask_bytes(
    model: ModelSpec,
    stack: Stack,
    *,
    tokens: Count,
    span: Count,
    checkpointed: bool = True,
    side: str = "",
) -> Count:
    """Attention masks and position biases that all layers of a stack share.

    Args:
        side: only those of this stack, "encoder" or "decoder".

    Checkpointed layers hold them as their arguments. Eager code adds a mask in the dtype of the
    stream, SDPA is handed a boolean one; layers with a window have a mask of their own. Without
    checkpointing only the zeros stay that T5's cross attention adds, where no padding mask makes
    new ones of them. Kind: exact.
    """
    masks: dict[tuple[str, bool, int | None], Count] = {}
    biases: dict[tuple[str, bool], int] = {}
    for group in (one for one in model.groups if side in ("", one.stack)):
        for attention in group.layer.attentions:
            eager = stack.attn == "eager" or attention.sdpa == "eager"
            decodes = len(group.layer.attentions) > 1 and not attention.cross  # never padded
            masked = 0 * span if decodes else is_masked(attention, stack, span)
            key = (group.stack, attention.cross, attention.sliding_window)
            if eager:
                masks[key] = stack.stream_bytes * (1 if attention.causal else masked)
            elif stack.attn == "sdpa":
                masks[key] = masked
            if has_mask_per_head(attention) and key in masks:
                masks[key] = stack.stream_bytes * attention.num_attention_heads * (1 + 0 * span)
            if attention.relative_rows:  # products of positions, and the distances
                masks[key] = 4 * (1 + 0 * span)
                biases[key[:2]] = _INDEX_BYTES
            elif attention.position == "relative" and not attention.biases_each_layer:
                size = stack.linear_out_bytes if attention.cross else stack.base_bytes
                fused = attention_kernel(attention, stack) == "fused"
                if checkpointed or (attention.cross and fused and not stack.padded):
                    biases[key[:2]] = size * attention.num_attention_heads
    total = sum(biases.values()) * span * span
    if checkpointed:
        for one in masks.values():
            total = total + one * tokens * span
    return total


def unsaved_by_first_layer(layer: Layer, targets: tuple[str, ...], stack: Stack) -> int:
    """Bytes per token that the first layer of a stack keeps less than the others.

    With frozen embeddings its input needs no gradient: a norm of it saves nothing, adapter
    dropout of it no mask, and a frozen MLP that reads it nothing at all. Kind: exact.
    Checkpointing makes the input need a gradient.
    """
    if stack.trains_base:
        return 0
    readers = layer.norms if layer.parallel else layer.norms[: 0 if layer.post_norm else 1]
    kept = {
        one.tensor or one.what: one.per_token
        for norm in readers
        for one in norm_saved(norm, stack, reads="layer_in" if layer.parallel else "")
    }
    unsaved: int = sum(kept.values())
    names = {linear.name for linear in adapted(layer, targets)}
    if layer.parallel and layer.mlp is not None and not layer.post_norm:
        inner = {linear.name for linear in layer.mlp.linears}
        if not inner & names:  # an MLP without adapters beside the attention needs no gradient
            unsaved += sum(one.per_token for one in mlp_saved(layer.mlp, stack))
    if stack.lora_dropout:
        inputs = {layer.attentions[0].linears[0].reads} if layer.attentions else set()
        if layer.parallel and layer.mlp is not None:
            inputs.add(layer.mlp.linears[0].reads)
        mask_bytes = _mask_bytes(stack.dropped_bytes, stack)
        unsaved += sum(
            mask_bytes * linear.in_features
            for linear in adapted(layer, targets)
            if linear.reads in inputs
        )
    return unsaved


def rotary_bytes(model: ModelSpec, stack: Stack, *, span: Count) -> Count:
    """Cosines and sines, shared by all layers of one rotated width. Kind: exact.

    Args:
        span: positions: of one sequence in training, of all of a batch that `generate` places.
    """
    tables = {
        (attention.rotary_dim, model.rotates_each_kind and attention.sliding_window is None)
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.position == "rope"
    }
    return 2 * stack.stream_bytes * sum(width for width, _ in tables) * span


def layer_backward_transient(
    layer: Layer, targets: tuple[str, ...], stack: Stack, method: Method, hidden_size: int
) -> tuple[int, int]:
    """Alive on top of the saved tensors at the worst point of a layer's backward.

    Returns:
        Bytes per token, and bytes per token and attended token (eager attention: the gradients
        of the probabilities and of the fp32 softmax).

    Kind: exact for mode A with every matrix adapted, within 3 % for P and A with attention
    only, upper bound for Q. Source: live-bytes traces over sweeps of h and f.
    """
    width = 0
    if layer.mlp is not None:
        width = layer.mlp.width
    if layer.moe is not None:
        active = layer.moe.expert.width * layer.moe.experts_per_token
        if layer.moe.expert.linears[0].is_module:  # one expert after the other, a share of tokens
            active = active // layer.moe.num_experts
        width = max(width, active)
    hidden, scale = hidden_size, stack.compute_bytes
    names = {linear.name for linear in adapted(layer, targets)}
    down = layer.mlp.linears[-1].name if layer.mlp is not None else ""
    if stack.mode == "Q":
        per_token = 12 * width + 10 * hidden
    elif stack.mode == "A":
        if down in names:
            per_token = 6 * width + 10 * hidden
        else:
            per_token = max(6 * width + 22 * hidden // 10, 16 * hidden)
    else:
        per_token = max(2 * scale * width + 11 * scale * hidden // 10, 71 * scale * hidden // 10)
    pairs = (_pair_gradient_bytes(one, stack) for one in layer.attentions)
    return per_token, max(pairs, default=0)


def _pair_gradient_bytes(attention: Attention, stack: Stack) -> int:
    """Gradients of probabilities and scores, per token and attended token."""
    kernel = attention_kernel(attention, stack)
    if kernel == "fused" or attention.kind != "softmax":
        return 0
    of_probabilities = 4 if kernel == "math" else stack.compute_bytes
    return attention.num_attention_heads * (of_probabilities + 4)


def method_transient_bytes(
    model: ModelSpec, targets: tuple[str, ...], stack: Stack, method: Method
) -> int:
    """The largest temporary that the method makes of a whole weight (DoRA's norm)."""
    return max(
        (
            method.transient_bytes(linear, stack)
            for layer, _ in model.layers()
            for linear in adapted(layer, targets)
            if linear.is_module
        ),
        default=0,
    )


def merged_gradient_bytes(model: ModelSpec, targets: tuple[str, ...], stack: Stack) -> int:
    """The gradient of the largest bare parameter that has an adapter folded in: as large as it."""
    return max(
        (
            linear.num_weights * stack.base_bytes
            for layer, _ in model.layers()
            for linear in adapted(layer, targets)
            if not linear.is_module
        ),
        default=0,
    )


def _mlp_working(mlp: Mlp) -> int:
    """Tensors of the MLP's width at the worst point of its forward."""
    if not mlp.gated:
        return _ACTIVATION_WORKING.get(mlp.activation, 2)
    is_fused = sum(linear.reads == mlp.linears[0].reads for linear in mlp.linears) == 1
    # one projection for gate and up stays whole while its halves are activated and multiplied
    return 4 if is_fused else 3


def layer_forward_bytes(
    layer: Layer, hidden_size: int, stack: Stack, *, tokens: Count, span: Count
) -> Count:
    """Working set of one layer's forward without gradients, for the whole batch.

    The larger of the MLP and of attention, over four hidden states that Python names hold: the
    looked-up embeddings, the layer's input, the residual after attention, and the normalised one.
    Kind: exact for Llama-like layers (6f + 8h at 16 bit), elsewhere an estimate.
    """
    size = stack.compute_bytes
    stream = 4 * stack.stream_bytes * hidden_size
    width = 0
    if layer.mlp is not None:
        width = layer.mlp.width * _mlp_working(layer.mlp)
    if layer.moe is not None:
        expert = layer.moe.expert
        each = expert.width * _mlp_working(expert) + hidden_size  # the gathered tokens
        width = max(width, layer.moe.experts_per_token * each)
    mixing, pair = 0, 0
    for attention in layer.attentions:
        q, k, v = attention.q_width, attention.k_width, attention.v_width
        mixing = max(mixing, size * (2 * q + 2 * k + v + attention.out_width))
        if stack.attn == "eager" and attention.kind == "softmax":
            pair = max(pair, attention.num_attention_heads * (4 + size))
    in_mlp = tokens * (stream + size * width)
    in_attention = tokens * (stream + mixing) + tokens * span * pair
    return largest(in_mlp, in_attention)
