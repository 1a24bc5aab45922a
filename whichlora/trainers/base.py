"""What a trainer is: who runs the steps of a fine-tuning, what a step is, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.backends import backend_of
from whichlora.spec.data_format import Rows
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.kernels import NO_KERNELS, FusedKernels
from whichlora.spec.loss_heads import LOSS_HEADS, TRL
from whichlora.spec.numeric import Count, ceil_div
from whichlora.spec.options import Option
from whichlora.spec.run import FOUR_BIT_BNB, USUAL_HEAD, LossHead, RunConfig
from whichlora.spec.tower import Tower
from whichlora.spec.versions import Libraries

# Of all weights of a language model; the 5e-5 of transformers' TrainingArguments is for BERTs.
# Source: TRL 1.16 `SFTConfig.learning_rate`.
SUPERVISED_RATE = 2e-5
OutputsHeld = Literal["until_loss", "until_backward", "until_step_ends", "until_next_outputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """Forwards of a micro-batch without gradients, beside the one with.

    Args:
        policy: of the model as it is trained; a fraction where several steps share one.
        reference: of what it was before: of the base with its adapters off, or of a second copy of
            the weights where these are trained.
        in_graph: the reference's come while the graph of the forward with gradients is alive.
    """

    policy: float = 0
    reference: float = 0
    in_graph: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Texts of an example that the model reads in several forwards, which one loss compares.

    Args:
        forwards: texts of an example in each, in order. All graphs are alive at the loss, and the
            last forward goes backward first.
        mini_batch: sequences of a forward at most, where gradients of embeddings are cached: each
            column is read without a graph, then again with one, mini-batch after mini-batch. None
            where nothing is cached.
        gathers: the loss compares with the embeddings of all GPUs.
    """

    forwards: tuple[int, ...]
    mini_batch: int | None = None
    gathers: bool = False

    @property
    def texts(self) -> int:
        """Of an example."""
        return sum(self.forwards)

    def num_forwards(self, examples: Count) -> Count:
        """With a graph, of one micro-batch."""
        if self.mini_batch is None:
            return len(self.forwards)
        return self.texts * ceil_div(examples, self.mini_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A class of losses that a trainer is handed an instance of, made for its model.

    Args:
        name: of the class, in `module`.
        settings: its arguments beside the model.
    """

    module: str
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Answers that the model in training writes, of which the next steps learn.

    Args:
        batch_size: answers that are written at once.
        prompt_len, new_tokens: of each.
        steps: optimizer steps that learn from them.
        by_engine: whether an engine in the same process writes them (`Colocated`); else `generate`
            of the model itself does.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    steps: float
    by_engine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated:
    """An engine in the process of a training, on the same GPU, that writes its answers.

    Args:
        engine: its name; release: of it, where a run states none.
        options: what it is started with, by its own names.
        context: tokens of a sequence that it is started for; None: all that the model accepts.
        context_option: what a user of the trainer calls that.
        share_option: what a user calls the engine's share of the GPU.
        shares_weights: its base is the one that is trained on, and it adds the adapter's products;
            else it has a copy, into which adapters are merged.
        gives_back: what of it is not on the GPU while the model learns.
        ranks: GPUs that have one engine together, which writes the answers of all of them.
    """

    engine: str
    release: str
    options: Mapping[str, bool | int | float | str]
    context: int | None
    context_option: str
    share_option: str
    shares_weights: bool = False
    gives_back: Literal["nothing", "cache", "cache and weights"] = "nothing"
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a training does where nobody says: of its library alone, by release.

    Args:
        told_dtype: what `from_pretrained` is told: a dtype, or "auto", that of the checkpoint; None
            where it is told nothing.
        autocasts: under bf16 autocast; else in the dtype of the weights.
        narrows_adapters: without autocast they are as wide as the weights; PEFT's are fp32.
        autocasts_quantised: so beside quantised weights; else all is in 16 bit.
        checkpoints: layers are run again in the backward.
    """

    told_dtype: Literal["float32", "bfloat16", "auto"] | None = None
    autocasts: bool = False
    autocasts_quantised: bool = True
    narrows_adapters: bool = False
    checkpoints: bool = False

    def loaded_dtype(
        self, libraries: Libraries, checkpoint: str, *, is_quantised: bool = False
    ) -> str:
        """That of weights for which nobody states a dtype.

        Args:
            checkpoint: its dtype.
            is_quantised: most weights are stored in fewer bits; it is that of the others.

        Source: transformers 4.57 `update_dtype` of quantizers/quantizer_bnb_4bit.py and others.
        """
        if self.told_dtype in ("float32", "bfloat16"):
            return self.told_dtype
        if self.told_dtype == "auto" or not libraries.loads_wide:
            return checkpoint
        return "float16" if is_quantised else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a trainer comes back to rows whose answers it writes.

    Args:
        answers: to prompts that a GPU writes at once.
        per_row: answers to each prompt.
        micro_batches: of a GPU, that learn from them.
    """

    answers: int
    per_row: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsLoss:
    """A loss that a trainer computes of a batch's whole logits: log-probabilities of all rows.

    Args:
        has_cross_entropy: and the cross entropy of the chosen rows, the first half.
        log_probabilities: by one kernel; row after row, where there is no such kernel; or of a
            log-softmax of all rows in fp32.
        copied_for_metrics: how often logits are copied for what is logged, once the loss and the
            logits of the reference are there.
        held_beside: of logits without gradients, how many more there are while the reference
            scores its last rows.
    """

    has_cross_entropy: bool = False
    log_probabilities: Literal["kernel", "rows", "softmax"] = "kernel"
    copied_for_metrics: float = 0.0
    held_beside: float = 0.0

    def way_on(self, device_kind: str) -> Literal["kernel", "rows", "softmax"]:
        """How log-probabilities are made there: the kernel is in Triton, which not all have."""
        without = not backend_of(device_kind).has_triton and self.log_probabilities == "kernel"
        return "rows" if without else self.log_probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """The cross entropy in fp32 of some positions at a time; all log-softmaxes stay.

    Args:
        positions: of each sequence; 0: so many that there are `parts`.
        parts: of a batch, where these are counted.
        by_head: the head makes its logits so, too; else of one tensor, whose gradient is put
            together of those of its chunks.
        widened: the caller gets all logits in fp32, whatever the precision is.
        in_loss: the loss makes the logits of a chunk, so that nobody has all of them.
        compiled: into kernels that keep the 16-bit logits and no log-softmax.
    """

    positions: int = 0
    parts: int = 1
    by_head: bool = True
    widened: bool = False
    in_loss: bool = False
    compiled: bool = False


def drops_outputs(run: RunConfig) -> OutputsHeld:
    return "until_loss"


def _none(run: RunConfig) -> Forwards:
    return Forwards()


def _no_rollout(run: RunConfig) -> Rollout | None:
    return None


def _own_loss(run: RunConfig) -> Loss | None:
    return None


def _no_engine(run: RunConfig, model: ModelSpec, gpu: GpuSpec, free_bytes: int) -> Colocated | None:
    return None


def _one_forward(run: RunConfig) -> Columns | None:
    return None


def _once(run: RunConfig) -> Repeats | None:
    return None


def _all_tokens(run: RunConfig) -> int | None:
    return None


def _of_model(run: RunConfig) -> LogitsLoss | None:
    return None


def _at_once(run: RunConfig) -> ChunkedLoss | None:
    return None


def _accepts(run: RunConfig) -> None:
    return None


def _as_published(model: ModelSpec, run: RunConfig) -> ModelSpec:
    return model


def _as_asked(model: ModelSpec, targets: tuple[str, ...]) -> tuple[str, ...]:
    return targets


def _one(run: RunConfig) -> int:
    return 1


def _stock_code(run: RunConfig, model_type: str) -> FusedKernels:
    return NO_KERNELS


def _by_class(run: RunConfig, tower: Tower, is_adapted: bool) -> bool:
    """Where the class of a tower names what embeds its patches.

    Source: transformers 5.0 `enable_input_require_grads`, before which it hooks the text alone.
    """
    return tower.hooked and not run.versions.older("transformers", "5")


def _named(run: RunConfig, model_type: str) -> LossHead:
    return run.loss_head


def _nothing_to_say(run: RunConfig, model_type: str) -> tuple[str, ...]:
    return ()


def _as_resolved(dtypes: Dtypes) -> Dtypes:
    return dtypes


def _own_options(run: RunConfig) -> Mapping[str, Any]:
    return dict(run.trainer_options)


def plain_defaults(libraries: Libraries) -> Defaults:
    """Those of transformers' Trainer and of plain loops, in every release."""
    return Defaults()


def never(run: RunConfig) -> bool:
    return False


def _nothing_on_host(run: RunConfig) -> frozenset[str]:
    return frozenset()


def always(run: RunConfig) -> bool:
    return True


def _has_head_of_trl(run: RunConfig) -> bool:
    return LOSS_HEADS[run.loss_head].own_trainer == TRL


def _no_names(run: RunConfig) -> tuple[str, ...]:
    return ()


def _none_of_them(run: RunConfig) -> int:
    return 0


def _no_notes(run: RunConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Who runs the steps of a fine-tuning.

    Args:
        also_called: what else people call it, or the tool whose steps these are; by that name, what
            a user of it must know, where there is anything.
        steps: dotted name of the function that runs a few steps of it, as
            `whichlora.profiler.finetune:measure_finetune` does; profiles and traces call it.
        library_class: dotted name of the class whose steps these are; empty where a script writes
            them out. An exporter states which class its tool runs.
        config_class: dotted name of the class of its arguments; empty where there is none.
        model_class: dotted name of the class that it trains, which holds the model of transformers;
            empty where that is trained itself.
        loss: what it is handed as its loss; None where it has its own.
        loss_ending: of the names of the classes of losses that it is handed.
        length_argument: the argument of that class that cuts rows to seq_len; empty where there is
            none.
        turned_on: arguments that this class turns on where nobody says.
        makes_adapters: it is given the PEFT config, prepares a quantised base, and makes the
            adapters.
        options: its own settings, by its library's names.
        loss_heads: who may compute its loss; the first does where a run names none.
        rows: what it trains on: texts, pairs of a chosen and a rejected answer, answers that are
            labelled as wanted or not, or prompts alone.
        rows_per_example: sequences that an example adds to a forward: two for a pair of answers.
        columns: where the sequences of an example are read in forwards of their own.
        frames_rows: it puts BOS and EOS tokens around each row itself, also around one that a chat
            template has rendered; else EOS follows the text, and the tokenizer adds its own.
        takes_images: its batches with images are predicted.
        hooks_tower: whether checkpointing makes the embedded patches of a tower need a gradient,
            which may have adapters.
        rewrites_checkpoints: it rewrites the loops of a class, so that every tower is checkpointed,
            and layers get by position, detached, what they attend to.
        gathers_batches: those of all micro-steps are read before the first.
        drops_longer: rows longer than seq_len are left out, not cut.
        keeps_unlearned: rows stay whose prompt fills seq_len, with an answer of no tokens.
        forwards: those without gradients, of each micro-batch.
        task: the one task that it is for, in place of what the model's type implies.
        rollout: answers that the model writes before the steps that learn from them.
        colocated: the engine that writes them on the same GPU, of which so many bytes are free
            before anything is loaded; None where none does.
        repeats: how often it comes back to a row; None where each is in one batch of an epoch.
        scored_tokens: of each sequence, the positions that the head projects; None for all that
            its loss head does.
        outputs_held: how long a variable of the caller holds what the model returns (logits among
            it): until there is a loss, until its backward is done, until the step with the
            optimizer's update is done, or until the outputs of the next step take their place.
        widens_outputs: under autocast the caller gets fp32 copies of the outputs.
        widens_always: so without autocast, by a loss of its own.
        logits_loss: what it computes of the logits that the model returns; None where the model
            or its head computes the loss.
        chunked_loss: how it computes the cross entropy in the place of the model, if it does.
        narrows_embedding_states: an 8-bit optimizer has 8-bit states of embeddings, too.
        defaults: what it does where nobody says; None where its own are what runs have here.
        dated_by: a library whose release, where a user states it, makes its defaults those of the
            run: `predict.defaults`.
        has_one_way: its defaults hold where nobody says, since it has not what the others take.
        keeps_base: a quantised base is not prepared, whose norms stay narrow.
        narrows_adapters: those of a quantised base are cast to 16 bit.
        narrowed_names: embeddings and heads whose names contain one of these are cast to bf16, on a
            prepared 4-bit base that is trained in bf16 under autocast.
        clips_gradients: their norm is computed and cut before each optimizer step.
        kernels: operators of the layers that it replaces in models of a type.
        loss_of: who computes the loss of models of a type, where it replaces that, too.
        notes_of: what a user must know of such kernels in models of a type.
        narrow_copies: the dtypes of a run where its kernels cast adapters themselves.
        reentrant: kind of its checkpointing where it has one of its own.
        offloads: inputs of checkpointed layers lie in pinned host memory, but for the last.
        staging_buffers: through which they come back, that stay on the GPU.
        hosts: which of the token table and the head lie in host memory; of a weight that both are,
            both do, or none.
        own_model: a model of transformers → as its own code runs it; own_targets: so of the names
            of adapted matrices.
        updates_in_backward: each parameter is updated as soon as its gradient is there, which then
            goes.
        leaves_table_gradient: the frozen token table gets a gradient that nobody reads or drops.
        trains_whole: targets of which it trains a copy, as of modules_to_save, and no adapter.
        quantises_experts: those in one parameter are stored in 4 bit with the rest of the base.
        names_experts: their adapters are asked for by the names of the parameters: at the asked
            rank, and none of a router.
        arguments: its options as `config_class` takes them.
        learning_rate: usual where all weights are trained.
        rate_source: whose that is.
        check: refuses what the library refuses, in one line.
        least_batch: the fewest examples that a GPU may read at once.
        notes: what a user must know of a run.
    """

    name: str
    summary: str
    steps: str
    also_called: Mapping[str, str] = field(default_factory=dict, hash=False)
    library_class: str = ""
    config_class: str = ""
    model_class: str = ""
    loss: Callable[[RunConfig], Loss | None] = _own_loss
    loss_ending: str = ""
    length_argument: str = ""
    turned_on: tuple[str, ...] = ()
    makes_adapters: bool = False
    options: tuple[Option, ...] = ()
    loss_heads: tuple[LossHead, ...] = get_args(LossHead)
    rows: Rows = "texts"
    rows_per_example: int = 1
    columns: Callable[[RunConfig], Columns | None] = _one_forward
    frames_rows: bool = False
    takes_images: bool = False
    hooks_tower: Callable[[RunConfig, Tower, bool], bool] = _by_class
    rewrites_checkpoints: bool = False
    gathers_batches: bool = False
    drops_longer: bool = False
    keeps_unlearned: bool = False
    forwards: Callable[[RunConfig], Forwards] = _none
    task: str = ""
    rollout: Callable[[RunConfig], Rollout | None] = _no_rollout
    colocated: Callable[[RunConfig, ModelSpec, GpuSpec, int], Colocated | None] = _no_engine
    repeats: Callable[[RunConfig], Repeats | None] = _once
    scored_tokens: Callable[[RunConfig], int | None] = _all_tokens
    outputs_held: Callable[[RunConfig], OutputsHeld] = drops_outputs
    widens_outputs: bool = False
    widens_always: bool = False
    logits_loss: Callable[[RunConfig], LogitsLoss | None] = _of_model
    chunked_loss: Callable[[RunConfig], ChunkedLoss | None] = _at_once
    narrows_embedding_states: Callable[[RunConfig], bool] = never
    defaults: Callable[[Libraries], Defaults] | None = plain_defaults
    dated_by: str = ""
    has_one_way: bool = False
    keeps_base: Callable[[RunConfig], bool] = _has_head_of_trl
    narrows_adapters: Callable[[RunConfig], bool] = _has_head_of_trl
    narrowed_names: Callable[[RunConfig], tuple[str, ...]] = _no_names
    clips_gradients: bool = False
    kernels: Callable[[RunConfig, str], FusedKernels] = _stock_code
    loss_of: Callable[[RunConfig, str], LossHead] = _named
    notes_of: Callable[[RunConfig, str], tuple[str, ...]] = _nothing_to_say
    narrow_copies: Callable[[Dtypes], Dtypes] = _as_resolved
    reentrant: bool | None = None
    offloads: Callable[[RunConfig], bool] = never
    staging_buffers: Callable[[RunConfig], int] = _none_of_them
    hosts: Callable[[RunConfig], frozenset[str]] = _nothing_on_host
    own_model: Callable[[ModelSpec, RunConfig], ModelSpec] = _as_published
    own_targets: Callable[[ModelSpec, tuple[str, ...]], tuple[str, ...]] = _as_asked
    updates_in_backward: Callable[[RunConfig], bool] = never
    leaves_table_gradient: Callable[[RunConfig], bool] = never
    trains_whole: frozenset[str] = frozenset()
    quantises_experts: bool = False
    names_experts: bool = False
    arguments: Callable[[RunConfig], Mapping[str, Any]] = _own_options
    learning_rate: float = SUPERVISED_RATE
    rate_source: str = "TRL's SFTConfig"
    check: Callable[[RunConfig], None] = _accepts
    least_batch: Callable[[RunConfig], int] = _one
    notes: Callable[[RunConfig], tuple[str, ...]] = _no_notes

    @property
    def library(self) -> str:
        """The package of its class; empty where a script writes its steps out."""
        return self.library_class.partition(".")[0]

    @property
    def class_name(self) -> str:
        """That of its class without the package; empty, too."""
        return self.library_class.rpartition(".")[2]

    def sequences(self, run: RunConfig) -> int:
        """Those of one example."""
        columns = self.columns(run)
        return self.rows_per_example if columns is None else columns.texts

    @property
    def writes_answers(self) -> bool:
        """Whether rows are prompts alone, which the model answers before it learns."""
        return self.rows == "prompts"

    def narrows(self, run: RunConfig, name: str) -> bool:
        """Whether the fp32 embedding or head `name` of a prepared base becomes 16 bit."""
        is_cast = bool(run.prepare_kbit) and run.quant in FOUR_BIT_BNB and run.precision == "bf16"
        return is_cast and any(part in name for part in self.narrowed_names(run))

    def with_narrow_tables(self, dtypes: Dtypes, run: RunConfig, model: ModelSpec) -> Dtypes:
        """`dtypes`, where `narrows` holds for embeddings or head; a tied head takes them along."""
        of_head = model.head is not None and self.narrows(run, model.head.name)
        of_both = of_head and model.head_tied
        is_cast = of_both or any(self.narrows(run, table.name) for table in model.embeddings[:1])
        width = 2 if is_cast else dtypes.embedding_bytes
        return replace(dtypes, embedding_bytes=width, narrow_head=of_head)

    def loss_head(self, run: RunConfig) -> LossHead:
        """Who computes the loss of `run`.

        Raises:
            ConfigError: this trainer has no such loss.
        """
        accepted = ("raw",) if self.logits_loss(run) is not None else self.loss_heads
        if run.loss_head == USUAL_HEAD:
            return accepted[0]
        if run.loss_head not in accepted:
            raise ConfigError(
                f"loss_head: {run.loss_head} is not in trainer {self.name}, whose loss is "
                f"{' or '.join(accepted)}; leave it out"
            )
        return run.loss_head
