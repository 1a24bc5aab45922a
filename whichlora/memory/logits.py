"""Tensors of vocabulary width: the logits and the loss.

With checkpointing, and for almost every model with 32,000 tokens or more even without it, the
peak of training is here, at 12 bytes per token and vocabulary entry.
"""

from __future__ import annotations

from whichlora.architecture import ModelSpec
from whichlora.numeric import Count, smallest
from whichlora.stack import Stack

FUSED_TILE_TOKENS = 4096
FUSED_TILE_VOCAB = 32_768


def logit_width(model: ModelSpec) -> int:
    """Entries per position that training produces; an encoder is trained to fill masked words."""
    has_logits = model.head is not None or model.task == "encoder"
    return model.vocab_size if has_logits else 0


def loss_forward_bytes(model: ModelSpec, stack: Stack, *, tokens: Count, loss_head: str) -> Count:
    """Alive at the end of the loss's forward: logits, their fp32 copy, the log-softmax.

    Kind: exact for hf and raw; liger as lower bound (its chunk is not counted).
    Source: transformers 5.23 `ForCausalLMLoss`; TRL 1.16 fused head.
    """
    vocab = logit_width(model)
    if loss_head == "raw":
        return tokens * vocab * stack.compute_bytes
    if loss_head == "trl-fused":
        tile = smallest(tokens, FUSED_TILE_TOKENS) * FUSED_TILE_VOCAB * stack.compute_bytes
        # selected hidden states, targets and normaliser, seven fp32 vectors
        return tokens * (2 * model.hidden_size + 12 + 28) + tile
    if loss_head == "liger":
        return tokens * model.hidden_size * stack.compute_bytes
    logits_bytes = stack.compute_bytes
    loss_bytes = loss_element_bytes(model, stack)
    upcast_bytes = 0 if logits_bytes == loss_bytes else loss_bytes
    softcap_bytes = stack.compute_bytes if model.logit_softcap else 0
    return tokens * vocab * (logits_bytes + upcast_bytes + loss_bytes + softcap_bytes)


def loss_element_bytes(model: ModelSpec, stack: Stack) -> int:
    """One entry of the loss: decoders widen their logits, T5 and BERT leave that to autocast."""
    return 4 if model.task == "causal-lm" else stack.loss_bytes


def loss_backward_bytes(model: ModelSpec, stack: Stack, *, tokens: Count, loss_head: str) -> Count:
    """Alive at the worst point of the loss's backward.

    Kind: exact for hf: the log-softmax and its two gradients, 12 bytes per entry in fp32.
    """
    vocab = logit_width(model)
    hidden = model.hidden_size
    if loss_head == "raw":
        return tokens * vocab * 2 * stack.compute_bytes
    if loss_head == "trl-fused":
        tile = smallest(tokens, FUSED_TILE_TOKENS) * FUSED_TILE_VOCAB * stack.compute_bytes
        widened = 2 * FUSED_TILE_VOCAB * hidden if stack.embedding_bytes != 2 else 0
        return tokens * (2 * hidden + 12 + 4 * hidden + 2 * hidden) + tile + widened
    if loss_head == "liger":
        return tokens * hidden * 2 * stack.compute_bytes
    softcap_bytes = stack.compute_bytes if model.logit_softcap else 0
    final_norm = 20 * hidden  # its backward; larger only where the vocabulary is tiny or absent
    entry = 3 * loss_element_bytes(model, stack) + softcap_bytes
    return tokens * max(vocab * entry, final_norm)


def generation_bytes(model: ModelSpec, *, batch_size: Count, compute_bytes: int) -> Count:
    """Logits that `generate` keeps while it picks the next token: last positions only.

    The model's logits, their fp32 copy and the processed scores. Kind: exact for
    transformers 4.45 and later. Source: trace of `GenerationMixin._sample`.
    """
    if model.head is None:
        return 0 * batch_size
    return batch_size * model.vocab_size * (compute_bytes + 8)


def encoder_bytes(model: ModelSpec, *, tokens: Count, compute_bytes: int) -> Count:
    """Logits of every position, as an encoder's own head returns them. Kind: exact."""
    vocab = logit_width(model)
    return tokens * vocab * compute_bytes


def head_copy_bytes(model: ModelSpec, stack: Stack) -> int:
    """The 16-bit copy of an fp32 head that autocast makes and backward needs (mode Q)."""
    if model.head is None or stack.mode != "Q":
        return 0
    return 2 * model.head.num_weights
