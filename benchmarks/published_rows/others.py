"""Sources of one table each, and those that nothing can be compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from published_rows.cells import A100, Found, Line, Quantity, rounding_of, whole
from published_rows.models import model_of
from whichlora.specs import RunConfig


def fsdp_qlora(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    assert spec is not None
    moment = row["mem_counter"]
    moments: dict[str, Quantity] = {
        "memory_allocated after forward": "allocated_after_forward",
        "max_memory_allocated over forward+backward": "peak_allocated",
    }
    if moment not in moments or row["phase"] == "inference":
        reason = "weights alone, or gradients alone" if row["phase"] == "finetune" else "no_grad"
        yield line.left_out("memory", f"{reason}: after {moment.rpartition('after ')[2]}")
        return
    run = RunConfig(
        model=spec.name,
        method=row["method"],
        r=8,
        lora_dropout=0.1 if row["method"] != "full" else 0.0,
        target_modules=("q_proj", "v_proj"),
        seq_len=whole(row["seq_len"]),
        precision="bf16-pure",
        quant="nf4" if row["quant"] == "nf4" else "none",
        prepare_kbit=False,
        gradient_checkpointing=row["grad_ckpt"] == "True",
        use_reentrant=False,
        optimizer="sgd",  # none runs
        loss_head="raw",
        libraries=(("bitsandbytes", "0.42.0"), ("torch", "2.1.2"), ("transformers", "4.37.2")),
    )
    yield from line.memory(spec, run, A100, moments[moment])


def glm4(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    if spec is None:
        yield line.left_out("run", "architecture neither in the database nor stated")
        return
    prompt = whole(row["prefill_len"])
    run = RunConfig(
        model=spec.name, phase="inference", prompt_len=prompt, max_new_tokens=1, attn="sdpa"
    )
    gpu = "h100-sxm-80gb"
    yield from line.memory(spec, run, gpu, "perhaps_device_used")
    value = float(row["time_value"])
    if row["time_unit"] == "s prefill":
        yield line.observed(
            spec, run, gpu, "prefill_s", value, rounding=rounding_of(row["time_value"])
        )
    else:
        yield line.left_out("time", "number of decoded tokens not stated")


def torchtune(line: Line) -> Iterator[Found]:
    row = line.row
    if "in backward" in row["optimizer"]:
        yield line.left_out("run", "optimizer fused into the backward pass")
    elif not row["seq_len"]:
        yield line.left_out("run", "length of the longest sample not stated")
    else:
        yield line.left_out("run", "torchtune's own model code, checkpointing per row not stated")


def not_ours(reason: str) -> Callable[[Line], Iterator[Found]]:
    def one(line: Line) -> Iterator[Found]:
        yield line.left_out("run", reason)

    return one
