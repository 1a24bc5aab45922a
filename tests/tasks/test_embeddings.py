"""Embeddings: what grows with a batch, what a cached loss bounds, rows, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import A100

from whichlora.dataset.anchor_tokens import AnchorTokens
from whichlora.dataset.columns import recognised
from whichlora.errors import ConfigError
from whichlora.memory.columns import GATHERED, SCORES, column_moments, last_forward
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import least_training_bytes
from whichlora.predict.quantities import ledger, passes, run_moments, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.data_format import DataFormat, negatives_of
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.tasks.embedding import TASK

BERT, QWEN = "google-bert/bert-base-uncased", "Qwen/Qwen3-0.6B"
CACHED = ("loss", "CachedMultipleNegativesRankingLoss")


def job(
    name: str, options: tuple[tuple[str, Any], ...] = (), pooling: str = "mean", **settings: Any
) -> ResolvedRun:
    settings = {"method": "lora", "batch_size": 8, "seq_len": 128} | settings
    run = RunConfig(
        model=name,
        task="embedding",
        trainer="sentence-transformers",
        trainer_options=options,
        task_options=(("pooling_mode", pooling),),
        **settings,
    )
    return resolve(load_model(name), run, A100)


def peak(*args: Any, **settings: Any) -> int:
    return int(ledger(job(*args, **settings)).peak_allocated_bytes)


@pytest.mark.parametrize("name", [BERT, QWEN])
@pytest.mark.parametrize("options", [(), (CACHED, ("mini_batch_size", 4))], ids=["plain", "cached"])
def test_arrays_of_sizes_are_counted_as_one_by_one(name: str, options: tuple[Any, ...]) -> None:
    one = job(name, options)
    sizes = np.array([1, 3, 8, 64])
    together = ledger(one, batch_size=sizes).peak_allocated_bytes
    assert together.tolist() == [
        ledger(one, batch_size=n).peak_allocated_bytes for n in (1, 3, 8, 64)
    ]
    ((_, _, features),) = passes(one, batch_size=sizes)
    for place, number in enumerate(sizes.tolist()):
        ((_, _, alone),) = passes(one, batch_size=number)
        for key, value in alone.items():
            assert np.broadcast_to(features[key], 4)[place] == pytest.approx(value)


def test_no_part_of_it_is_as_wide_as_a_vocabulary() -> None:
    of = job(QWEN)
    entries = ledger(of).moments["loss_forward"]
    in_loss = sum(int(entry.num_bytes) for entry in entries if entry.part == "logits_and_loss")
    assert in_loss < 20 * of.num_sequences * of.run.seq_len * of.model.hidden_size
    assert of.model.head is of.model.masked_head is None


def test_the_pooler_of_a_class_is_there_and_not_trained() -> None:
    full = job(BERT, method="full")
    pooler = 768 * 768 + 768
    assert full.model.num_params == load_model(BERT).num_params
    assert full.model.trainable_params == full.model.num_params - pooler
    trained = sum(t.num_params * t.count for t in training_step(full).tensors)
    assert trained == full.model.trainable_params


def test_both_graphs_are_alive_before_the_last_goes_backward() -> None:
    step = training_step(job(BERT, gradient_checkpointing=False))
    moments = column_moments(step)
    kept = last_forward(step).saved_for_backward.num_bytes

    def activations(name: str) -> int:
        return int(added(e.num_bytes for e in moments[name] if e.part == "activations"))

    assert activations("loss_backward") > 2 * kept
    assert activations("column_1_layer_backward") < 1.1 * kept


def test_a_cached_loss_bounds_the_graphs_and_reads_everything_twice() -> None:
    cached = (CACHED, ("mini_batch_size", 8))
    small, large = (peak(BERT, cached, batch_size=size) for size in (8, 512))
    assert large < 1.05 * small
    assert peak(BERT, batch_size=512) > 10 * peak(BERT, batch_size=8) / 2
    plain, twice = (passes(job(BERT, options, batch_size=64))[0][2] for options in ((), (CACHED,)))
    assert 1.2 < twice["products"] / plain["products"] < 1.6
    assert twice["launch"] > 1.3 * plain["launch"]


def test_what_the_allocator_keeps_is_estimated_not_replayed() -> None:
    _, is_replayed = run_moments(job(BERT))
    assert not is_replayed


def test_negatives_are_texts_of_a_forward_that_all_others_share() -> None:
    few, many = (training_step(job(BERT, (("num_negatives", n),))) for n in (1, 3))
    assert (few.batch_size, many.batch_size) == (8 * 3, 8 * 5)
    assert (last_forward(few).batch_size, last_forward(many).batch_size) == (8 * 2, 8 * 4)
    assert few.num_forwards == many.num_forwards == 2
    cached = training_step(job(BERT, (CACHED, ("mini_batch_size", 3), ("num_negatives", 1))))
    assert cached.num_forwards == 3 * 3


@pytest.mark.parametrize("options", [(), (CACHED, ("mini_batch_size", 4))], ids=["plain", "cached"])
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_what_bounds_a_search_is_no_more_than_the_peak(
    options: tuple[Any, ...], pooling: str
) -> None:
    of = job(BERT, options, pooling, method="full")
    prior = prior_calibration(A100)
    least = least_training_bytes(of, prior, batch_size=8, seq_len=128, least_r=1)
    assert least <= ledger(of).peak_allocated_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": "dpo"}, "trainer: dpo does not train task embedding"),
        ({"loss_head": "liger"}, "loss_head: liger is of a vocabulary"),
        ({"task_options": (("pooling_mode", "max"),)}, "accepted are mean, cls, lasttoken"),
        ({"method": "ln-tuning"}, "ln-tuning is predicted for rows of text"),
        ({"model": "google-t5/t5-small"}, "takes its encoder alone"),
    ],
    ids=str,
)
def test_what_an_embedding_can_not_be_is_refused(settings: dict[str, Any], message: str) -> None:
    run = RunConfig(**{"model": BERT, "task": "embedding", **settings})
    with pytest.raises(ConfigError, match=message):
        resolve(load_model(run.model), run, A100)


@pytest.mark.parametrize(
    ("options", "parallel", "message"),
    [
        ((("mini_batch_size", 8),), {}, "mini_batch_size: is of loss CachedMultiple"),
        ((), {"gpus": 2, "strategy": "zero2"}, "on several GPUs under ddp, got zero2; use ddp"),
        ((("gather_across_devices", True),), {}, "the run has 1; leave it out"),
    ],
)
def test_what_the_trainer_does_not_do_is_refused(
    options: tuple[Any, ...], parallel: dict[str, Any], message: str
) -> None:
    of = job(BERT, options, **({"parallel": ParallelConfig(**parallel)} if parallel else {}))
    with pytest.raises(ConfigError, match=message):
        of.trainer.check(of.run)


@pytest.mark.parametrize("options", [(), (CACHED,)], ids=["plain", "cached"])
def test_each_of_several_gpus_has_what_one_has_and_buckets(options: tuple[Any, ...]) -> None:
    """Two gloo ranks of BERT take as much, to 0.8 % under the cached loss."""
    both = [
        job(BERT, options, batch_size=64, **parallel)
        for parallel in ({}, {"parallel": ParallelConfig(strategy="ddp", gpus=4)})
    ]
    alone, several = (ledger(each).peak_allocated_bytes for each in both)
    assert several - alone == training_step(both[0]).gradients.total


def test_gathered_embeddings_and_similarities_grow_with_the_gpus() -> None:
    def scored(gpus: int) -> int:
        options = (("gather_across_devices", True),)
        parallel = ParallelConfig(strategy="ddp", gpus=gpus)
        entries = ledger(job(BERT, options, batch_size=64, parallel=parallel)).moments
        facts = (SCORES, GATHERED)
        return sum(x.num_bytes for x in entries["loss_forward"] if x.fact in facts)

    assert scored(8) == 4 * scored(2) > 0


def test_rows_have_an_anchor_and_any_number_of_negatives() -> None:
    row = {"anchor": "a", "positive": "b", "negative_10": "d", "negative_2": "c"}
    assert DataFormat.of(row).kind == "anchors"
    assert negatives_of(row) == ["negative_2", "negative_10"]
    with pytest.raises(ConfigError, match="positive must be text"):
        DataFormat.of({**row, "positive": 1})
    columns = recognised({"query": "a", "passage": "b", "negative": "c", "id": 3}, "anchors")
    assert columns.describe() == "query, negative -> passage as text (not used: id)"
    with pytest.raises(ConfigError, match="learns embeddings takes anchor, positive"):
        recognised({"text": "a"}, "anchors")


def test_each_text_of_a_row_is_a_sequence_and_other_negatives_are_refused() -> None:
    reader = AnchorTokens(max_length=8, texts=3)
    row = {"anchor": "a", "positive": "bb", "negative": "ccc"}
    lengths = reader.counts(lambda texts, _: [len(text) for text in texts], [row, row])
    assert lengths == [(1, 2, 3), (1, 2, 3)]
    with pytest.raises(ConfigError, match="the run has 1, and a row of the data set has 0"):
        reader.counts(lambda texts, _: [0 for _ in texts], [{"anchor": "a", "positive": "b"}])


@pytest.mark.parametrize(
    ("model", "is_warned"), [("google/embeddinggemma-300m", False), ("google/gemma-3-270m", True)]
)
def test_the_mean_of_hidden_states_is_warned_of_where_tokens_see_no_later_ones(
    model: str, is_warned: bool
) -> None:
    asked = job(model)
    notes = TASK.notes(asked.model, asked.run)
    assert any("last token alone" in note for note in notes) == is_warned
