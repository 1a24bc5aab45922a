"""NeuSight: one step in fp32 on nine accelerators, without memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from published_rows.cells import Found, Line, Quantity, whole
from whichlora import families
from whichlora.architecture import ModelSpec
from whichlora.specs import RunConfig

_NEUSIGHT_GPUS = {
    "AMD Instinct MI100": "mi100-32gb",
    "AMD Instinct MI210": "mi210-64gb",
    "AMD Instinct MI250": "mi250x-gcd-64gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA L4": "l4-24gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4-8gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
}


@cache
def _neusight_model(
    name: str, kind: str, hidden: int, layers: int, heads: int, ffn: int, vocab: int
) -> ModelSpec:
    sizes = {"vocab_size": vocab, "torch_dtype": "float32"}
    if kind == "gpt2":
        sizes |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn}
        sizes |= {"n_positions": 2048}
    else:
        sizes |= {"hidden_size": hidden, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "max_position_embeddings": 2048}
        sizes |= {"ffn_dim": ffn, "word_embed_proj_dim": hidden} if kind == "opt" else {}
        sizes |= {"intermediate_size": ffn} if kind == "bert" else {}
    return families.build({"model_type": kind, **sizes}, name=name)


def neusight(line: Line) -> Iterator[Found]:
    row = line.row
    if row["variant"]:
        yield line.left_out("time", "compiled with fused operators")
        return
    if row["model_type"] not in ("bert", "gpt2", "opt"):
        yield line.left_out("time", "switch transformer: experts in a Python loop, 0 layers timed")
        return
    gpu = _NEUSIGHT_GPUS.get(row["gpu"])
    if gpu is None:
        yield line.left_out("time", f"{row['gpu']}: no datasheet facts on file")
        return
    sizes = (whole(row[key]) for key in ("hidden", "layers", "heads", "ffn", "vocab"))
    spec = _neusight_model(row["model"], row["model_type"], *sizes)
    run = RunConfig(
        model=spec.name,
        method="full",
        precision="fp32",
        batch_size=whole(row["batch_size"]),
        seq_len=whole(row["seq_len"]),
        attn="eager",
        gradient_checkpointing=False,
        optimizer="sgd",
        loss_head="raw",
    )
    quantity: Quantity = "forward_s" if row["phase"] == "forward" else "forward_backward_s"
    yield line.observed(spec, run, gpu, quantity, float(row["e2e_ms"]) / 1e3)
