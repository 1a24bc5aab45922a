"""Which kernel computes an attention, and whether it reads a mask."""

from __future__ import annotations

from typing import Literal

from whichlora.spec.backends import SdpaCall, SdpaKernel
from whichlora.spec.backends.base import Groups
from whichlora.spec.backends.cuda import MAX_FLASH_HEAD_DIM
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Linear
from whichlora.spec.numeric import Count

Kernel = Literal["flash", "efficient", "math", "eager"]
FUSED: tuple[Kernel, ...] = ("flash", "efficient")
ALIGNED_KEYS = 16  # `preprocess_mask`, `pad_bias` of torch's attention.cpp


def fused_qkv(attention: Attention) -> Linear | None:
    """The projection that returns q, k and v in one tensor, if there is one."""
    if attention.projection == "gated":  # its query and gate together may be as wide
        return None
    width = attention.q_width + attention.k_width + attention.v_width
    return next((linear for linear in attention.linears if linear.out_features == width), None)


def repeats_keys(
    attention: Attention, dtypes: Dtypes, *, masked: bool, decoding: bool = False
) -> bool:
    """Whether transformers writes grouped keys out once per query head before it calls SDPA.

    Args:
        decoding: one query per sequence.

    Source: transformers 5.23 `sdpa_attention_forward`, `use_gqa_in_sdpa`; 4.53 without it.
    """
    if not is_grouped(attention) or not dtypes.uses_sdpa or attention.sdpa == "math":
        return False
    libraries = dtypes.libraries
    if libraries.repeats_keys:
        return True
    since = dtypes.backend.takes_groups_since
    if libraries.reaches("torch", since):
        return False
    if decoding and libraries.packs_queries:
        return False
    if since is not None:
        return True
    wide = not attention.head_dim == attention.v_head_dim <= MAX_FLASH_HEAD_DIM
    return masked or dtypes.attn == "sdpa-efficient" or (wide and libraries.repeats_wide_keys)


def is_grouped(attention: Attention) -> bool:
    """Whether the attention gets a key for several heads; Falcon copies them before its cache."""
    grouped = attention.num_key_value_heads < attention.num_attention_heads
    return grouped and attention.projection != "copied"


def attention_kernel(
    attention: Attention, dtypes: Dtypes, *, masked: bool, decoding: bool = False
) -> Kernel:
    """What computes the attention: `attn` is requested, the class and the device decide.

    Args:
        masked: SDPA is handed a mask or a bias.
        decoding: one query per sequence.

    Source: `sdpa` of the backend; the classes of transformers 5.23.
    """
    if dtypes.attn == "flash_attention_2":
        return "flash"
    if dtypes.attn == "eager" or attention.sdpa == "eager":
        return "eager"
    if dtypes.attn == "sdpa-efficient":  # the only one allowed
        return "efficient"
    groups = _groups(attention, dtypes, masked=masked, decoding=decoding)
    return _dispatched(attention, dtypes, groups=groups, masked=masked)


def runs_efficient(attention: Attention, dtypes: Dtypes) -> bool:
    """Whether the memory-efficient kernel takes the attention, its keys repeated."""
    if attention.sdpa != "fused" or not dtypes.backend.has_efficient:
        return False
    return _dispatched(attention, dtypes, groups="none", masked=True) == "efficient"


def _dispatched(
    attention: Attention, dtypes: Dtypes, *, groups: Groups, masked: bool
) -> SdpaKernel:
    call = SdpaCall(
        compute_capability=dtypes.compute_capability,
        libraries=dtypes.libraries,
        dtype="fp32" if dtypes.compute_bytes == 4 else dtypes.half,
        head_dim=attention.head_dim,
        v_head_dim=attention.v_head_dim,
        groups=groups,
        masked=masked,
        dropout=bool(attention.dropout) and dtypes.training,
        needs_grad=dtypes.training,
    )
    return dtypes.backend.sdpa(call)


def _groups(attention: Attention, dtypes: Dtypes, *, masked: bool, decoding: bool) -> Groups:
    """How keys come to SDPA; a packed query has as many heads as its keys."""
    if not is_grouped(attention):
        return "none"
    if attention.sdpa == "math":
        return "broadcast"
    if repeats_keys(attention, dtypes, masked=masked, decoding=decoding):
        return "none"
    packed = decoding and repeats_keys(attention, dtypes, masked=masked)
    return "none" if packed else "enabled"


def masks_keys(attention: Attention, dtypes: Dtypes) -> bool:
    """Whether eager scores get a mask of one row for each sequence, whatever the batch.

    Kind: exact. Source: `Attention.masks_keys`, `Attention.masks_keys_until`.
    """
    until = attention.masks_keys_until
    return attention.masks_keys or bool(until and dtypes.libraries.older("transformers", until))


def is_masked(attention: Attention, dtypes: Dtypes, span: Count) -> Count:
    """1 where SDPA gets a mask tensor, else 0: padding, or a window that the tokens fill.

    Source: transformers 5.23 `_ignore_causal_mask_sdpa`.

    Kind: exact.
    """
    if dtypes.padded or attention.always_masked:
        return 1 + 0 * span
    if attention.sliding_window is None:
        return 0 * span
    return 1 * (span >= attention.sliding_window)


def added_mask_bytes(attention: Attention, dtypes: Dtypes) -> int:
    """One element of a mask that the model makes for all layers and SDPA adds as it is.

    Kind: exact. Source: `Attention.adds_mask`; torch 2.13 `autocast_mode.h` on products.
    """
    if attention.adds_mask == "product" and dtypes.under_autocast:
        return dtypes.compute_bytes
    return dtypes.stream_bytes if attention.adds_mask == "stream" else dtypes.base_bytes


def shares_mask(attention: Attention, dtypes: Dtypes) -> bool:
    """Whether SDPA reads that mask itself: no layer casts it, or lays out rows that are aligned.

    Kind: exact. Source: as of `ALIGNED_KEYS`.
    """
    if not attention.adds_mask or added_mask_bytes(attention, dtypes) > dtypes.compute_bytes:
        return False
    is_aligned = attention.memory_len % ALIGNED_KEYS == 0
    return is_aligned or attention_kernel(attention, dtypes, masked=True) != "efficient"


def has_mask_per_head(attention: Attention) -> bool:
    """Whether the model adds ALiBi to its mask, which all layers then share. Falcon does."""
    return attention.always_masked and attention.position == "alibi"
