"""Count what the kernels of traced runs compute and move, beside the counts of the time model.

`python benchmarks/work_traces.py` prints the errors of the work of one step by method; `--write`
writes docs/accuracy/work.md. `--trace` counts the runs anew: those of traces/methods.jsonl, and
drawn ones of LoRA, DoRA, their quantised forms and full fine-tuning. The real code runs on fake
tensors; every operator is one kernel, which reads its inputs and writes its results.
`--only dora` prints every run of a method; with `--trace`, what its operators move.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import method_traces
import trainer_traces
from markdown_tables import markdown_table, median_and_worst
from trace_records import Line, read

from whichlora.predict.quantities import training_step
from whichlora.predict.rank_time import work_of_step
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    import torch

TRACES = Path(__file__).parent / "traces"
RECORDS = TRACES / "work.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "accuracy" / "work.md"
QUANTITIES = {"flops": "products", "bytes": "bytes moved", "kernels": "kernels"}
DRAWN = ("full", "lora", "dora", "qlora", "qdora")
NUM_DRAWN = 60
MOST_RANK = 32
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
# Operators that make a view, or a tensor without writing it.
_NO_KERNEL = ("_reshape_alias", "_unsafe_view", "alias", "detach", "empty", "empty_like")
_NO_KERNEL += ("empty_strided", "lift_fresh", "new_empty", "new_empty_strided")
# Operators that read of a table what they write.
_GATHERING = ("embedding", "gather", "index", "index_select", "nll_loss_forward")


@dataclass
class Counted:
    """What the kernels of one forward and backward do.

    Args:
        is_thin: whether a product, by its name and its factors, is bound by what it moves.
        operators: by moment and name: how many there are, and the bytes that they move.
        peak_bytes: the most that lives at once, weights included.
    """

    is_thin: Callable[[str, Any], bool]
    products: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    operators: dict[tuple[str, str], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )
    peak_bytes: int = 0

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, moment: str) -> None:
        """One operator."""
        import torch

        name = func.overloadpacket.__name__
        leaves = torch.utils._pytree.tree_leaves
        inputs = [x for x in leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        results = [x for x in leaves(result) if isinstance(x, torch.Tensor)]
        if name in _NO_KERNEL or func.namespace not in ("aten", "bitsandbytes") or func.is_view:
            return
        if not results or (not func._schema.is_mutable and _is_alias(inputs, results)):
            return
        if name == "copy_":
            inputs = inputs[1:]  # the first is written over
        moved = 0
        if name in _PRODUCTS:
            self.products[moment] += _product_flops(name, args)
            if self.is_thin(name, args):
                moved = sum(map(_num_bytes, inputs)) + sum(map(_num_bytes, results))
        elif name in _GATHERING:
            moved = 2 * sum(map(_num_bytes, results[:1]))
        elif name == "nll_loss_backward":
            moved = sum(map(_num_bytes, results))
        elif "scaled_dot_product" not in name and func.namespace == "aten":
            moved = sum(map(_num_bytes, inputs)) + sum(map(_num_bytes, results))
        found = self.operators[moment, name]
        found[0] += 1
        found[1] += moved


def _is_alias(inputs: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    held = {x.untyped_storage()._cdata for x in inputs}
    return all(x.untyped_storage()._cdata in held for x in results)


def _num_bytes(x: torch.Tensor) -> int:
    """Of an expanded tensor those that exist."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _product_flops(name: str, args: Any) -> int:
    if name == "convolution":
        return 0
    if name == "_grouped_mm":  # rows by the matrix of their group, or a group's rows by each other
        return int(2 * args[0].numel() * args[1].shape[-1])
    first, second = args[-2:] if name in ("addmm", "baddbmm") else args[:2]
    return int(2 * first.numel() * second.shape[-1])


def _is_thin(name: str, args: Any) -> bool:
    """Whether a side is a rank, so that the product is bound by what it reads and writes."""
    if name not in ("mm", "addmm", "bmm"):
        return False
    first, second = args[-2:]
    return min(*first.shape[-2:], second.shape[-1]) <= MOST_RANK


def forwards(
    job: ResolvedRun,
    config: dict[str, Any],
    *,
    notes: Callable[[Any], bool],
    is_thin: Callable[[str, Any], bool],
    **device: Any,
) -> dict[int, Counted]:
    """What the operators of a trace do, by the forward of the model that they are in or follow.

    Args:
        notes: whether an operator that the recorder is at counts.
        is_thin: as of `Counted`.
        device: what `trace` takes of the device.
    """
    from whichlora.tracer.recorder import Recorder
    from whichlora.tracer.trace import trace

    found: dict[int, Counted] = defaultdict(lambda: Counted(is_thin))
    dispatch, birth, death = (
        Recorder.__torch_dispatch__, Recorder._write_birth, Recorder._write_death,
    )  # fmt: skip
    sizes: dict[int, int] = {}
    live_bytes = 0

    def counting(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(self, func, types, args, kwargs)
        if notes(self):
            found[self._num_forwards].note(func, args, kwargs, result, self._place()[1])
        return result

    def born(self: Any, num_bytes: int, *args: Any) -> int:
        nonlocal live_bytes
        number = birth(self, num_bytes, *args)
        sizes[number] = num_bytes
        live_bytes += num_bytes
        if self._num_forwards:
            during = found[self._num_forwards]
            during.peak_bytes = max(during.peak_bytes, live_bytes)
        return number

    def died(self: Any, number: int, *args: Any) -> None:
        nonlocal live_bytes
        death(self, number, *args)
        live_bytes -= sizes.pop(number, 0)

    watched = {"__torch_dispatch__": counting, "_write_birth": born, "_write_death": died}
    with mock.patch.multiple(Recorder, **watched):
        trace(job.run, config, target_modules=job.peft_targets, **device)
    return found


def counted(job: ResolvedRun, config: dict[str, Any]) -> Counted:
    """The last step of a trace, its optimizer left out."""

    def notes(recorder: Any) -> bool:
        _, moment = recorder._place()
        return moment == "backward" or bool(moment == "forward" and recorder._in_model)

    steps = forwards(job, config, notes=notes, is_thin=_is_thin)
    return steps[max(steps)]


def traced(line: Line) -> Line:
    """Counts of one run, forward and backward."""
    found = counted(trainer_traces.job_of(line), trainer_traces.config_of(line))
    numbers = {"flops": [found.products["forward"], found.products["backward"]]}
    for place, name in enumerate(("kernels", "bytes")):
        numbers[name] = [
            sum(value[place] for (when, _), value in found.operators.items() if when == moment)
            for moment in ("forward", "backward")
        ]
    return {name: line[name] for name in ("layers", "run")} | {"traced": numbers}


def predicted(line: Line) -> dict[str, float]:
    """The same of both together, as the time model counts them."""
    job = trainer_traces.job_of(line)
    # a trace does not tell what a cache holds
    without_cache = replace(job, gpu=replace(job.gpu, l2_bytes=None))
    found = work_of_step(training_step(without_cache))
    return {
        "flops": found.product_flops + found.wide_product_flops,
        "bytes": found.elementwise_bytes,
        "kernels": found.launches + found.autograd_launches,
    }


def lines() -> Iterator[Line]:
    """The runs: of methods those that are kept for memory, of one micro-step."""
    for line in read(TRACES / "methods.jsonl"):
        run = line["run"]
        if run["gradient_accumulation_steps"] == 1 and run["model"] != method_traces.T5:
            yield line
    for seed in range(NUM_DRAWN):
        yield draw(seed)


def draw(seed: int) -> Line:
    rng = random.Random(f"work {seed}")
    run = RunConfig(
        model=rng.choice(method_traces.MODELS[:-1]),
        method=DRAWN[seed % len(DRAWN)],
        r=rng.choice((8, 16, 32)),
        lora_dropout=rng.choice((0.0, 0.0, 0.05)),
        target_modules=rng.choice((("all-linear",), ("attention",))),
        batch_size=rng.choice((1, 2, 4)),
        seq_len=rng.choice((256, 512, 1024)),
        precision=rng.choice(("bf16", "bf16-no-autocast", "bf16-pure", "fp32")),
        gradient_checkpointing=rng.random() < 0.5,
    )
    return {"layers": rng.choice((2, 3)), "run": run.to_dict()}


def errors(line: Line) -> dict[str, float]:
    """Relative errors of one record."""
    ours = predicted(line)
    quantised = trainer_traces.job_of(line).run.quant != "none"
    names = [name for name in QUANTITIES if not (quantised and name != "bytes")]
    return {name: ours[name] / sum(line["traced"][name]) - 1 for name in names}


TEXT = """# Work of a training step, against traces

Made by `benchmarks/work_traces.py --write`. The real code of Transformers, PEFT and bitsandbytes
runs on fake tensors, in two to four layers of a model's real width; every operator is a kernel that
reads its inputs and writes its results. Runs are those of [methods.md](methods.md) with one
micro-step, and drawn ones of LoRA, DoRA, their quantised forms and full fine-tuning.

- products: multiplications and additions of matrices, of runs whose base is not quantised (kernels
  of bitsandbytes multiply without an operator of their own);
- bytes moved: what all other kernels read and write, expansions of quantised weights left out
  (`dequant_bytes`), and products of which a side is a rank of 32
  or less, which are bound by their bytes;
- kernels: forward and backward.

"""


def page() -> str:
    return TEXT + table() + "\n"


def table() -> str:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for line in read(RECORDS):
        found[line["run"]["method"]].append(errors(line))
    rows = [_row("**all**", [one for each in found.values() for one in each])]
    rows += [_row(method, found[method]) for method in sorted(found)]
    header = [title for name in QUANTITIES.values() for title in (name, "worst")]
    return markdown_table(("method", "runs", *header), rows)


def _row(name: str, found: list[dict[str, float]]) -> tuple[str, ...]:
    cells = [name, str(len(found))]
    for quantity in QUANTITIES:
        sizes = [one[quantity] for one in found if quantity in one]
        if not sizes:
            cells += ["-", "-"]
            continue
        cells += median_and_worst(sizes)
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--only", metavar="METHOD")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.trace and not arguments.only:
        with RECORDS.open("w", encoding="utf-8") as file, ProcessPoolExecutor(2) as pool:
            for line in pool.map(_traced_or_not, lines()):
                if line is not None:
                    print(json.dumps(line), file=file, flush=True)
    if arguments.only:
        for line in read(RECORDS):
            run = line["run"]
            if run["method"] == arguments.only:
                shown = {name: f"{100 * size:+.1f} %" for name, size in errors(line).items()}
                what = ("model", "precision", "quant", "gradient_checkpointing", "lora_dropout")
                print(*(run[key] for key in what), line["layers"], shown, line["traced"])
        return
    if arguments.write:
        PAGE.write_text(page(), encoding="utf-8")
    print(table())


def _traced_or_not(line: Line) -> Line | None:
    try:
        return traced(line)
    except Exception as error:
        print(line["run"]["model"], line["run"]["method"], repr(error)[:150])
        return None


if __name__ == "__main__":
    main()
