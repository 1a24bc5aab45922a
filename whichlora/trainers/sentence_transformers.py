"""sentence-transformers' `SentenceTransformerTrainer`: embeddings of texts that belong together.

An example is an anchor, a text that belongs to it and, where given, some that do not; the texts of
all other examples of a batch are negatives, too.

Source: sentence-transformers 6.2 `BaseTrainer.compute_loss`, `MultipleNegativesRankingLoss`,
`CachedMultipleNegativesRankingLoss`, `embed_columns` of base/losses/merged_forward.py.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import transformers
from whichlora.trainers.base import Columns, Forwards, Loss, drops_outputs

PLAIN, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
LOSS = Option(
    name="loss",
    summary="the cached one reads mini-batches twice, so that batches may be far larger",
    default=PLAIN,
    choices=(PLAIN, CACHED),
)
MINI_BATCH = Option(
    name="mini_batch_size",
    summary=f"texts of a forward of {CACHED}; 32 there where nobody says",
    default=None,
)
NEGATIVES = Option(
    name="num_negatives",
    summary="texts of an example that do not belong to its anchor; 0 where nobody says",
    default=None,
)
GATHERS = Option(
    name="gather_across_devices",
    summary="texts of the examples of all GPUs are negatives, too",
    default=False,
)
_USUAL_MINI_BATCH = 32
_SPREAD = "ddp"  # whose replicas the losses of the library know


def num_negatives(run: RunConfig) -> int:
    return NEGATIVES.whole(run.trainer_options)


def mini_batch_size(run: RunConfig) -> int | None:
    """Texts of a forward; None where the loss caches nothing."""
    if run.trainer_option(LOSS.name) != CACHED:
        return None
    return MINI_BATCH.whole(run.trainer_options, unstated=_USUAL_MINI_BATCH)


def _gathers(run: RunConfig) -> bool:
    return bool(run.trainer_option(GATHERS.name))


def _loss(run: RunConfig) -> Loss:
    size = mini_batch_size(run)
    return Loss(
        module="sentence_transformers.sentence_transformer.losses",
        name=LOSS.text(run.trainer_options),
        settings=({} if size is None else {MINI_BATCH.name: size})
        | ({GATHERS.name: True} if _gathers(run) else {}),
    )


def _columns(run: RunConfig) -> Columns:
    # the first column has a forward of its own, the others are joined: `embed_columns`
    return Columns(
        forwards=(1, 1 + num_negatives(run)),
        mini_batch=mini_batch_size(run),
        gathers=_gathers(run),
    )


def _forwards(run: RunConfig) -> Forwards:
    return Forwards(policy=int(mini_batch_size(run) is not None), in_graph=False)


def _check(run: RunConfig) -> None:
    if run.trainer_option(MINI_BATCH.name) is not None and mini_batch_size(run) is None:
        raise ConfigError(
            f"mini_batch_size: is of loss {CACHED}, and {PLAIN} reads whole batches; give "
            f"trainer option loss={CACHED}, or leave it out"
        )
    parallel = run.parallel
    if parallel.gpus == 1 and _gathers(run):
        raise ConfigError(
            f"{GATHERS.name}: embeddings of several GPUs are gathered, and the run has 1; leave it "
            "out, or give gpus"
        )
    if parallel.gpus > 1 and parallel.strategy not in (_SPREAD, "auto"):
        raise ConfigError(
            f"parallel: trainer {run.trainer} is predicted on several GPUs under {_SPREAD}, got "
            f"{parallel.strategy}; use {_SPREAD}"
        )
    if dict(parallel.options).get("gradient_as_bucket_view"):
        raise ConfigError(
            f"gradient_as_bucket_view: is not predicted for trainer {run.trainer}; use false"
        )


def _notes(run: RunConfig) -> tuple[str, ...]:
    texts = _columns(run).texts
    sentences = [
        f"batch_size counts examples of {texts} texts, of seq_len tokens at most each",
        "every text is counted as long as the longest; each column is padded on its own",
    ]
    if run.gradient_accumulation_steps > 1:
        sentences.append("negatives are those of a micro-batch: accumulation adds none")
    if run.parallel.gpus > 1 and not _gathers(run):
        sentences.append(
            f"negatives are those of each GPU alone; trainer option {GATHERS.name}=true gathers all"
        )
    return tuple(sentences)


TRAINER = replace(
    transformers.TRAINER,
    name="sentence-transformers",
    also_called={"SentenceTransformerTrainer": ""},
    takes_images=False,
    summary="sentence-transformers' SentenceTransformerTrainer: embeddings, negatives of the batch",
    steps="whichlora.profiler.sentence_transformers:measure_sentence_transformers",
    library_class="sentence_transformers.SentenceTransformerTrainer",
    config_class="sentence_transformers.SentenceTransformerTrainingArguments",
    model_class="sentence_transformers.SentenceTransformer",
    loss=_loss,
    loss_ending="Loss",
    options=(LOSS, MINI_BATCH, NEGATIVES, GATHERS),
    loss_heads=("hf",),
    rows="anchors",
    columns=_columns,
    forwards=_forwards,
    task="embedding",
    outputs_held=drops_outputs,
    arguments=lambda run: {},  # its options are of the loss
    check=_check,
    notes=_notes,
)
