"""Trace drawn trainings of encoder-decoders whose source and target have lengths of their own.

`python benchmarks/seq2seq_traces.py` prints the errors of the peak by class; `--write` writes
docs/accuracy/seq2seq.md. `--draw 40` traces as many runs anew, each the real class of transformers
on fake tensors with `labels` of another length than `input_ids`. `--first 1000` draws others. A
drawn run that is refused is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_records import DrawnRuns, first_accepted, live_bytes, traced_peak

from whichlora import families
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

GPU = find_gpu("a100-sxm-80gb")
_T5 = {
    "d_model": 768,
    "d_ff": 2048,
    "d_kv": 64,
    "num_heads": 12,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}
_BART = {
    "d_model": 768,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_LARGE = {
    **_BART,
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "scale_embedding": True,
}
# Sizes of published checkpoints; depths are drawn.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "t5": {  # T5-base
        **_T5,
        "d_ff": 3072,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    "flan-t5": {**_T5, "model_type": "t5"},  # flan-T5-base
    "mt5": {**_T5, "vocab_size": 250112},  # mT5-base
    "umt5": {**_T5, "vocab_size": 256384},  # UMT5-base
    "bart": _BART,  # BART-base
    "mbart": {  # mBART-large
        **_LARGE,
        "vocab_size": 250027,
    },
    "pegasus": {  # Pegasus-large
        **_LARGE,
        "vocab_size": 96103,
        "activation_function": "relu",
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "m2m_100": {  # M2M-100-418M
        **_LARGE,
        "vocab_size": 128112,
        "activation_function": "relu",
    },
    "led": {  # LED-base, with half of its window
        **_BART,
        "max_encoder_position_embeddings": 16384,
        "max_decoder_position_embeddings": 1024,
        "attention_window": 256,
    },
    "longt5": {**_T5, "encoder_attention_type": "local"},  # LongT5-local-base
    "longt5-global": {**_T5, "model_type": "longt5", "encoder_attention_type": "transient-global"},
}
LENGTHS = (32, 64, 128, 256, 512, 1024)


def config_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the record's class with as many layers as were traced."""
    known = CONFIGS[line["run"]["model"]]
    depths = {"num_layers": line["encoder"], "num_decoder_layers": line["decoder"]}
    if "encoder_ffn_dim" in known:
        depths = {"encoder_layers": line["encoder"], "decoder_layers": line["decoder"]}
    vocab = line.get("vocab") or known["vocab_size"]
    return {"model_type": line["run"]["model"], **known, **depths, "vocab_size": vocab}


def job_of(line: Mapping[str, Any]) -> ResolvedRun:
    model = families.build(config_of(line), name="drawn")
    return resolve(model, RunConfig.from_dict(line["run"]), GPU)


def predicted(line: Mapping[str, Any]) -> int:
    """Live bytes at the peak, as the ledger has them."""
    return max(live_bytes(job_of(line)).values())


def traced(line: Mapping[str, Any]) -> int:
    """The same of the real class on fake tensors."""
    return traced_peak(job_of(line), config_of(line))


def draw(seed: int) -> tuple[dict[str, Any], int]:
    """A run, and how many drawn before it were refused."""
    rng = random.Random(f"seq2seq {seed}")
    names = list(CONFIGS)

    def propose() -> dict[str, Any]:
        method = rng.choice(("full", "lora", "lora", "qlora", "qlora", "dora"))
        wide = method == "full" and rng.random() < 0.4
        source, target = rng.sample(LENGTHS, 2)
        run = RunConfig(
            model=names[seed % len(names)],  # as many of each
            method=method,
            r=rng.choice((8, 16, 64)),
            lora_dropout=rng.choice((0.0, 0.0, 0.05)),
            batch_size=rng.choice((1, 2, 4, 8)),
            seq_len=source,
            target_len=target,
            precision="bf16" if wide else rng.choice(("bf16", "bf16", "bf16-pure", "fp32")),
            base_dtype="float32" if wide else "auto",
            gradient_checkpointing=rng.random() < 0.5,
            gradient_accumulation_steps=rng.choice((1, 1, 2)),
            target_modules=rng.choice((("all-linear",), ("attention",))),
        )
        depths = {side: rng.choice((2, 3, 4)) for side in ("encoder", "decoder")}
        vocab = rng.choice((0, 4096))  # so few that the peak is no longer at the loss
        return {**depths, "vocab": vocab, "run": run.chosen()}

    return first_accepted(propose, predicted)


TEXT = (
    "# Peak memory of encoder-decoders with two lengths, against traces\n\n"
    "Made by `benchmarks/seq2seq_traces.py --write`. Runs are drawn with a seed: method, rank, "
    "batch, `seq_len` and `target_len` from 32 to 1024 and never equal, precision, "
    "dropout, checkpointing, accumulation, a smaller vocabulary. The real classes run on fake "
    "tensors, in two to four layers on each side at the widths of published models. The ledger "
    "predicts the peak of live bytes. Formulas were finished on seeds below 1000; the others were "
    "drawn after."
)
RUNS = DrawnRuns(
    records=Path(__file__).parent / "traces" / "seq2seq.jsonl",
    page=Path(__file__).parents[1] / "docs" / "accuracy" / "seq2seq.md",
    kind="model",
    text=TEXT,
    draw=draw,
    predicted=predicted,
    traced=traced,
)

if __name__ == "__main__":
    RUNS.main(__doc__)
