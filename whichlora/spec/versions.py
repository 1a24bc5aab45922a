"""Library versions, and which of their differences a memory formula has to know."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Self, TypeAlias, TypeVar

from whichlora.errors import ConfigError
from whichlora.spec.backends import backend_of
from whichlora.spec.words import unknown

Value = TypeVar("Value")
# A value beside the first release that has it, oldest first; "0": all before the next one.
ByRelease: TypeAlias = tuple[tuple[str, Value], ...]

# Rows up to which bitsandbytes 0.50 multiplies with stored 4-bit weights, by compute capability:
# of a weight of [14336, 4096] on the GPU with the most multiprocessors. Of older ones, and of
# formats that an architecture has no such kernel for, FEW_FUSED_4BIT_ROWS.
FUSED_4BIT_ROWS = {
    "7.5": 128,
    "8.0": 64,
    "8.6": 128,
    "8.9": 128,
    "9.0": 32,
    "10.0": 8,
    "10.3": 8,
    "12.0": 64,
    "12.1": 256,
}
FEW_FUSED_4BIT_ROWS = 7
# Libraries of a training whose version no formula asks for.
WITHOUT_FORMULA = frozenset(
    {"axolotl", "causal-conv1d", "cut-cross-entropy", "datasets", "einops", "evaluate"}
    | {"flash-attn", "hf-transfer", "huggingface-hub", "kernels", "lightning", "liger-kernel"}
    | {"llama-cpp-python", "llamafactory", "mamba-ssm", "ms-swift", "numpy", "optimum", "packaging"}
    | {"pandas", "pillow", "protobuf", "pyarrow", "python", "ray", "safetensors", "scikit-learn"}
    | {"scipy", "sentence-transformers", "sentencepiece", "tensorboard", "tiktoken", "tokenizers"}
    | {"torchao", "torchaudio", "torchvision", "tqdm", "triton", "unsloth-zoo"}
    | {"wandb", "xformers"}
)
# A release, and what packages write behind it: 0.6.4.post1, 0.9.0rc2, 0.18.2rc1.dev73+gdb7a17ecc.
_VERSION = re.compile(
    r"v?(?P<release>[0-9.]*[0-9][0-9.]*)([-_.]?(post|dev|rc|alpha|beta|a|b)[-_.]?[0-9]*)*"
    r"(\+[A-Za-z0-9.]+)?"
)
_UNKNOWN = "8.9"  # the library takes a card that it does not know for one of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Versions as text; the defaults are those that the formulas were read and traced on.

    A property is one difference, and is true for the versions that have it. `docs/memory.md` has
    the published rows that show each. Which release ended a difference is read in the library only
    where it says so; else it is the bound that the published rows and the release notes allow.
    """

    torch: str = "2.13.0"
    transformers: str = "5.23.0"
    peft: str = "0.21.2"
    bitsandbytes: str = "0.50.2"
    trl: str = "1.16.0"
    accelerate: str = "1.15.0"
    deepspeed: str = "0.19.8"
    vllm: str = "0.6.3"
    sglang: str = "0.5.23"
    gptqmodel: str = "7.3.4"  # 0 is AutoGPTQ, which it replaced
    autoawq: str = "0"  # 0 is GPTQModel, which replaced it
    exllama: str = "0"  # `exllama_config` asks for 1 or 2; 0: what the library takes
    flashinfer: str = "0"  # 0: not installed, which only a vLLM before 0.16 asks
    triton_kernels: str = "3.5.0"  # 0: not installed, which only a vLLM before 0.12 asks
    unsloth: str = "2026.10.9"  # with the unsloth_zoo of its day
    litgpt: str = "0.5.13"

    def __post_init__(self) -> None:
        for field in fields(self):
            version = getattr(self, field.name)
            if not isinstance(version, str) or not is_version(version):
                raise ConfigError(
                    f"libraries: {field.name}={version!r} is no version; give numbers and dots, "
                    f"such as {field.default}"
                )

    @classmethod
    def of(cls, versions: Iterable[tuple[str, str]]) -> Self:
        """`versions` as (library, version) pairs; what is not named is the default.

        Raises:
            ConfigError: a library that nobody trains with, or no version.
        """
        settings = dict(versions)
        field_names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in field_names and not changes_nothing(name):
                raise ConfigError(unknown("libraries", name, field_names))
        return cls(**{name: settings[name] for name in settings if name in field_names})

    def older(self, library: str, version: str) -> bool:
        """Whether `library` is older than `version`."""
        return release_numbers(getattr(self, library)) < release_numbers(version)

    def newer(self, library: str, version: str) -> bool:
        """Whether `library` is newer than `version`."""
        return release_numbers(getattr(self, library)) > release_numbers(version)

    def reaches(self, library: str, version: str | None) -> bool:
        """Whether `library` is `version` or newer; never, where no version is given."""
        return version is not None and not self.older(library, version)

    def value_of(self, library: str, values: ByRelease[Value]) -> Value:
        """The value that holds: of the last release in `values` that `library` reaches."""
        return next(value for since, value in reversed(values) if self.reaches(library, since))

    @property
    def zeroes_gradients(self) -> bool:
        """`zero_grad` fills gradients with zeros, and keeps them; later it drops them.

        Read: `set_to_none` of torch 1.13 and 2.0 `Module.zero_grad`, `Optimizer.zero_grad`.
        """
        return self.older("torch", "2.0")

    @property
    def has_foreach(self) -> bool:
        """Optimizers, and the clipping of gradients, update lists of tensors unless told otherwise.

        Read: `_default_to_fused_or_foreach` of torch 2.0; 1.12 has `foreach = False` in its place.
        """
        return not self.older("torch", "2.0")

    @property
    def widens_overflow_check(self) -> bool:
        """ZeRO looks for an overflow in an fp32 copy of a gradient, and in masks of it.

        Read: `has_inf_or_nan` of deepspeed 0.19.6, `_has_inf_or_nan` of 0.19.5 and of 0.14.5.
        """
        return self.older("deepspeed", "0.19.6")

    @property
    def loads_all_kernels(self) -> bool:
        """A context holds every kernel of the libraries, later those that were called.

        Read: `_lazy_init` of torch 1.13 sets `CUDA_MODULE_LOADING=LAZY`, pytorch/pytorch pull
        86509; CUDA has it since 11.7, which is what 1.13 is built with.
        """
        return self.older("torch", "1.13")

    @property
    def has_own_adamw(self) -> bool:
        """transformers has an AdamW that loops over parameters, else torch's is called so. Read."""
        return self.older("transformers", "5")

    @property
    def softmax_keeps_input(self) -> bool:
        """Autograd keeps what a softmax reads beside its result.

        Read: `_softmax_backward_data` takes the input, from torch 1.11 on its dtype alone;
        `softmax_backward_data` of pytorch_utils.py in transformers 4.31 has both.
        """
        return self.older("torch", "1.11")

    @property
    def splits_keys(self) -> bool:
        """SDPA's flash kernel has several blocks read one head's keys, which one block did before.

        Source: torch 2.2 `set_params_splitkv` of flash_api.cpp; 2.1 has FlashAttention 1.
        """
        return not self.older("torch", "2.2")

    @property
    def mean_keeps_input(self) -> bool:
        """Autograd keeps the squared hidden state that an RMSNorm takes the mean of.

        Traced: 2.1.2 does, 2.2.2 does not.
        """
        return self.older("torch", "2.2")

    @property
    def linear4bit_keeps_input(self) -> bool:
        """A 4-bit linear holds its input outside of autograd, so checkpointing frees none. Read."""
        return self.older("bitsandbytes", "0.43.2")

    @property
    def linear4bit_follows_input(self) -> bool:
        """A 4-bit linear computes in the bf16 or fp32 of its first input, whatever it was told.

        Read: `Linear4bit.__init__` of 0.46 and 0.47, `compute_type_is_set`.
        """
        return self.older("bitsandbytes", "0.47")

    def fused_4bit_rows(self, device_kind: str, compute_capability: str | None, dtype: str) -> int:
        """Rows up to which bitsandbytes multiplies with a 4-bit weight as it is stored.

        Above, it expands the weight first. Read: `matmul_4bit` expands for any row before 0.40,
        then for two (`gemv_4bit` takes one); from 0.50 `gemm_4bit` asks the card and the shape
        (`_gemm_4bit_use_custom_cuda`), of which the table has the card. Other backends say it.

        Args:
            dtype: of the product, "fp32", "bf16" or "fp16".
        """
        of_backend = backend_of(device_kind).fused_4bit_rows
        rows = of_backend and of_backend(compute_capability)
        if rows == 0 or self.older("bitsandbytes", "0.40"):
            return 0
        if self.older("bitsandbytes", "0.50"):
            return 1
        if rows is not None:
            return rows
        capability = compute_capability or _UNKNOWN
        if dtype == "fp32" or (capability == "7.5" and dtype != "fp16"):
            return FEW_FUSED_4BIT_ROWS
        if release_numbers(capability) < (7, 5):
            return FEW_FUSED_4BIT_ROWS
        return FUSED_4BIT_ROWS.get(capability, FUSED_4BIT_ROWS[_UNKNOWN])

    @property
    def branches_on_codes(self) -> bool:
        """The kernel that expands 4-bit weights finds each value by branches, later in a table."""
        return self.older("bitsandbytes", "0.48")

    @property
    def trains_gptq_by_triton(self) -> bool:
        """GPTQ's weights are expanded by one kernel, in a forward and again in the backward.

        Read: `TritonV2QuantLinear.forward` of GPTQModel 1.0 and 2.0. AutoGPTQ before it, and its
        own releases from 2.1 on, call torch's operators while they train.
        """
        return self.older("gptqmodel", "2.1") and not self.older("gptqmodel", "0.9")

    @property
    def gathers_gptq_scales(self) -> bool:
        """These operators gather zero and scale of every weight; AutoGPTQ's broadcast them."""
        return not self.older("gptqmodel", "0.9")

    @property
    def exllama_kernels(self) -> int:
        """Which of exllama's kernels multiply with GPTQ's 4 bits in inference; 0 for none.

        Read: transformers 4.35 `GPTQConfig.post_init` asks AutoGPTQ for the first where
        `exllama_config` does not ask for the second. GPTQModel 7.3 takes Machete or Marlin.
        """
        return release_numbers(self.exllama)[0] or int(self.older("gptqmodel", "0.9"))

    @property
    def multiplies_awq_by_tiles(self) -> bool:
        """AutoAWQ's kernel multiplies, which unpacks the weights for every few rows anew. Read."""
        return not self.older("autoawq", "0.1")

    @property
    def expands_awq(self) -> bool:
        """A product of many rows writes AWQ's weights out in 16 bit. Read: AutoAWQ pull 316."""
        return not self.multiplies_awq_by_tiles or not self.older("autoawq", "0.2")

    @property
    def adds_positions_in_place(self) -> bool:
        """T5's eager attention adds bias and mask to its scores where they are, and scales none.

        Read: `T5Attention.forward` of 4.57, 5 calls `eager_attention_forward`.
        """
        return self.older("transformers", "5")

    @property
    def scores_whole_prompt(self) -> bool:
        """`generate` asks for fp32 logits of every prompt token, not of the last. Read."""
        return self.older("transformers", "4.45")

    @property
    def holds_outputs(self) -> bool:
        """`generate` names an output, its logits among it, until the next. Read: `del outputs`."""
        return self.older("transformers", "4.42")

    @property
    def shifts_logits(self) -> bool:
        """The loss copies its fp32 logits to drop the last position; later it shifts labels."""
        return self.older("transformers", "4.50")

    @property
    def widens_logits_in_place(self) -> bool:
        """The model returns fp32 logits, and drops the 16-bit ones before the loss."""
        return self.older("transformers", "4.46")

    @property
    def repeats_keys(self) -> bool:
        """Every SDPA gets grouped keys and values once per query head; later `enable_gqa`. Read."""
        return self.older("transformers", "4.54") or self.older("torch", "2.5")

    @property
    def repeats_wide_keys(self) -> bool:
        """So do heads that no flash kernel takes: above 256, or values of another width. Read."""
        return not self.older("transformers", "5.13")

    @property
    def sdpa_leaves_out_caps(self) -> bool:
        """SDPA runs attentions whose scores have a soft cap (Gemma 2), without it; else eager does.

        Read: Gemma 2's `_check_and_enable_sdpa` of 4.42 to 4.47, its `_supports_sdpa` of 5.20 and
        5.21, with no cap in `sdpa_attention_forward` between.
        """
        return not self.older("transformers", "4.48") and self.older("transformers", "5.21")

    @property
    def masks_caps_always(self) -> bool:
        """These classes hand SDPA a mask whatever is padded. Read: `_update_causal_mask`, 4.52."""
        return self.older("transformers", "4.53")

    @property
    def packs_queries(self) -> bool:
        """Where keys would be repeated, a single query's heads are packed per key head. Read."""
        return not self.older("transformers", "5.23")

    @property
    def efficient_takes_groups(self) -> bool:
        """The memory-efficient kernel reads grouped keys. Read: pytorch/pytorch pull 191085."""
        return not self.older("torch", "2.14")

    @property
    def cache_of_tuples(self) -> bool:
        """All of the old KV cache lives until all of the new one is there."""
        return self.older("transformers", "4.42")

    @property
    def graphs_end_early(self) -> bool:
        """vLLM has no captured graph beyond `serving_work.VLLM_CAPTURED_TOKENS`.

        Its first engine, but for 0.6.3, which compares another length with the limit.
        Source: vLLM 0.6.2 worker/model_runner.py:736, 0.6.3:835, 0.6.4:860, 0.7.3:883.
        """
        is_first = self.older("vllm", "0.8")
        return is_first and (self.older("vllm", "0.6.3") or not self.older("vllm", "0.6.4"))

    @property
    def sft_fuses_head(self) -> bool:
        """TRL's `SFTTrainer` has a loss of its own, which Liger's does not replace.

        Read: `add_fused_lm_head` of utils.py, from 1.15 on.
        """
        return not self.older("trl", "1.15")

    @property
    def sft_chunks_loss(self) -> bool:
        """It computes logits chunk by chunk, where Liger does not compute the loss.

        Read: `_chunked_cross_entropy_loss` of sft_trainer.py, 1.7 to 1.14; the model's before.
        """
        return not self.sft_fuses_head and not self.older("trl", "1.7")

    @property
    def trl_checkpoints(self) -> bool:
        """TRL's trainers checkpoint where nobody says; before, as the Trainer, they do not.

        Read: `gradient_checkpointing` of every *_config.py, a field of theirs from 0.22 on.
        """
        return not self.older("trl", "0.22")

    @property
    def trl_autocasts(self) -> bool:
        """They train under bf16 autocast where nobody says; before in the weights' dtype.

        Read: `bf16` of every *_config.py, a field of theirs from 0.19 on.
        """
        return not self.older("trl", "0.19")

    @property
    def trl_narrows_embeddings(self) -> bool:
        """TRL casts embeddings and head of a prepared base back to 16 bit, norms it leaves."""
        return self.older("trl", "0.14")

    @property
    def trl_compares_logits(self) -> bool:
        """DPO and KTO read whole logits, as of policy and reference; later tiles of them.

        Read: `_compute_loss` of dpo_trainer.py and kto_trainer.py, 1.14 and 1.15.
        """
        return self.older("trl", "1.15")

    @property
    def trl_compares_by_rows(self) -> bool:
        """Log-probabilities of whole logits are computed row after row, later by one kernel.

        Read: 1.14 is the first with kernels/logprob_entropy.py.
        """
        return self.older("trl", "1.14")

    @property
    def fsdp2_syncs_micro_steps(self) -> bool:
        """FSDP 2 sends gradients after every micro-step, whatever it is told.

        Read: `Accelerator.no_sync` asks for an attribute that version 2 lacks; pull 3762 ends it.
        """
        return self.older("accelerate", "1.11")

    @property
    def loads_wide(self) -> bool:
        """`from_pretrained` that is told no dtype makes float32 of every checkpoint.

        Source: transformers 5 has "auto" there, the dtype of the checkpoint: pull 42883.
        """
        return self.older("transformers", "5")

    @property
    def makes_wide(self) -> bool:
        """`from_config` that is told no dtype makes float32 of every config.

        Source: transformers 4.46 `_from_config` of modeling_utils.py takes that of the config.
        """
        return self.older("transformers", "4.46")

    @property
    def checkpoints_reentrant(self) -> bool:
        """Checkpointing runs the forward without a graph, unless it is told otherwise."""
        return self.older("transformers", "5")

    @property
    def fsdp_loads_once(self) -> bool:
        """One process of a node loads the weights where `cpu_ram_efficient_loading` is set.

        Read: `is_local_dist_rank_0` of 4.57 `load_state_dict`, which 5.0 asks for buffers alone.
        Run: a second process of 5.23 has all weights (`tests/parallel/test_loading_oracle.py`).
        """
        return self.older("transformers", "5")

    @property
    def quantises_subclasses(self) -> bool:
        """Classes derived from `nn.Linear` are quantised, as Falcon's.

        Read: `replace_with_bnb_linear` asks `isinstance(module, nn.Linear)`, 5 for the type itself.
        """
        return self.older("transformers", "5")

    @property
    def experts_are_modules(self) -> bool:
        """Each expert's matrices are linears: quantised, adapted, run in a Python loop. Read."""
        return self.older("transformers", "5")


def changes_nothing(library: str) -> bool:
    """Whether it is a library of a training whose version no formula asks for."""
    return library.lower().replace("_", "-") in WITHOUT_FORMULA


def is_version(text: str) -> bool:
    """Whether `text` is a release as packages write it."""
    return _VERSION.fullmatch(text) is not None


@cache
def release_numbers(version: str) -> tuple[int, ...]:
    """Of its release: 0.6.4.post1, 0.6.4rc1 and v0.6.4+cu121 are 0.6.4, and 0.11.0 is 0.11."""
    match = _VERSION.fullmatch(version)
    assert match is not None
    numbers = [int(part) for part in match["release"].split(".") if part]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
