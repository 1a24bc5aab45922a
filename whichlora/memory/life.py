"""The stages of a run around its steps: what each holds on the GPU, on the host and on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from whichlora.memory import allocator, gradients, loss, optimizer
from whichlora.memory.checkpoint import CheckpointBytes
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.evaluation import evaluation_moments
from whichlora.memory.lasting import ACCUMULATED
from whichlora.memory.loading import TIED_TABLE, UNQUANTISED_MATRIX, table_sizes
from whichlora.memory.mxfp4 import EXPANDED_EXPERTS, expanding_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import Ledger, training_loading
from whichlora.memory.weights import BUFFERS, EMBEDDING_WEIGHTS, quantised_matrices, weight_entries
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import is_expanded, stored_quant
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.life import LifeConfig
from whichlora.spec.numeric import ceil_div
from whichlora.spec.run import BNB_QUANTS
from whichlora.spec.targets import adapted_linears

Place = Literal["gpu", "host", "disk"]
Entries: TypeAlias = Sequence[Entry]
SHARD_BYTES = 50 * 10**9  # `max_shard_size` of `save_pretrained` in transformers 5
FP32 = 4
LABEL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Held:
    """One entry of a stage, where it lies, and the setting that lowers it, if there is one."""

    place: Place
    entry: Entry
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a run holds at the largest moment of one of its stages.

    Args:
        workspace_bytes: library workspaces on the GPU.
    """

    name: str
    held: tuple[Held, ...]
    workspace_bytes: int = 0

    def num_bytes(self, place: Place) -> int:
        """Kind: as of the entries. Source: their facts."""
        total = sum(int(held.entry.num_bytes) for held in self.held if held.place == place)
        return total + self.workspace_bytes * (place == "gpu")


# The settings that lower what training and evaluating hold, by part of the breakdown.
PART_SETTINGS = {
    "weights": "quant",
    "adapters": "r, target_modules",
    "gradients": "r, target_modules",
    "optimizer_states": "optimizer",
    "activations": "gradient_checkpointing, batch_size",
    "logits_and_loss": "loss_head, batch_size",
    "temporary": "batch_size, seq_len",
}
# Where all weights are trained, a method with adapters gives most of both away.
FULL_SETTINGS = PART_SETTINGS | {"weights": "method", "gradients": "method"}
FACT_SETTINGS = {
    EMBEDDING_WEIGHTS: "precision, prepare_kbit",
    loss.HEAD_COPY: "prepare_kbit",
    UNQUANTISED_MATRIX: "",
    TIED_TABLE: "",
}


def _on_gpu(step: TrainingStep, entries: Iterable[Entry]) -> tuple[Held, ...]:
    by_part = FULL_SETTINGS if step.method.trains_base else PART_SETTINGS
    return tuple(
        Held("gpu", entry, FACT_SETTINGS.get(entry.fact, by_part.get(entry.part, "")))
        for entry in entries
    )


def _size(entries: Iterable[Entry]) -> int:
    return sum(int(entry.num_bytes) for entry in entries)


def _copied(step: TrainingStep, num_bytes: int) -> int:
    """What moving `num_bytes` between GPU and host makes there: nothing where both are one."""
    return 0 if step.gpu.is_cpu else num_bytes


# --- downloading and loading -------------------------------------------------------------------

DOWNLOADED = Fact(
    part="files",
    what="downloaded weights",
    shape="[params]",
    dtype="of the checkpoint",
    why="the cache of huggingface_hub keeps them after loading",
    source="config.json: dtype; huggingface_hub snapshot_download",
    kind="estimate",
)
WEIGHTS_ON_HOST = Fact(
    part="weights",
    what="weights before the Trainer moves them",
    shape="[params]",
    dtype="base_bytes",
    why="from_pretrained without device_map loads to the host",
    source="transformers 5.23 Trainer._move_model_to_device",
)
TENSOR_ON_HOST = Fact(
    part="weights",
    what="largest tensor of the checkpoint",
    shape="[vocab_size, hidden_size]",
    dtype="of the checkpoint",
    why="tensors are read from the mapped file one after another",
    source="transformers 5.23 core_model_loading._materialize_copy; Bnb4BitHfQuantizer",
    kind="estimate",
)
CAST_TENSOR = Fact(
    part="weights",
    what="tensor that is being cast",
    shape="[out_features, in_features]",
    dtype="of the checkpoint",
    why="the file has another dtype than the run: a tensor is read whole before it is cast",
    source="transformers 5.23 core_model_loading._materialize_copy",
    kind="upper bound",
)


def stored_dtypes(model: ModelSpec, dtypes: Dtypes) -> Dtypes:
    """`dtypes` of the weights as the checkpoint has them; bitsandbytes quantises while loading."""
    config = model.config
    inner = config.get("text_config")
    settings = {**(inner if isinstance(inner, dict) else {}), **config}
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    width = FP32 if name == "float32" else 2
    is_stored = dtypes.quant not in BNB_QUANTS or "quantization_config" in config
    quant = dtypes.quant if is_stored else "none"
    stored = stored_quant(config)
    if stored == "mxfp4" or stored == "fp8":  # of gpt-oss, whose config names no dtype
        quant, width = stored, 2
    return replace(dtypes, quant=quant, base_bytes=width, embedding_bytes=width)


def file_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Tensors of a saved model: each tied one once, and no buffer that is made anew.

    Kind: exact. Source: transformers 5.23 `remove_tied_weights_from_state_dict`.
    """
    entries = weight_entries(model, dtypes, like=0)
    return _size(entry for entry in entries if entry.fact is not BUFFERS)


def downloading(step: TrainingStep) -> Stage:
    stored = file_bytes(step.model, stored_dtypes(step.model, step.dtypes))
    return Stage(name="downloading", held=(Held("disk", Entry(DOWNLOADED, stored)),))


def loading(step: TrainingStep) -> Stage:
    """The base until it is on the GPU.

    Pages of the mapped checkpoint are left out: the kernel may drop them.
    """
    weights = weight_entries(step.model, step.dtypes, like=0)
    moments = [weights, *training_loading(step, like=0).values()]
    largest = max(moments, key=_size)
    if step.dtypes.loads_at_once:  # its device_map is of the GPU
        width = stored_dtypes(step.model, step.dtypes).embedding_bytes
        tables = [table.num_params for table in step.model.embeddings]
        on_host = Held("host", Entry(TENSOR_ON_HOST, _copied(step, max(tables) * width)))
    else:
        size = _copied(step, _size(weights))
        on_host = Held("host", Entry(WEIGHTS_ON_HOST, size), 'device_map={"": 0}')
    held = (*_on_gpu(step, largest), on_host, *_casting(step, _size(weights)), *_expanding(step))
    return Stage(name="loading", held=held)


def _casting(step: TrainingStep, weights_bytes: int) -> tuple[Held, ...]:
    """A tensor of the file beside its cast copy, by name: tables, layers, then such as "wte".

    Args:
        weights_bytes: of all weights once they are there.

    Matrices of the last layer that come after it are counted although they are not there yet.
    """
    model, dtypes = step.model, step.dtypes
    width = stored_dtypes(model, dtypes).base_bytes
    if dtypes.quant != "none" or width == dtypes.base_bytes:
        return ()
    tables = table_sizes(model)
    at_tables = sum(tables) * dtypes.embedding_bytes + max(tables) * width - weights_bytes
    matrices = [quantised_matrices(x)[2] for layer, _ in model.layers() for x in layer.linears]
    last = [table.num_params for table in model.embeddings if table.name > "layers"]
    place: Place = "gpu" if step.gpu.is_cpu else "host"  # whose GPU is the host
    num_bytes = max(at_tables, max([*matrices, *last], default=0) * width)
    return (Held(place, Entry(CAST_TENSOR, num_bytes)),)


def _expanding(step: TrainingStep) -> tuple[Held, ...]:
    """Experts of an mxfp4 checkpoint that are being expanded, before the GPU has the model."""
    if not is_expanded(step.model.config, step.dtypes.quant):
        return ()
    place: Place = "gpu" if step.gpu.is_cpu else "host"  # whose GPU is the host
    num_bytes = expanding_bytes(step.model, step.dtypes.base_bytes)
    return (Held(place, Entry(EXPANDED_EXPERTS, num_bytes)),)


# --- training ----------------------------------------------------------------------------------

PAGED_STATES = Fact(
    part="optimizer_states",
    what="paged optimizer states",
    shape="[trained_params]",
    dtype="of the optimizer",
    why="managed memory, which the driver moves to the host where the GPU is full",
    source="bitsandbytes 0.50.2 functional.get_paged",
    kind="upper bound",
)
CHECKPOINTS = Fact(
    part="files",
    what="checkpoints",
    shape="[trained_params] and the optimizer's states",
    dtype="of the parameter",
    count="save_total_limit + 1",
    why="the oldest is removed after the newest is written",
    source="transformers 5.23 Trainer._save_checkpoint, rotate_checkpoints",
    kind="estimate",
)


def training(
    step: TrainingStep, ledger: Ledger, checkpoint: CheckpointBytes, life: LifeConfig
) -> Stage:
    """The largest moment of a step, and the checkpoints that it leaves."""
    moments = [name for name in ledger.moments if name != "loading"]
    peak = max(moments, key=ledger.moment_bytes)
    written = life.keeping.saves * (life.keeping.save_total_limit + 1)
    states = [
        optimizer.state_bytes(step.tensors, optimizer=step.run.optimizer, device_kind=kind)
        for kind in ("cpu", step.gpu.kind)
    ]
    return Stage(
        name="training",
        workspace_bytes=ledger.workspace_in(peak),
        held=(
            *_on_gpu(step, ledger.moments[peak]),
            Held("host", Entry(PAGED_STATES, states[0] - states[1]), "optimizer"),
            Held("disk", Entry(CHECKPOINTS, written * checkpoint.total), "save_total_limit"),
        ),
    )


# --- evaluating --------------------------------------------------------------------------------

KEPT_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of all batches, before and after the last one is joined to them",
    shape="[2, eval_rows, seq_len, vocab_size]",
    dtype="loss_bytes",
    why="EvalLoopContainer keeps them on the GPU, and torch.cat makes them anew",
    source="transformers 5.23 Trainer.evaluation_loop, EvalLoopContainer.add",
)
LOGITS_BEFORE = Fact(
    part="logits_and_loss",
    what="logits of earlier batches",
    shape="[eval_rows, seq_len, vocab_size]",
    dtype="loss_bytes",
    why="EvalLoopContainer keeps them on the GPU, and a variable those of the last batch",
    source="transformers 5.23 Trainer.evaluation_loop, EvalLoopContainer.add",
)
LOGITS_ON_HOST = Fact(
    part="logits_and_loss",
    what="logits for compute_metrics, before and after the last ones are joined to them",
    shape="[eval_rows, seq_len, vocab_size]",
    dtype="fp32",
    count="2 with eval_accumulation_steps",
    why="numpy.concatenate makes the array anew",
    source="transformers 5.23 EvalLoopContainer.to_cpu_and_numpy, nested_numpify",
)
MOVED_LOGITS = Fact(
    part="logits_and_loss",
    what="logits that were moved last",
    shape="[rows, seq_len, vocab_size]",
    dtype="fp32",
    why="NumPy has no bf16, so that they are copied, or they are joined to the earlier ones",
    source="transformers 5.23 EvalLoopContainer.to_cpu_and_numpy, nested_numpify",
)


def evaluating(step: TrainingStep, checkpointed: TrainingStep, life: LifeConfig) -> Stage:
    """An evaluation between steps: its forward, or where logits are joined.

    Labels are counted with the logits; what `compute_metrics` makes of them is left out.

    Args:
        checkpointed: the same run with gradient checkpointing.
    """
    batches = ceil_div(life.eval_rows, int(step.batch_size))
    on_gpu = min(batches, life.eval_accumulation_steps or batches)
    on_cpu = step.gpu.is_cpu
    element_bytes = step.dtypes.loss_bytes
    width = loss.logit_width(step.model)
    batch_bytes = int(step.tokens) * (width * element_bytes + LABEL_BYTES)
    # `nested_numpify` widens bf16 alone
    widens = element_bytes == 2 and step.dtypes.half == "bf16"
    wide_bytes = FP32 if widens else element_bytes
    array_bytes = int(step.tokens) * (width * wide_bytes + LABEL_BYTES)
    earlier = max(0, on_gpu if on_gpu > 2 else on_gpu - 1)  # of two, a variable holds the first
    # on a CPU the first array is a view of a tensor, until it is joined to the second
    viewed = on_gpu * array_bytes if on_gpu < batches and on_cpu else 0
    joined = 2 * on_gpu * batch_bytes
    if on_cpu and widens:  # the whole beside its fp32 copy, and a variable holds the last batch
        last = batch_bytes if on_gpu > 1 else 0
        joined = max(joined, on_gpu * (batch_bytes + array_bytes) + last)
    forwards = [
        (*entries, Entry(LOGITS_BEFORE, earlier * batch_bytes + viewed))
        for entries in evaluation_moments(checkpointed).values()
    ]
    between = [entry for entry in step.always if entry.fact is not ACCUMULATED]
    peak = max([*forwards, (*between, Entry(KEPT_LOGITS, joined + viewed))], key=_size)
    setting = "prediction_loss_only, eval_accumulation_steps"
    kept_facts = (LOGITS_BEFORE, KEPT_LOGITS)
    held = [
        replace(held, setting=setting) if held.entry.fact in kept_facts else held
        for held in _on_gpu(step, peak)
    ]
    if on_gpu < batches:
        arrays, moved = (2 * batches - on_gpu) * array_bytes, on_gpu * array_bytes
    else:
        arrays, moved = _copied(step, batches * array_bytes), batches * batch_bytes * widens
    return Stage(
        name="evaluating",
        workspace_bytes=allocator.workspace_bytes(step.gpu, training=True),
        held=(
            *held,
            Held("host", Entry(LOGITS_ON_HOST, arrays), "prediction_loss_only"),
            Held("host", Entry(MOVED_LOGITS, _copied(step, moved)), "eval_accumulation_steps"),
        ),
    )


# --- saving ------------------------------------------------------------------------------------

COPIED_FILE = Fact(
    part="weights",
    what="copy of what goes into one file",
    shape="[params of a file]",
    dtype="of the parameter",
    why="safetensors moves every tensor to the host, and keeps all until the file is written",
    source="safetensors torch._flatten_as_ptr, _to_ndarray",
)
COPIED_STATE = Fact(
    part="optimizer_states",
    what="copy of the largest state",
    shape="[out_features, in_features]",
    dtype="of the optimizer",
    why="torch.save moves one storage after the other",
    source="torch 2.13 serialization._save",
)
SAVED_MODEL = Fact(
    part="files",
    what="adapter or model at the end",
    shape="[trained_params]",
    dtype="of the parameter",
    why="trainer.save_model",
    source="transformers 5.23 Trainer._save; peft 0.21.2 save_pretrained",
)


def saving(step: TrainingStep, checkpoint: CheckpointBytes) -> Stage:
    """A checkpoint being written between steps; gradients are None by then."""
    states = [
        size
        for tensor in step.tensors
        for size in optimizer.state_blocks(
            tensor, optimizer=step.run.optimizer, device_kind=step.gpu.kind
        )
    ]
    file = Held(
        "host",
        Entry(COPIED_FILE, _copied(step, min(int(checkpoint.tensors), SHARD_BYTES))),
        "max_shard_size",
    )
    state = Held("host", Entry(COPIED_STATE, _copied(step, max(map(int, states), default=0))))
    on_host = max(file, state, key=lambda held: int(held.entry.num_bytes))
    saved = Held(
        "disk",
        Entry(SAVED_MODEL, checkpoint.weights),
        "method" if step.method.trains_base else "r, target_modules",
    )
    return Stage(name="saving", held=(*_on_gpu(step, step.static), on_host, saved))


# --- merging -----------------------------------------------------------------------------------

MERGED_BASE = Fact(
    part="weights",
    what="base weights, loaded again without quantisation",
    shape="[params]",
    dtype="dtype of from_pretrained",
    why="each adapter is added to its matrix in place",
    source="peft 0.21.2 BaseTuner._unload_and_optionally_merge",
)
WIDE_ADAPTERS = Fact(
    part="adapters",
    what="adapters in fp32",
    shape="[trained_params]",
    dtype="fp32",
    why="PeftModel.from_pretrained widens adapters; each goes when it is merged",
    source="peft 0.21.2 cast_adapter_dtype",
    kind="upper bound",
)
MERGED_MATRIX = Fact(
    part="temporary",
    what="products of one merged matrix",
    shape="[out_features, in_features]",
    dtype="fp32",
    why="the largest adapted matrix while its adapter is added",
    source="peft 0.21.2 LoraLayer.get_delta_weight; the method's own file",
)
MERGED_FILES = Fact(
    part="files",
    what="merged model",
    shape="[params]",
    dtype="dtype of from_pretrained",
    why="save_pretrained writes all weights, tied ones once",
    source="transformers 5.23 save_pretrained",
)


def merging_bytes(step: TrainingStep, base_bytes: int) -> int:
    """What is made beside the largest adapted matrix while its adapter is added to it.

    Kind: exact. Source: `Method.merging`.
    """
    sizes = [
        linear.in_features * linear.out_features * (1 if linear.is_module else linear.count)
        for linear, _ in adapted_linears(step.model, step.targets)
    ]
    return max(sizes, default=0) * step.method.merging(base_bytes)


def merging(step: TrainingStep, life: LifeConfig, base_bytes: int) -> Stage | None:
    """`merge_and_unload` and `save_pretrained` in a process of its own; None without adapters.

    Args:
        base_bytes: of one element of the base as it is loaded for this.
    """
    method = step.method
    if method.trains_base or not method.merges or life.merge_on == "none":
        return None
    merged = replace(step.dtypes, quant="none", base_bytes=base_bytes, embedding_bytes=base_bytes)
    base = _size(weight_entries(step.model, merged, like=0))
    linears = adapted_linears(step.model, step.targets)
    adapters = FP32 * sum(
        step.method.adapter_params(linear, step.r) * count for linear, count in linears
    )
    adapters += FP32 * sum(t.num_params for t in step.method.shared_tensors(linears, step.r))
    adapters += sum(
        (frozen.element_bytes or FP32) * frozen.num_params
        for frozen in step.method.frozen_tensors(linears, step.r)
    )
    copies = gradients.gradient_bytes(
        gradients.saved_modules(step.model, step.run.modules_to_save, base_bytes)
    )
    place: Place = "gpu" if life.merge_on == "gpu" else "host"
    written = file_bytes(step.model, merged)
    copied = _copied(step, min(written, SHARD_BYTES)) if place == "gpu" else 0
    elsewhere = "merge_on" if place == "gpu" else ""
    return Stage(
        name="merging",
        held=(
            Held(place, Entry(MERGED_BASE, base), ", ".join(filter(None, ("dtype", elsewhere)))),
            Held(place, Entry(WIDE_ADAPTERS, adapters), "r, target_modules"),
            Held(place, Entry(gradients.SAVED_MODULES, copies), "modules_to_save"),
            Held(place, Entry(MERGED_MATRIX, merging_bytes(step, base_bytes)), elsewhere),
            Held("host", Entry(COPIED_FILE, copied), "max_shard_size"),
            Held("disk", Entry(MERGED_FILES, written), "dtype"),
        ),
    )


# --- resuming ----------------------------------------------------------------------------------

LOADED_ADAPTERS = Fact(
    part="adapters",
    what="adapters of the checkpoint",
    shape="[trained_params]",
    dtype="adapter_bytes",
    why="they are copied into those of the model",
    source="peft 0.21.2 load_peft_weights, set_peft_model_state_dict",
)
LOADED_WEIGHTS = Fact(
    part="weights",
    what="weights of the checkpoint, a mapped file",
    shape="[params]",
    dtype="of the parameter",
    why="they are loaded to the host, then copied into those of the model",
    source="transformers 5.23 Trainer._load_from_checkpoint: safetensors load_file",
)
LOADED_STATES = Fact(
    part="optimizer_states",
    what="optimizer.pt in host memory",
    shape="[trained_params]",
    dtype="of the optimizer",
    why="torch.load reads it whole, and the optimizer copies it to the GPU",
    source="transformers 5.23 Trainer._load_optimizer_and_scheduler",
)


def resuming(step: TrainingStep, checkpoint: CheckpointBytes) -> Stage:
    """From `train(resume_from_checkpoint=…)` to its first step; there are no fresh states."""
    fresh = [entry for entry in step.static if entry.fact is not optimizer.STATES]
    if step.method.trains_base:  # mapped by the host
        on_host = Entry(LOADED_WEIGHTS, _copied(step, int(checkpoint.tensors)))
        loaded = Entry(LOADED_WEIGHTS, int(checkpoint.tensors) - on_host.num_bytes)
    else:
        on_host = Entry(LOADED_WEIGHTS, 0)
        loaded = Entry(LOADED_ADAPTERS, gradients.gradient_bytes(step.tensors))
    states = Entry(LOADED_STATES, _copied(step, int(checkpoint.optimizer_states)))
    largest = max(on_host, states, key=lambda entry: int(entry.num_bytes))
    return Stage(
        name="resuming",
        held=(
            *_on_gpu(step, max((*fresh, loaded), step.static, key=_size)),
            Held("host", largest, "optimizer, save_only_model" * (largest is states)),
        ),
    )


def stages(
    step: TrainingStep,
    ledger: Ledger,
    checkpointed: TrainingStep | None,
    checkpoint: CheckpointBytes,
    life: LifeConfig,
    *,
    merged_base_bytes: int,
) -> tuple[Stage, ...]:
    """Every stage of a run on one GPU, in the order in which they happen.

    Args:
        checkpointed: the same run with gradient checkpointing; None where nothing is evaluated.
        merged_base_bytes: of one element of the base when the adapter is merged into it.
    """
    evaluation = evaluating(step, checkpointed, life) if checkpointed is not None else None
    merged = merging(step, life, merged_base_bytes)
    return (
        downloading(step),
        loading(step),
        training(step, ledger, checkpoint, life),
        *([evaluation] if evaluation is not None else []),
        saving(step, checkpoint),
        *([merged] if merged is not None else []),
        resuming(step, checkpoint),
    )
