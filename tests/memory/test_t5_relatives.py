"""LongT5's blocks and Switch Transformers' experts: bytes by hand, and what is refused."""

from typing import Any

import pytest

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory.activations import block_bias_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.step_events import training_events
from whichlora.memory.training import Ledger
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.symbolic.linear_form import evaluate, per_chunk_group, per_group, plus, scaled

A100 = find_gpu("a100-sxm-80gb")
LONG = {"model_type": "longt5", "num_layers": 2}
GLOBAL = LONG | {"encoder_attention_type": "transient-global"}
SWITCH = {"model_type": "switch_transformers", "num_layers": 2, "num_decoder_layers": 2}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}


def ledger_of(config: dict[str, Any], **settings: Any) -> Ledger:
    run = RunConfig.from_dict({"model": "m", **settings})
    return ledger(resolve(families.build(config, name="m"), run, A100))


def test_chunks_and_groups_of_a_sequence_are_multiplied() -> None:
    form = plus(per_group(3, 16), scaled(per_chunk_group(2, chunk=128, group=16), 5))
    chunks, groups = 3, 18  # of 300 tokens: a part of a chunk counts, one of a group does not
    assert evaluate(form, tokens=4 * 300, span=300, r=8) == 4 * groups * (3 + 10 * chunks)


@pytest.mark.parametrize(
    ("config", "element", "further", "mask"), [(LONG, 4, 0, 1), (GLOBAL, 2, 300 // 16, 0)]
)
def test_the_bias_of_blocks_is_there_for_every_sequence(
    config: dict[str, Any], element: int, further: int, mask: int
) -> None:
    job = resolve(families.build(config, name="m"), RunConfig(model="m"), A100)
    heads, blocks, block = 8, 2 * 3, 128
    found = block_bias_bytes(job.model, job.dtypes, tokens=2 * 300, span=300)
    bias = element * heads * blocks * block * (3 * block + further)
    assert found == bias + mask * blocks * block * 3 * block
    masks = block_bias_bytes(job.model, job.dtypes, tokens=2 * 300, span=300, unbiased="encoder")
    assert found - masks == bias


def test_experts_keep_no_more_tokens_than_their_capacity() -> None:
    def kept(seq_len: int, **more: Any) -> float:
        config = SWITCH | {"num_heads": 1} | more
        run = {"gradient_checkpointing": False, "seq_len": seq_len, "batch_size": 1}
        saved = ledger_of(config, **run).moments["loss_backward"]
        return float(sum(int(entry.num_bytes) for entry in saved))

    few, many = ({"expert_capacity": number} for number in (64, 4096))
    assert kept(512, **few) == kept(512, **many)  # 8 experts take 64 tokens each
    assert kept(1024, **few) < kept(1024, **many)


@pytest.mark.parametrize("config", [SWITCH, LONG], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_4_bit_weights_are_refused_whose_dtype_a_class_casts_to(
    config: dict[str, Any], quant: str
) -> None:
    with pytest.raises(ConfigError, match=f"casts what wo of m reads .* uint8 in {quant}"):
        ledger_of(config, quant=quant)
    ledger_of(config, quant="int8")
    ledger_of(LONG | {"feed_forward_proj": "gated-gelu"}, quant=quant)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (SWITCH | {"tie_word_embeddings": False}, "tie_word_embeddings is false"),
        (LONG | {"encoder_attention_type": "full"}, "'full', neither local nor transient-global"),
    ],
)
def test_what_a_config_can_not_say_is_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        families.build(config, name="m")


def test_a_gradient_of_the_bias_stands_in_place_of_a_layers_scores() -> None:
    """The last layer of a stack finds none gathered; behind any other a layer has let go."""
    pairs = 1024 * 1024
    config = {"model_type": "t5", "num_layers": 4, "num_heads": 8, "vocab_size": 64}
    settings = {"method": "full", "precision": "fp32", "attn": "eager", "optimizer": "sgd"}
    settings |= {"gradient_checkpointing": False, "seq_len": 1024, "batch_size": 1}
    job = resolve(families.build(config, name="m"), RunConfig(model="m", **settings), A100)
    found = ledger(job)
    live = int(found.peak_allocated_bytes) - found.workspace_bytes
    replayed = training_events(training_step(job)).peak_bytes
    assert abs(live - replayed) < 4 * 8 * pairs / 2  # half of the bias's gradient


def eager_step(transformers: str) -> TrainingStep:
    run = RunConfig(
        model="google-t5/t5-small",
        method="full",
        precision="fp32",
        attn="eager",
        gradient_checkpointing=False,
        batch_size=3,
        seq_len=256,
        libraries=(("transformers", transformers),),
    )
    return training_step(resolve(load_model(run.model), run, A100))


def test_masks_and_biases_are_tensors_of_their_own() -> None:
    """Of T5's decoder: a causal mask, the bias, and zeros for what the encoder has read."""
    step = eager_step("5.23.0")
    of_head = 4 * 256 * 256
    assert sorted(step.masks.unnamed) == [3 * of_head, 8 * of_head, 8 * of_head]
    assert sum(step.masks.unnamed) == step.masks.unnamed_bytes


def test_an_older_class_adds_the_mask_of_each_row_to_the_bias() -> None:
    """Peaks of both releases on a CPU: 65.7 and 61.6 MB for a small T5 of three rows."""
    step = eager_step("4.52.4")
    of_head = 4 * 256 * 256
    assert sorted(step.masks.unnamed)[-2:] == [3 * 8 * of_head] * 2
