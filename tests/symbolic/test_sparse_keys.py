"""What an indexer makes of each query, counted by hand, and which caches refuse such a model."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory.layer_bytes import choice_bytes, handed_on_bytes, layer_cases
from whichlora.memory.layer_passes import CHECKPOINTS
from whichlora.methods.base import NO_ADAPTERS
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import evaluate, per_token
from whichlora.symbolic.operators import OpEmitter
from whichlora.symbolic.sparse_keys import CHOICE_BYTES, mask_other_keys
from whichlora.timing.sparse_work import choosing_flops_per_pair, indexer_linears

H100 = find_gpu("h100-sxm-80gb")
HEADS, WIDTH, TOP = 6, 32, 64
CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "index_n_heads": HEADS,
    "index_head_dim": WIDTH,
    "index_topk": TOP,
    "indexer_types": ["full", "shared", "full", "shared"],
}


def model_of(**changes: Any) -> ModelSpec:
    return families.build(CONFIG | changes, name="m")


def attention_of(model: ModelSpec, number: int) -> Attention:
    group = next(each for each in model.groups if number in each.positions)
    return group.layer.attentions[0]


def job_of(**settings: Any) -> ResolvedRun:
    return resolve(model_of(), RunConfig(model="m", **settings), H100)


def points_of(attention: Attention, *, tokens: int, span: int) -> list[int]:
    """Bytes alive at each step of choosing, the two inputs left out, in pure bf16."""
    tape = Tape(no_grad=True)
    dtypes = job_of(precision="bf16-pure").dtypes
    code = OpEmitter(tape, dtypes, (), NO_ADAPTERS, stream_bytes=2)
    x = tape.input(per_token(128), 2, needs_grad=False)
    latent = tape.input(per_token(48), 2, needs_grad=False)

    def turn(_: OpEmitter, tensor: Tensor) -> Tensor:
        return tensor

    held = mask_other_keys(code, attention, x, latent, lambda _, tensor, *__: tensor, turn)
    tape.hold(x, latent, *held)
    tape.returns(x)
    sizes = {"tokens": tokens, "span": span, "r": 0}
    return [int(evaluate(form, **sizes)) for form in tape.forward(saving=False)]


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_scores_of_all_heads_are_there_twice_and_keys_of_every_query_with_several_sequences(
    num_sequences: int,
) -> None:
    span = 256
    tokens = num_sequences * span
    model = model_of()
    (layer,) = (group.layer for group in model.groups if 0 in group.positions)
    ((_, running, *_),) = layer_cases(layer, job_of().dtypes, tokens=tokens, span=span)
    peak = max(points_of(running.attentions[0], tokens=tokens, span=span))
    pairs = tokens * span
    scores = 4 * HEADS * pairs
    largest = scores + max(scores, 4 * WIDTH * pairs * (num_sequences > 1))
    beside = peak - largest
    assert 0 < beside < 40 * HEADS * WIDTH * tokens


def test_a_layer_that_takes_a_choice_makes_masks_alone() -> None:
    tokens = span = 256
    taking = attention_of(model_of(), 1)
    assert taking.sparse is not None
    assert taking.sparse.num_heads == 0
    # ones, indices of 8 bytes, and what `scatter` returns
    at_most = (1 + 1) * tokens * span + 8 * TOP * tokens
    inputs = 2 * (128 + 48) * tokens
    assert max(points_of(taking, tokens=tokens, span=span)) - inputs <= at_most + 4 * TOP * tokens


def test_indexers_learn_nothing_and_layers_without_one_have_no_keys_of_it() -> None:
    model = model_of()
    own, taking = attention_of(model, 0), attention_of(model, 1)
    of_indexer = 48 * HEADS * WIDTH + 128 * WIDTH + 128 * HEADS
    assert sum(each.num_params for each in indexer_linears(own)) == of_indexer
    assert indexer_linears(taking) == ()
    assert own.cache_elements - taking.cache_elements == WIDTH
    layer = next(group.layer for group in model.groups if 0 in group.positions)
    assert layer.num_params - layer.trained_params == of_indexer + 2 * WIDTH  # its norm, too


def test_the_choice_of_the_layer_before_is_named_while_a_layer_runs() -> None:
    model = model_of()
    first, later = (
        next(group.layer for group in model.groups if number in group.positions)
        for number in (0, 2)
    )
    for span in (32, 256):
        assert handed_on_bytes(first, tokens=3 * span, span=span) == 0
        found = handed_on_bytes(later, tokens=3 * span, span=span)
        assert found == CHOICE_BYTES * 3 * span * min(span, TOP)


def test_checkpoints_hold_one_choice_for_each_indexer_with_a_layer_behind_it() -> None:
    def held(**changes: Any) -> int:
        run = RunConfig(model="m", seq_len=512, batch_size=2)
        job = resolve(model_of(**changes), run, H100)
        entries = ledger(job).moments["loss_backward"]
        return int(sum(each.num_bytes for each in entries if each.fact is CHECKPOINTS))

    sparse = attention_of(model_of(), 0).sparse
    assert sparse is not None
    one = choice_bytes(sparse, tokens=2 * 512, span=512)
    assert one == CHOICE_BYTES * TOP * 2 * 512
    assert held(indexer_types=["full"] * 4) - held() == one


def test_work_of_choosing_is_that_of_every_pair() -> None:
    own, taking = attention_of(model_of(), 0), attention_of(model_of(), 1)
    assert choosing_flops_per_pair(own) == 2 * HEADS * WIDTH + 2 * HEADS
    assert choosing_flops_per_pair(taking) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache": "vllm"}, "kv_cache: vllm is not predicted for m, whose indexers"),
        ({"kv_cache": "paged"}, "kv_cache: paged is not predicted for m, whose indexers"),
        ({"kv_cache": "quantized"}, "kv_cache: quantized is not predicted for m, whose indexers"),
    ],
)
def test_caches_that_have_no_place_for_an_indexers_keys_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ledger(job_of(phase="inference", prompt_len=64, max_new_tokens=4, **settings))


def test_a_first_layer_that_takes_a_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="indexer_types begins with 'shared'"):
        model_of(indexer_types=["shared", "full", "full", "full"])


def test_patterns_of_letters_and_of_every_so_many_layers_are_read() -> None:
    def owners(**changes: Any) -> list[int]:
        model = model_of(indexer_types=None, **changes)
        return [
            number
            for number in range(4)
            if attention_of(model, number).sparse.num_heads  # type: ignore[union-attr]
        ]

    assert owners(index_topk_pattern="FSSF") == [0, 3]
    assert owners() == [0, 1, 2, 3]
    assert owners(index_topk_freq=2, index_skip_topk_offset=2) == [0, 1, 3]
