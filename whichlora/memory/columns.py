"""The moments of a step whose sequences are read in several forwards, which one loss compares.

Either all graphs are alive at the loss: the last forward goes backward first, and its gradients
wait for those of the earlier ones. Or embeddings and their gradients are cached, and
each mini-batch is read again with a graph of its own, as a micro-step of an accumulation is.

Source: sentence-transformers 6.2 `MultipleNegativesRankingLoss.forward`, `embed_columns`,
`CachedLossMixin.forward_cached`, `_backward_hook` of base/losses/gradcache.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.memory.entries import Entry, Fact
from whichlora.memory.lasting import ACCUMULATED
from whichlora.memory.moments import Entries, table_moment, training_moments
from whichlora.memory.step import TrainingStep
from whichlora.spec.numeric import Count, added, floor_div, smallest
from whichlora.symbolic.linear_form import evaluate
from whichlora.trainers.base import Columns

EARLIER = Fact(
    part="activations",
    what="graphs of earlier columns",
    shape="[batch_size, seq_len, …]",
    dtype="as of this one's",
    why="one loss compares all columns, and the last forward goes backward first",
    source="sentence-transformers MultipleNegativesRankingLoss.forward; torch Engine",
)
EARLIER_STATES = Fact(
    part="activations",
    what="last hidden states of earlier columns",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="dicts of the batch name them until the loss is there",
    source="sentence-transformers Transformer.forward, BaseTrainer.compute_loss",
)
FURTHER_INPUTS = Fact(
    part="activations",
    what="token ids and masks of the other sequences",
    shape="[batch_size, seq_len]",
    dtype="int64",
    count="2 for each",
    why="a batch has all columns",
    source="sentence-transformers BaseDataCollator; transformers Trainer._prepare_inputs",
)
CACHED = Fact(
    part="activations",
    what="embeddings of all columns, and their gradients",
    shape="[2, batch_size, hidden_size]",
    dtype="fp32 under autocast",
    why="the loss is computed of them alone; gradients go back mini-batch by mini-batch",
    source="sentence-transformers CachedLossMixin.forward_cached",
)
SCORES = Fact(
    part="logits_and_loss",
    what="similarities of every anchor with every other text",
    shape="[batch_size, texts of the batch]",
    dtype="fp32 under autocast",
    count="3: scaled, joined, and a temporary",
    why="texts of other examples are the negatives",
    source="sentence-transformers MultipleNegativesRankingLoss.compute_loss_from_embeddings",
)
GATHERED = Fact(
    part="logits_and_loss",
    what="embeddings of all GPUs",
    shape="[GPUs, batch_size, hidden_size]",
    dtype="fp32 under autocast",
    count="each column; those of the texts joined, and of length 1",
    why="texts of the other GPUs are negatives, too",
    source="sentence-transformers 6.2 all_gather_with_grad, compute_loss_from_embeddings, cos_sim",
)
RANDOM_STATES = Fact(
    part="activations",
    what="states of the random numbers of each mini-batch",
    shape="[5056]",
    dtype="uint8",
    count="mini-batches of all columns",
    why="the second forward of a mini-batch drops what the first one did",
    source="sentence-transformers RandContext; torch get_rng_state",
)
MEETING = Fact(
    part="gradients",
    what="gradients that wait for those of another column",
    shape="[trained_params]",
    dtype="of the parameter",
    why="a parameter's node runs when both columns have gone backward",
    source="torch InputBuffer::accumulate",
    kind="upper bound",
)
_STATE_BYTES = 5056  # torch 2.13 `CPUGeneratorImpl::get_state`
_BATCH_BYTES = 16  # per token: ids and mask
_OF_LOSS = ("loss_forward", "loss_backward")
_IN_FORWARD = ("layer_forward", "loss_forward")
_OF_LAST = (*_IN_FORWARD, "loss_backward", "optimizer_step")


def column_moments(step: TrainingStep) -> dict[str, Entries]:
    """Every moment of `step` that can be the peak. Kind: exact, as its forwards' moments are."""
    columns = _columns(step)
    last = last_forward(step)
    scores, earlier = _scores(step, columns), list(_earlier(step))
    states = Entry(EARLIER_STATES, added(_states(part) for part in earlier) + 0 * step.tokens)
    moments = training_moments(last) | table_moment(last)
    for name in _OF_LOSS:
        moments[name] = (*moments[name], scores, _gathered(step, columns))
    for name in _IN_FORWARD:
        moments[name] = (*moments[name], states)
    for number, part in reversed(list(enumerate(earlier))):
        # its gradients are added to those of the later forwards
        follower = replace(_accumulating(part), meets=True)
        later = training_moments(follower) | table_moment(follower)
        for name, entries in later.items():
            if name not in _OF_LAST:
                meeting = Entry(MEETING, _meeting(step, name))
                moments[f"column_{number + 1}_{name}"] = (*entries, meeting)
    return moments


def _meeting(step: TrainingStep, moment: str) -> Count:
    """Gradients that wait beside those of earlier micro-steps, while an earlier column goes back.

    Without accumulation there is one of each parameter: it waits, or the two have met. Kind: upper
    bound: other layers than the first are taken as waiting. Source: `MEETING`.
    """
    first = step.layers[0].gradients + step.gradients.of_embeddings
    waiting: Count = {
        "first_layer_backward": first,
        "embedding_backward": step.gradients.of_embeddings,
        "table_backward": step.gradients.of_embeddings,
    }.get(moment, step.gradients.total)
    return waiting * step.accumulates + 0 * step.num_trained


def last_forward(step: TrainingStep) -> TrainingStep:
    """The forward that goes backward first, while what earlier ones made is there.

    A step of one forward is that itself.
    """
    columns = step.trainer.columns(step.run)
    if columns is None:
        return step
    examples = _examples(step, columns)
    if columns.mini_batch is not None:
        size = smallest(examples, columns.mini_batch)
        vectors = _vector_bytes(step) * step.batch_size
        others = _further_inputs(step, step.batch_size - size)
        cached = Entry(CACHED, 2 * vectors)
        # those of a GPU lie on the host, too: `torch.cuda.get_rng_state`
        num_states = step.num_forwards if step.gpu.is_cpu else 0
        states = Entry(RANDOM_STATES, _STATE_BYTES * num_states)
        return _accumulating(replace(step, batch_size=size, waiting=(others, cached, states)))
    return _with_earlier(step, examples * columns.forwards[-1], tuple(_earlier(step)))


def _columns(step: TrainingStep) -> Columns:
    columns = step.trainer.columns(step.run)
    assert columns is not None
    return columns


def _examples(step: TrainingStep, columns: Columns) -> Count:
    return floor_div(step.batch_size, columns.texts)


def _earlier(step: TrainingStep) -> Iterator[TrainingStep]:
    """The forwards before the last one, each with what those before it hold."""
    columns = _columns(step)
    if columns.mini_batch is not None:
        return
    parts: list[TrainingStep] = []
    for texts in columns.forwards[:-1]:
        part = _with_earlier(step, _examples(step, columns) * texts, tuple(parts))
        parts.append(part)
        yield part


def _with_earlier(
    step: TrainingStep, sequences: Count, earlier: tuple[TrainingStep, ...]
) -> TrainingStep:
    """The forward of so many `sequences`, which makes gradients of its own.

    They wait until those of all columns are there, so that they are added to none.
    """
    graphs = (Entry(EARLIER, part.saved_for_backward.num_bytes) for part in earlier)
    others = _further_inputs(step, step.batch_size - sequences)
    before = Entry(ACCUMULATED, step.gradients.total * step.accumulates)
    return replace(
        step,
        run=replace(step.run, gradient_accumulation_steps=1),
        batch_size=sequences,
        waiting=(others, *graphs, before),
    )


def _further_inputs(step: TrainingStep, sequences: Count) -> Entry:
    return Entry(FURTHER_INPUTS, _BATCH_BYTES * sequences * step.seq_len)


def _accumulating(step: TrainingStep) -> TrainingStep:
    """`step` with gradients of an earlier backward, to which its own are added."""
    others = tuple(entry for entry in step.waiting if entry.fact is not ACCUMULATED)
    run = replace(step.run, gradient_accumulation_steps=2)
    return replace(step, run=run, waiting=others)


def _states(step: TrainingStep) -> Count:
    assert step.loss.label_points is not None
    return evaluate(step.loss.label_points.states, r=step.r, **step.sized)


def _vector_bytes(step: TrainingStep) -> int:
    """Of one embedding: under autocast accelerate widens what the model returns."""
    dtypes = step.dtypes
    wide = step.trainer.widens_outputs and dtypes.under_autocast
    return step.model.hidden_size * (4 if wide else dtypes.compute_bytes)


def _scores(step: TrainingStep, columns: Columns) -> Entry:
    examples = _examples(step, columns)
    rows = examples if columns.mini_batch is None else smallest(examples, columns.mini_batch)
    element = _vector_bytes(step) // step.model.hidden_size
    others = examples * (columns.texts - 1) * _num_gathered(step, columns)
    return Entry(SCORES, 3 * element * rows * others)


def _num_gathered(step: TrainingStep, columns: Columns) -> int:
    """GPUs whose embeddings the loss compares."""
    return step.run.parallel.gpus if columns.gathers else 1


def _gathered(step: TrainingStep, columns: Columns) -> Entry:
    """Embeddings of all GPUs in the loss. Source: `GATHERED`."""
    if not columns.gathers:
        return Entry(GATHERED, 0 * step.batch_size)
    others = columns.texts - 1
    vectors = _examples(step, columns) * _num_gathered(step, columns) * _vector_bytes(step)
    return Entry(GATHERED, (columns.texts + 2 * others) * vectors)
