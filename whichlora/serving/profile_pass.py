"""A forward of fused layers and the sampler: what vLLM reserves before it counts blocks.

One forward of `max_num_batched_tokens` tokens through the fused layers, then the sampler on the
last tokens of `max_num_seqs` sequences; the larger of both is kept free.
"""

from __future__ import annotations

from whichlora.memory.entries import Entry, Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Layer, Mlp

# Bytes per logit while the sampler runs. 16-bit logits and their fp32 copy (since vLLM 0.5.5), then
# - a sort by torch: sorted values and 8-byte indices, and what `segmented_sort_pairs` allocates:
#   reversed indices and the other half of a radix sort's double buffers;
# - or a kernel of Triton or FlashInfer: masked logits (or probabilities), and probabilities (or
#   noise).
# The newer runner's profile asked for neither top-k nor top-p before 0.33: its noise is drawn in
# blocks, beside logits in fp32, or in 16 bit where no request changes them.
SORTED_LOGIT_BYTES = 2 + 4 + (4 + 8) + 8 + (4 + 8)
NARROW_SORTED_LOGIT_BYTES = 2 + (2 + 8) + 8 + (2 + 8)  # without an fp32 copy
MASKED_LOGIT_BYTES = 2 + 4 + 4 + 4
FEWEST_MASKED = 8  # sequences, below which logits are sorted
WIDENED_LOGIT_BYTES = 2 + 4
PLAIN_LOGIT_BYTES = 2
COUNTED_LOGIT_BITS = 33  # a 4-byte count and one bit

MLP_PASS = Fact(
    part="activations",
    what="profile pass: the fused MLP of one layer",
    shape="[max_num_batched_tokens, 3 x intermediate_size + 3 x hidden_size]",
    dtype="compute_bytes",
    why="gate_up_proj's result lives until down_proj has returned; input and residual are held",
    source="vLLM 0.33.0 model_executor/models/llama.py:115 LlamaMLP.forward",
)
ATTENTION_PASS = Fact(
    part="activations",
    what="profile pass: the fused attention of one layer",
    shape="[max_num_batched_tokens, qkv + heads + 3 x hidden_size]",
    dtype="compute_bytes",
    why="queries, keys and values are views of qkv_proj's result; input and residual are held",
    source="vLLM 0.33.0 model_executor/models/llama.py LlamaAttention.forward",
)
EXPERTS_PASS = Fact(
    part="activations",
    what="profile pass: the fused experts of one layer",
    shape="[max_num_batched_tokens x top_k, max(2 x width, hidden_size) + width]",
    dtype="compute_bytes",
    why="both products of the fused kernel share one buffer, the activation has its own",
    source="vLLM 0.33.0 model_executor/layers/fused_moe/fused_moe.py:1754 fused_experts_impl",
)
SAMPLER_PASS = Fact(
    part="logits_and_loss",
    what="profile pass: logits while tokens are sampled",
    shape="[max_num_seqs, vocab_size]",
    dtype="16-bit logits, fp32 copies and what the sampler makes of them",
    why="top-k and top-p are profiled for as many sequences as may run at once",
    source="vLLM 0.33.0 v1/worker/gpu/model_runner.py:993 _dummy_sampler_run",
)
CUTLASS_PASS = Fact(
    part="activations",
    what="profile pass: rows of experts in fp4, by vLLM's own kernels",
    shape="[tokens, experts_per_token, 3 * hidden_size]",
    dtype="compute_bytes",
    why="rows in the order of experts, what they became in that of tokens, and its product with "
    "the router's weights",
    source="vLLM 0.20.0 fused_moe/experts/cutlass_moe.py:603-660 run_cutlass_moe_fp4",
    kind="estimate",
)
MASK_BUFFER = Fact(
    part="logits_and_loss",
    what="profile pass: buffer of the kernel that masks logits",
    shape="[programs, vocab_size]",
    dtype="fp32",
    count="a program for each sequence, up to the GPU's multiprocessors",
    why="a copy of the logits that top-k and top-p leave; kept for the next call",
    source="vLLM 0.17.0 v1/sample/ops/topk_topp_triton.py:996 _TRITON_BUFFER_CACHE",
)
LAST_STATES = Fact(
    part="logits_and_loss",
    what="profile pass: hidden states while tokens are sampled",
    shape="[max_num_batched_tokens, hidden_size]",
    dtype="compute_bytes",
    why="the profile holds what the model returned until the sampler is done",
    source="vLLM 0.33.0 v1/worker/gpu/model_runner.py:1034 profile_run",
)


def layer_entry(
    rank: ModelSpec,
    *,
    tokens: int,
    element_bytes: int,
    copies: int = 1,
    held_states: int = 0,
    keeps_experts: bool = False,
) -> Entry:
    """The largest part of one layer's forward over `tokens` tokens.

    Args:
        copies: ranks with as many tokens each, whose states experts gather first.
        held_states: what callers hold beside the input, the residual and the result.
        keeps_experts: what experts take is counted elsewhere, since it is never freed.

    Kind: exact for the eager code; a compiled graph frees one hidden state more.
    Source: `MLP_PASS`, `ATTENTION_PASS`, `EXPERTS_PASS`.
    """
    hidden = (3 + held_states) * rank.hidden_size  # the input, the residual and the result
    gathered = copies if copies > 1 else 0
    widths = [
        ((not keeps_experts) * copies * width + gathered * rank.hidden_size + hidden, fact)
        if fact is EXPERTS_PASS
        else (width + hidden, fact)
        for layer, _ in rank.layers()
        for width, fact in _widths(layer, rank.hidden_size)
    ]
    width, fact = max(widths, key=lambda each: each[0])
    return Entry(fact, tokens * width * element_bytes)


def attention_entry(rank: ModelSpec, *, tokens: int, element_bytes: int) -> Entry:
    """The largest attention over `tokens` tokens. Kind, source: as of `layer_entry`."""
    width = max(_attention_width(each) for layer, _ in rank.layers() for each in layer.attentions)
    return Entry(ATTENTION_PASS, tokens * (width + 3 * rank.hidden_size) * element_bytes)


def experts_bytes(rank: ModelSpec, *, tokens: int, element_bytes: int) -> int:
    """The workspace that a layer of experts keeps for `tokens` tokens; 0 without any.

    Kind: exact for Triton's kernels; Marlin's take less where experts are narrow.
    Source: vLLM 0.14.0 to 0.33.0 `TritonExperts.workspace_shapes`: two, each as wide as states.
    """
    widths = [0]
    for layer, _ in rank.layers():
        if layer.moe is not None:
            width = layer.moe.expert.width
            both = max(width, rank.hidden_size) + max(2 * width, rank.hidden_size)
            widths.append(layer.moe.experts_per_token * both)
    return tokens * max(widths) * element_bytes


def _widths(layer: Layer, hidden_size: int) -> list[tuple[int, Fact]]:
    """Elements per token beside the hidden states, of each part of a layer."""
    widths = [(_attention_width(each), ATTENTION_PASS) for each in layer.attentions]
    mlps = [layer.mlp, None if layer.moe is None else layer.moe.shared]
    widths += [(_mlp_width(mlp), MLP_PASS) for mlp in mlps if mlp is not None]
    if layer.moe is not None:
        moe = layer.moe
        products = max(2 * moe.expert.width, hidden_size)
        widths.append((moe.experts_per_token * (products + moe.expert.width), EXPERTS_PASS))
    return widths


def _attention_width(attention: Attention) -> int:
    if attention.kind != "softmax":  # projections, what is convolved of them, and the result
        projected = sum(linear.out_features for linear in attention.linears[:-1])
        return projected + attention.conv_channels + attention.linears[-1].in_features
    return attention.q_width + attention.k_width + attention.v_width + attention.out_width


def _mlp_width(mlp: Mlp) -> int:
    return mlp.width * (3 if mlp.gated else 2)


def sampler_entries(
    rank: ModelSpec,
    *,
    vocab_size: int,
    tokens: int,
    sequences: int,
    logit_bytes: int,
    element_bytes: int,
) -> tuple[Entry, Entry]:
    """The sampler on the last token of each of `sequences`, and the states that are held.

    Kind: exact. Source: `SAMPLER_PASS`; torch 2.13 `aten/src/ATen/native/cuda/SortStable.cu`;
    logs of 1.26 GiB (Llama-3-8B, 0.6.5) and 1.45 GiB (Qwen3-8B, 0.8.5), both to the last digit.
    """
    return (
        Entry(SAMPLER_PASS, sequences * vocab_size * logit_bytes),
        Entry(LAST_STATES, tokens * rank.hidden_size * element_bytes),
    )


def mask_buffer_entries(*, vocab_size: int, sequences: int, processors: int | None) -> list[Entry]:
    """The buffer in which Triton's kernel masks logits of `sequences`; none for fewer than eight.

    Args:
        processors: multiprocessors of the GPU; None, where unknown, counts as no buffer.

    Kind: exact. Source: `MASK_BUFFER`; `apply_top_k_top_p`, v1/sample/ops/topk_topp_sampler.py.
    """
    if processors is None or sequences < FEWEST_MASKED:
        return []
    programs = min(1 << (min(processors, sequences) - 1).bit_length(), processors)
    return [Entry(MASK_BUFFER, programs * vocab_size * 4)]


def cutlass_entry(rank: ModelSpec, *, tokens: int, element_bytes: int) -> Entry:
    """A layer of experts in fp4 by vLLM's own kernels, beside the workspaces that it keeps.

    Kind: estimate: a layer's other tensors are taken to be three hidden states. Two logs of Gemma 4
    26B have 255,700 bytes a token at 8,192 and 16,384, the workspaces among them; ours 225,000.
    Source: `CUTLASS_PASS`.
    """
    most = max(layer.moe.experts_per_token if layer.moe else 0 for layer, _ in rank.layers())
    return Entry(CUTLASS_PASS, tokens * (3 * most + 1 + 3) * rank.hidden_size * element_bytes)


def cutlass_bytes(rank: ModelSpec, *, tokens: int, element_bytes: int) -> int:
    """The workspaces that vLLM's own kernels of experts in fp4 keep; 0 without experts.

    Kind: exact. Source: vLLM 0.20.0 fused_moe/experts/cutlass_moe.py:749 `workspace_shapes`, whose
    N is the width of the first product.
    """
    widths = [0]
    for layer, _ in rank.layers():
        if layer.moe is not None:
            first = layer.moe.expert.width * (2 if layer.moe.expert.gated else 1)
            both = max(2 * first, rank.hidden_size) + first
            widths.append(layer.moe.experts_per_token * both)
    return tokens * max(widths) * element_bytes
