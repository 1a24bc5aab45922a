"""What is on the device while a model is loaded, beyond what loading leaves."""

from __future__ import annotations

from whichlora.memory.allocator import splits_all
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.event_list import unsplit_weight_bytes
from whichlora.memory.mxfp4 import SWIZZLED_BLOCKS, swizzling_bytes
from whichlora.memory.weights import BUFFERS, quantised_matrices, weight_entries
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count
from whichlora.spec.run import BNB_QUANTS

TIED_TABLE = Fact(
    part="temporary",
    what="second copy of the tied head",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    why="the AWQ checkpoint holds both; they are tied when all tensors are loaded",
    source="AutoAWQ before 0.2.7, save_quantized; transformers PreTrainedModel.tie_weights",
    kind="upper bound",
)
UNQUANTISED_MATRIX = Fact(
    part="temporary",
    what="the matrix that is being quantised, in 16 bit",
    shape="[out_features, in_features]",
    dtype="half_bytes",
    why="it is copied to the device before it is quantised there, one after the other",
    source="transformers Bnb4bitQuantize.convert; bitsandbytes Params4bit._quantize",
    kind="upper bound",
)

NARROW_TABLE = Fact(
    part="temporary",
    what="16-bit table that is being widened",
    shape="[vocab_size, hidden_size]",
    dtype="half_bytes",
    why="preparing a quantised base for training makes an fp32 copy before the 16-bit one goes",
    source="peft 0.21 prepare_model_for_kbit_training",
    kind="upper bound",
)
START = Fact(
    part="temporary",
    what="what the adapters start from",
    shape="[out_features, in_features]",
    dtype="float32",
    why="one weight after another is decomposed, or all have a gradient",
    source="the method's start_bytes; workspaces of the decomposition are left out",
    kind="lower bound",
)

UNSPLIT_WEIGHTS = Fact(
    part="weights",
    what="allocator: unsplit remainders of weights",
    shape="[of 10 MiB and more what 2 MiB round up; up to 1 MiB of 20 MiB]",
    dtype="bytes",
    count="weights of more than 1 MiB that are loaded one by one",
    why="what a segment has more than its weight, up to 1 MiB, stays with the block",
    source="torch 2.13 CUDACachingAllocator should_split; Module._apply",
)


def unsplit_weights(
    model: ModelSpec, dtypes: Dtypes, gpu: GpuSpec, *, expandable: bool, like: Count
) -> Entry:
    """What blocks of weights are larger than the weights. Kind, source: `unsplit_weight_bytes`."""
    num_bytes = 0
    if not splits_all(gpu, expandable=expandable):
        num_bytes = unsplit_weight_bytes(model, dtypes)
    return Entry(UNSPLIT_WEIGHTS, num_bytes + 0 * like)


def tied_table_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """The tied head of an AWQ checkpoint, which is loaded apart from the embedding.

    AutoAWQ before 0.2.7 writes a clone of every name in `state_dict()`; later ones, GPTQ's tools
    and `save_pretrained` write a tied table once. Kind: upper bound, exact for those checkpoints.
    Source: AutoAWQ 0.2.6 `save_quantized`; transformers 4.46 `_load_pretrained_model` and 5.23
    `convert_and_load_state_dict_in_model` place each tensor, and `tie_weights` comes after.
    """
    if dtypes.quant != "awq-int4" or model.head is None or not model.head_tied:
        return 0
    return model.head.num_weights * dtypes.embedding_bytes


def unquantised_matrix_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """The largest matrix as bitsandbytes reads it on the device, before it is quantised.

    Matrices of the last layer that come after it are counted although they are not there yet.
    Kind: upper bound. Source: transformers 5.23 `core_model_loading.py`, which loads one tensor
    after another where it quantises (`has_on_the_fly_quantization`); `Bnb4bitQuantize.convert`.
    """
    # `w` of `Params4bit._quantize` names the 16-bit matrix while `quantize_4bit` makes the codes
    if dtypes.quant not in BNB_QUANTS:
        return 0
    sizes = (
        quantised_matrices(linear)[2]
        for layer, _ in model.layers()
        for linear in layer.linears
        if is_quantised(linear, dtypes)
    )
    return max(sizes, default=0) * dtypes.half_bytes


def table_sizes(model: ModelSpec) -> list[int]:
    """Elements of each table outside the layers; a tied head is its embedding.

    Kind: exact. Source: the config.
    """
    untied = [] if model.head is None or model.head_tied else [model.head.num_weights]
    return [table.num_params for table in model.embeddings] + untied


def narrow_table_bytes(model: ModelSpec, dtypes: Dtypes, *, prepare_kbit: bool) -> int:
    """The largest table in 16 bit, beside all weights in the width that k-bit training wants.

    Kind: upper bound, exact where the largest table comes last. Source: peft 0.21.2
    `prepare_model_for_kbit_training`, which widens one parameter after the other.
    """
    widens = prepare_kbit and dtypes.embedding_bytes > dtypes.half_bytes
    if dtypes.quant not in BNB_QUANTS or not widens:
        return 0
    return max(table_sizes(model)) * dtypes.half_bytes


def loading_temporaries(model: ModelSpec, dtypes: Dtypes) -> dict[Fact, int]:
    """What the end of loading has beside the weights. Kind: as of its facts. Source: theirs."""
    return {
        TIED_TABLE: tied_table_bytes(model, dtypes),
        UNQUANTISED_MATRIX: unquantised_matrix_bytes(model, dtypes),
        SWIZZLED_BLOCKS: swizzling_bytes(model, dtypes),
    }


def loading_moment(
    model: ModelSpec, dtypes: Dtypes, *, like: Count
) -> dict[str, tuple[Entry, ...]]:
    """At the end of loading, where more is there than what stays.

    Buffers are not there yet: transformers 4.38 `from_pretrained` moves them in `dispatch_model`,
    5.23 in `_move_missing_keys_from_meta_to_device`.
    """
    extra = loading_temporaries(model, dtypes)
    if not any(extra.values()):
        return {}
    loaded = [x for x in weight_entries(model, dtypes, like=like) if x.fact is not BUFFERS]
    return {"loading": (*loaded, *(Entry(fact, size + 0 * like) for fact, size in extra.items()))}
