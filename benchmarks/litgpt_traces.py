"""Trace drawn runs of LitGPT's own model and loss, and compare their peaks with the ledger.

`python benchmarks/litgpt_traces.py` prints errors of the kept peaks by method. `--draw 40` traces
as many runs anew, which needs LitGPT (`pip install --no-deps litgpt==0.5.13 lightning==2.6.6
lightning-utilities torchmetrics jsonargparse`). `litgpt.lora.GPT` and `chunked_cross_entropy` run
as they are on fake tensors, between the conversions of Fabric's precision plugins. The lines around
them are those of `fit` in its `finetune/lora.py` and `finetune/full.py`. Runs in 4 bit are not
traced: docs/accuracy/published.md compares them with what LitGPT has published.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trace_records import DrawnRuns, Line, first_accepted, live_bytes, live_peak
from trainer_traces import job_of

from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.architecture import layers_in_order
from whichlora.spec.run import RunConfig
from whichlora.trainers import litgpt

RECORDS = Path(__file__).parent / "traces" / "litgpt.jsonl"
MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-2-7b-hf",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen3-0.6B",
    "google/gemma-2b",
    "google/gemma-2-2b",
    "microsoft/phi-2",
    "microsoft/Phi-3-mini-4k-instruct",
    "EleutherAI/pythia-1.4b",
    "tiiuae/falcon-7b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "stabilityai/stablelm-3b-4e1t",
)
_TARGETS = (("query", "value"), ("query", "key", "value"), tuple(litgpt.GROUPS), ("all-linear",))
_PRECISIONS = (("bf16-pure", "auto"), ("bf16-pure", "auto"), ("bf16", "float32"), ("fp32", "auto"))


def draw(seed: int) -> tuple[Line, int]:
    rng = random.Random(f"litgpt {seed}")
    return first_accepted(partial(_proposed, rng), predicted)


def _proposed(rng: random.Random) -> Line:
    method = rng.choice(("lora", "lora", "lora", "full"))
    precision, base_dtype = rng.choice(_PRECISIONS)
    run = RunConfig(
        model=rng.choice(MODELS),
        trainer="litgpt",
        method=method,
        r=rng.choice((8, 16, 64)),
        lora_dropout=rng.choice((0.0, 0.05)),
        target_modules=rng.choice(_TARGETS),
        batch_size=rng.choice((1, 2, 4)),
        seq_len=rng.choice((128, 256, 512, 1000)),
        precision=precision,
        base_dtype=base_dtype,
        optimizer="adamw_torch",
        gradient_checkpointing=False,
        gradient_accumulation_steps=rng.choice((1, 2)),
    )
    return {"layers": rng.choice((2, 3, 4)), "run": run.to_dict()}


def predicted(line: Line) -> int:
    """Live bytes at the peak, as the ledger has them."""
    return max(live_bytes(job_of(line)).values())


# --- LitGPT's code --------------------------------------------------------------------------------


def lit_config(job: ResolvedRun) -> Any:
    """The `litgpt.lora.Config` of the run; shapes are those of its models in litgpt/config.py."""
    from litgpt.lora import Config

    model, run = job.model, job.run
    layer = model.groups[0].layer
    (attention,), mlp = layer.attentions, layer.mlp
    assert mlp is not None
    assert model.head is not None
    is_gelu = mlp.activation != "silu"
    names = {True: "GemmaMLP" if is_gelu else "LLaMAMLP", False: "GptNeoxMLP"}
    windows = [each.attentions[0].sliding_window for each in layers_in_order(model)]
    groups = litgpt.GROUPS.items()
    adapted = {f"lora_{name}": bool(set(own) & set(job.targets)) for name, own in groups}
    return Config(
        name="traced",
        block_size=4096,
        n_layer=model.num_hidden_layers,
        n_embd=model.hidden_size,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        n_head=attention.num_attention_heads,
        n_query_groups=attention.num_key_value_heads,
        head_size=attention.head_dim,
        rotary_percentage=attention.rotary_dim / attention.head_dim,
        parallel_residual=layer.parallel,
        shared_attention_norm=layer.parallel and len(layer.norms) == 1,
        bias=attention.linears[-1].bias,
        attn_bias=attention.linears[0].bias,
        lm_head_bias=model.head.bias,
        norm_class_name="LayerNorm" if layer.norms[0].kind == "layer" else "RMSNorm",
        norm_qk=bool(attention.norms),
        post_attention_norm=len(layer.norms) == 4,
        post_mlp_norm=len(layer.norms) == 4,
        mlp_class_name=names[mlp.gated],
        gelu_approximate="tanh" if "tanh" in mlp.activation else "none",
        intermediate_size=mlp.width,
        scale_embeddings=model.model_type.startswith("gemma"),
        sliding_window_size=next((each for each in windows if each), None),
        sliding_window_indices=[int(bool(each)) for each in windows] if any(windows) else None,
        attention_logit_softcapping=attention.softcap,
        final_logit_softcapping=model.logit_softcap,
        lora_r=run.r if job.targets else 0,
        lora_alpha=16,
        lora_dropout=run.lora_dropout,
        **adapted,
    )


def traced(line: Line) -> int:
    """Live bytes at the peak of LitGPT's code on fake tensors, loading left out."""
    return live_peak(_events(job_of(line)))


def _events(job: ResolvedRun) -> list[Any]:
    import torch
    from litgpt.lora import GPT, mark_only_lora_as_trainable
    from torch._subclasses.fake_tensor import FakeTensorMode

    from whichlora.tracer.like_cuda import Device, like_cuda
    from whichlora.tracer.recorder import Recorder

    run, trains_base = job.run, job.method.trains_base
    precision = _precision(run)
    with ExitStack() as patches:
        patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        patches.enter_context(like_cuda(Device(compute_capability="8.0")))
        with precision.module_init_context():
            model = GPT(lit_config(job))
        if not trains_base:
            mark_only_lora_as_trainable(model)
        precision.convert_module(model)
        model.max_seq_length = run.seq_len  # makes the rotary tables anew
        layers = [(f"transformer.h.{i}", layer) for i, layer in enumerate(model.transformer.h)]
        recorder = Recorder(layers, run)
        recorder.note_loaded(model)
        recorder.watch(model)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=True)
        with recorder:
            _fit(model, optimizer, precision, run, chunks=not trains_base)
        recorder.close()
    return recorder.events


def _precision(run: RunConfig) -> Any:
    from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision

    if run.precision == "bf16-pure":
        return HalfPrecision("bf16-true")
    return MixedPrecision("bf16-mixed", "cpu") if run.precision == "bf16" else Precision()


def _fit(model: Any, optimizer: Any, precision: Any, run: RunConfig, *, chunks: bool) -> None:
    """The lines of `fit` that hold tensors, for two optimizer steps."""
    import torch
    from litgpt.utils import chunked_cross_entropy

    def call(input_ids: Any, **settings: Any) -> Any:
        """`_FabricModule.forward` of lightning/fabric/wrappers.py."""
        with precision.forward_context():
            output = model(input_ids, **settings)
        return precision.convert_output(output)

    for iter_num in range(1, 2 * run.gradient_accumulation_steps + 1):
        input_ids = torch.ones((run.batch_size, run.seq_len), dtype=torch.int64)
        targets = torch.ones_like(input_ids)
        if chunks:
            logits = call(input_ids, lm_head_chunk_size=128)
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, targets[..., 1:])
        else:
            logits = call(input_ids)
            loss = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])
        (loss / run.gradient_accumulation_steps).backward()
        if iter_num % run.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


_RUNS = DrawnRuns(
    records=RECORDS,
    page=Path(),
    kind="method",
    text="",
    draw=draw,
    predicted=predicted,
    traced=traced,
)

if __name__ == "__main__":
    _RUNS.main(__doc__)
