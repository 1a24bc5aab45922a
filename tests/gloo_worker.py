"""One rank of `gloo_ranks.py`: it trains small models and counts the live tensor bytes of a step.

DistributedDataParallel and DeepSpeed's ZeRO run as the Trainer and accelerate run them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oracle_memory as oracle
import torch
import torch.distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.trainer import Trainer

from whichlora.predict.resolve import layout_of
from whichlora.profiler.images import image_fields
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.run import RunConfig

Reading = dict[str, Any]


class LiveStorages(TorchDispatchMode):
    """Live CPU storages: what Python holds at the start, and what operators make since.

    Storages that are marked as the host's are counted apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, tuple[Any, int]] = {}
        self._host: dict[int, Any] = {}
        self._ignored: dict[int, Any] = {}
        self._upper = 0
        self.peak = 0
        self.at_peak: list[tuple[int, str]] = []
        self._names: dict[int, str] = {}
        self._keeps_names = bool(os.environ.get("NAME_STORAGES"))

    def mark_host(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def ignore_live(self) -> None:
        """What earlier cases have left is not counted: DeepSpeed keeps modules in globals."""
        gc.collect()
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
                storage = candidate.untyped_storage()
                self._ignored[storage._cdata] = StorageWeakRef(storage)

    def scan(self) -> None:
        gc.collect()
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
                self._add(candidate, "before")
        self._forget_dead()

    def _add(self, tensor: Any, name: str) -> None:
        if tensor.device.type != "cpu" or type(tensor).__name__ == "FakeTensor":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        ref = self._of.get(key)
        if ref is not None and not ref[0].expired():
            return
        for apart in (self._host.get(key), self._ignored.get(key)):
            if apart is not None and not apart.expired():
                return
        self._upper += storage.nbytes() - (ref[1] if ref else 0)
        self._of[key] = (StorageWeakRef(storage), storage.nbytes())
        if self._keeps_names:
            self._names[key] = f"{name} {str(tensor.dtype)[6:]} {tuple(tensor.shape)}"

    def _forget_dead(self) -> None:
        for key in [key for key, (ref, _) in self._of.items() if ref.expired()]:
            del self._of[key]
        self._host = {key: ref for key, ref in self._host.items() if not ref.expired()}
        for key in self._host.keys() & self._of.keys():
            del self._of[key]
        self._upper = sum(size for _, size in self._of.values())

    def live(self) -> int:
        self._forget_dead()
        return self._upper

    def host(self) -> int:
        self._forget_dead()
        storages = [
            torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._host.values()
        ]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def start_moment(self) -> None:
        self.peak = self.live()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, str(func))
        if self._upper > self.peak and self.live() > self.peak:
            self.peak = self._upper
            if self._keeps_names:
                self.at_peak = sorted(
                    ((size, self._names.get(key, "?")) for key, (_, size) in self._of.items()),
                    reverse=True,
                )
        return result


def _deepspeed_config(run: Any, hidden_size: int) -> dict[str, Any]:
    """The strategy's own file, as `trainer_config_finalize` of transformers fills it in."""
    layout = layout_of(run)
    assert layout is not None
    ((strategy, spread),) = layout.strategies
    config = dict(strategy.training_arguments(run, spread)["deepspeed"])
    zero = dict(config["zero_optimization"])
    filled = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for name, value in filled.items():
        if zero.get(name) == "auto":
            zero[name] = value
    return config | {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": run.batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,  # its CPU Adam would be compiled
        "steps_per_print": 10**9,
    }


def _parameter_groups(model: Any) -> list[dict[str, Any]]:
    """As `Trainer.create_optimizer`: norms and biases do not decay."""
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decaying], "weight_decay": 0.0},
        {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _batch(run: Any, vocab: int, config: Any) -> dict[str, Any]:
    ids = torch.randint(3, vocab, (run.batch_size, run.seq_len))
    fields = image_fields(config, run, ids) if run.images else {"input_ids": ids}
    return fields | {"attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _reading(case: Mapping[str, Any]) -> Reading:
    run = RunConfig.from_dict({"model": case["family"]} | case["run"])
    alone = dataclasses.replace(run, parallel=ONE_GPU)
    config = (oracle.CONFIGS | oracle.IMAGE_CONFIGS)[case["family"]] | case["config"]
    recorder = LiveStorages()
    recorder.ignore_live()
    model = oracle.load(oracle.Case(case["family"], alone, config))
    model.config.use_cache = False
    if run.gradient_checkpointing:
        if run.method != "full":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    is_zero = run.parallel.strategy.startswith("zero")
    optimizers = {
        "adamw_torch": lambda groups: torch.optim.AdamW(groups, lr=1e-4),
        "adamw_torch_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-4, fused=True),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-4),
    }
    optimizer = optimizers[run.optimizer](_parameter_groups(model))
    if is_zero:
        steps = _zero_steps(run, model, optimizer, recorder)
    else:
        steps = _ddp_steps(run, model, optimizer, recorder)
    of_model = model.config
    del model, optimizer
    batches = [_batch(run, oracle.VOCAB, of_model) for _ in range(run.gradient_accumulation_steps)]
    ahead = _batch(run, oracle.VOCAB, of_model) if run.images else None  # as a DataLoader reads it
    for batch in batches:
        batch["labels"] = batch["labels"].clone()
    reading = steps(batches)
    del ahead
    return reading


def _zero_steps(run: Any, model: Any, optimizer: Any, recorder: Any) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    hidden_size = model.config.get_text_config().hidden_size
    config = _deepspeed_config(run, hidden_size)
    accelerator = get_accelerator()
    pin = type(accelerator).pin_memory
    accelerator.pin_memory = lambda tensor, *a, **k: recorder.mark_host(  # type: ignore[method-assign]
        pin(accelerator, tensor, *a, **k)
    )
    if run.parallel.strategy == "zero3":
        # as `from_pretrained` leaves it, which makes the model within `zero.Init`
        torch.nn.functional.linear = zero3_linear_wrap
        if run.method not in ("full", "qlora"):  # then adapters are cast no more
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    _mark_offloaded(engine, dict(run.parallel.options).get("offload", ()), recorder)
    offloads = "optimizer" in dict(run.parallel.options).get("offload", ())

    def steps(batches: list[Any]) -> Reading:
        reading: Reading = {}
        engine.train()
        for number in range(3):
            if offloads:
                for state in engine.optimizer.optimizer.state.values():
                    for value in state.values():
                        if hasattr(value, "untyped_storage"):
                            recorder.mark_host(value)
            measured = number == 2
            if measured:
                recorder.scan()
                reading["rest"] = recorder.live()
                reading["host"] = recorder.host()
                recorder.__enter__()
            try:
                for index, batch in enumerate(batches):
                    is_last = index == len(batches) - 1
                    engine.set_gradient_accumulation_boundary(is_last)
                    recorder.start_moment()
                    loss = engine(**batch).loss
                    _note(reading, "forward", recorder)
                    recorder.start_moment()
                    engine.backward(loss)
                    _note(reading, "backward", recorder)
                    reading["after_backward"] = recorder.live() if measured else 0
                    del loss
                recorder.start_moment()
                engine.step()
                _note(reading, "step", recorder)
            finally:
                if measured:
                    recorder.__exit__(None, None, None)
        engine.destroy()
        if offloads:  # the host's own update
            del reading["step"]
        return reading

    return steps


def _mark_offloaded(engine: Any, offload: Any, recorder: Any) -> None:
    """A CPU cannot tell its own memory from the host's: name what a GPU's run has on the host."""
    optimizer = engine.optimizer
    if "optimizer" in offload:
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            for partition in getattr(optimizer, name, []):
                recorder.mark_host(partition)
                if partition.grad is not None:
                    recorder.mark_host(partition.grad)
    if "params" in offload:
        for parameter in engine.module.parameters():
            recorder.mark_host(parameter.ds_tensor)


def _ddp_steps(run: Any, model: Any, optimizer: Any, recorder: Any) -> Any:
    options = dict(run.parallel.options)
    is_full = run.method == "full"
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=bool(options.get("gradient_as_bucket_view", False)),
        # as the Trainer does it: not all of LLaVA's tower has a gradient
        find_unused_parameters=bool(run.images) and not (is_full and run.gradient_checkpointing),
    )
    autocasts = run.precision in ("bf16", "fp16")

    def steps(batches: list[Any]) -> Reading:
        reading: Reading = {}
        for number in range(3):
            measured = number == 2
            if number == 1:  # C++ holds the reducer's buckets: writing them shows them
                recorder.__enter__()
            if measured:
                recorder.scan()
                reading.clear()
                reading["rest"] = recorder.live()
            try:
                for index, batch in enumerate(batches):
                    is_last = index == len(batches) - 1
                    recorder.start_moment()
                    with contextlib.nullcontext() if is_last else wrapped.no_sync():
                        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                            loss = wrapped(**batch).loss
                        _note(reading, "forward", recorder)
                        recorder.start_moment()
                        loss.backward()
                    _note(reading, "backward", recorder)
                    reading["after_backward"] = recorder.live() if measured else 0
                    del loss
                recorder.start_moment()
                parameters = [p for p in wrapped.parameters() if p.requires_grad]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                _note(reading, "step", recorder)
                optimizer.zero_grad()
            finally:
                if measured:
                    recorder.__exit__(None, None, None)
        return reading

    return steps


def _note(reading: Reading, moment: str, recorder: Any) -> None:
    reading[moment] = max(reading.get(moment, 0), recorder.peak)
    if os.environ.get("NAME_STORAGES") and os.environ["RANK"] == os.environ["NAME_STORAGES"]:
        print(f"--- {moment} {recorder.peak}", file=sys.stderr)
        for size, name in recorder.at_peak[:60]:
            print(size, name, file=sys.stderr)


def _rank(root: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((root / "cases.json").read_text())
    if any(case["run"]["parallel"]["strategy"].startswith("zero") for case in cases):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.comm.torch

        # it compiles an operator in shared memory first, which gloo does without
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        torch.distributed.init_process_group("gloo")
    answers: list[Reading] = []
    for case in cases:
        torch.manual_seed(0)
        if os.environ.get("NAME_STORAGES"):
            print("=== CASE", json.dumps(case["run"]), file=sys.stderr)
        try:
            answers.append(_reading(case))
        except Exception as error:  # what the libraries refuse is a reading, too
            if os.environ.get("NAME_STORAGES"):
                traceback.print_exc()
            answers.append({"error": f"{type(error).__name__}: {error}"[:300]})
        gc.collect()
        torch.distributed.barrier()
        print(len(answers), "of", len(cases), answers[-1], file=sys.stderr, flush=True)
    (root / f"rank{os.environ['RANK']}.json").write_text(json.dumps(answers))
    os._exit(0)  # gloo's threads take long to end


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
