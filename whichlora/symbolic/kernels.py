"""Which kernel computes an attention, and whether it reads a mask."""

from __future__ import annotations

from typing import Literal

from whichlora.spec.architecture import Attention, Linear
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count
from whichlora.spec.versions import Libraries

MAX_FLASH_HEAD_DIM = 256
FLASH_CAPABILITY = 8.0  # so much has units for bf16, too
# Of a target that is an amount of memory; `store.gpus` says so.
ASSUMED_CAPABILITY = "8.0"
# AMD's architectures that torch's flash and memory-efficient kernels are built for. Source:
# AOTriton's targets; its consumer boards (gfx11, gfx12) need an environment variable.
_AOTRITON = ("gfx90a", "gfx942", "gfx950")

SdpaKernel = Literal["flash", "efficient", "math"]
Kernel = Literal["flash", "efficient", "math", "eager"]
FUSED: tuple[Kernel, ...] = ("flash", "efficient")
Groups = Literal["none", "enabled", "broadcast"]
"""How grouped keys come to SDPA: not at all or repeated, with `enable_gqa`, or without it."""


def fused_qkv(attention: Attention) -> Linear | None:
    """The projection that returns q, k and v in one tensor, if there is one."""
    if attention.projection == "gated":  # its query and gate together may be as wide
        return None
    width = attention.q_width + attention.k_width + attention.v_width
    return next((linear for linear in attention.linears if linear.out_features == width), None)


def sdpa_kernel(
    *,
    device_kind: str,
    compute_capability: str | None,
    libraries: Libraries,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    groups: Groups,
    masked: bool,
    dropout: bool,
    needs_grad: bool,
) -> SdpaKernel:
    """The kernel that `F.scaled_dot_product_attention` dispatches one call to.

    cuDNN's kernel, which Hopper and data-centre Blackwell try first, keeps what flash keeps and
    takes no call that flash and the memory-efficient kernel both refuse: it counts as flash.

    Args:
        dtype: of queries, keys and values: "bf16", "fp16" or "fp32".

    Source: torch 2.13 `sdp_utils.cpp`: `can_use_flash_attention`,
    `can_use_mem_efficient_attention`, `select_sdp_backend`; CPU, `sdp_utils_cpp.cpp`. An amount of
    memory is taken as `ASSUMED_CAPABILITY`; other accelerators' own kernels as flash.
    """
    if device_kind not in ("cuda", "rocm"):
        on_cpu = device_kind == "cpu"  # its flash kernel reads grouped keys and masks
        return "math" if on_cpu and (dropout or groups == "broadcast") else "flash"
    if groups == "broadcast":
        return "math"
    on_amd = device_kind == "rocm"
    if on_amd and compute_capability not in (None, *_AOTRITON):
        return "math"
    capability = FLASH_CAPABILITY if on_amd else float(compute_capability or ASSUMED_CAPABILITY)
    is_half = dtype != "fp32"
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small_shared_memory = not on_amd and (8.6 <= capability < 9.0 or capability >= 12.0)
    too_wide_backward = needs_grad and small_shared_memory and head_dim > 192
    flash = (
        is_half
        and not masked
        and capability >= FLASH_CAPABILITY
        and head_dim == v_head_dim <= MAX_FLASH_HEAD_DIM
        and not (too_wide_backward and (dropout or head_dim <= 224))
    )
    if flash:
        return "flash"
    # minimum_gemm_alignment, less_than_sm80_mem_efficient_dtypes
    alignment = 8 if is_half else 4 if capability >= FLASH_CAPABILITY else 1
    efficient = (
        (groups == "none" or (libraries.efficient_takes_groups and not on_amd))
        and (dtype != "bf16" or capability >= FLASH_CAPABILITY)
        and head_dim % alignment == v_head_dim % alignment == 0
    )
    return "efficient" if efficient else "math"


def repeats_keys(
    attention: Attention, dtypes: Dtypes, *, masked: bool, decoding: bool = False
) -> bool:
    """Whether transformers writes grouped keys out once per query head before it calls SDPA.

    Args:
        decoding: one query per sequence.

    Source: transformers 5.23 `sdpa_attention_forward`, `use_gqa_in_sdpa`; 4.53 without it.
    """
    grouped = attention.num_key_value_heads < attention.num_attention_heads
    if not grouped or not dtypes.uses_sdpa or attention.sdpa == "math":
        return False
    libraries = dtypes.libraries
    if libraries.repeats_keys:
        return True
    if decoding and libraries.packs_queries:
        return False
    wide = not attention.head_dim == attention.v_head_dim <= MAX_FLASH_HEAD_DIM
    return masked or dtypes.attn == "sdpa-efficient" or (wide and libraries.repeats_wide_keys)


def attention_kernel(
    attention: Attention, dtypes: Dtypes, *, masked: bool, decoding: bool = False
) -> Kernel:
    """What computes the attention: `attn` is requested, the class and the device decide.

    Args:
        masked: SDPA is handed a mask or a bias.
        decoding: one query per sequence.

    Source: `sdpa_kernel`; the classes of transformers 5.23.
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
    if attention.sdpa != "fused" or dtypes.device_kind not in ("cuda", "rocm"):
        return False
    return _dispatched(attention, dtypes, groups="none", masked=True) == "efficient"


def _dispatched(
    attention: Attention, dtypes: Dtypes, *, groups: Groups, masked: bool
) -> SdpaKernel:
    return sdpa_kernel(
        device_kind=dtypes.device_kind,
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


def _groups(attention: Attention, dtypes: Dtypes, *, masked: bool, decoding: bool) -> Groups:
    """How keys come to SDPA; a packed query has as many heads as its keys."""
    if attention.num_key_value_heads == attention.num_attention_heads:
        return "none"
    if attention.sdpa == "math":
        return "broadcast"
    if repeats_keys(attention, dtypes, masked=masked, decoding=decoding):
        return "none"
    packed = decoding and repeats_keys(attention, dtypes, masked=masked)
    return "none" if packed else "enabled"


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


def has_mask_per_head(attention: Attention) -> bool:
    """Whether the model adds ALiBi to its mask, which all layers then share. Falcon does."""
    return attention.always_masked and attention.position == "alibi"
