"""One rank of `benchmarks/zero_requests.py`: what two steps under ZeRO ask of the allocator.

DeepSpeed runs as the Trainer and accelerate run it, on a CPU with gloo.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import gloo_worker
import oracle_memory as oracle
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whichlora.memory.allocator_simulator import SMALL_BYTES, Requests, rounded
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.run import RunConfig

_STEPS = 2


class Recorder(TorchDispatchMode):
    """Writes births and deaths of large storages down; those before `start` are not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Requests = []
        self._live: dict[int, tuple[Any, int]] = {}
        self._before: dict[int, Any] = {}

    def start(self) -> None:
        gc.collect()
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
                storage = candidate.untyped_storage()
                self._before[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key in [key for key, (ref, _) in self._live.items() if ref.expired()]:
            self.requests.append((self._live.pop(key)[1], None))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, number = storage._cdata, len(self.requests)
        before = self._before.get(key)
        if key in self._live or (before is not None and not before.expired()):
            return
        if storage.nbytes() > SMALL_BYTES:
            self._live[key] = StorageWeakRef(storage), number
            self.requests.append((number, rounded(storage.nbytes())))


def _requests(config: dict[str, Any], run: RunConfig) -> Requests:
    import deepspeed

    alone = dataclasses.replace(run, parallel=ONE_GPU)
    model = oracle.load(oracle.Case("llama", alone, config))
    model.config.use_cache = False
    if run.gradient_checkpointing:
        if run.method != "full":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(gloo_worker._parameter_groups(model), lr=1e-4)
    settings = gloo_worker._deepspeed_config(run, model.config.hidden_size)
    if run.parallel.strategy == "zero3":
        from deepspeed.runtime.zero.linear import zero3_linear_wrap

        # as `from_pretrained` leaves it, which makes the model within `zero.Init`
        torch.nn.functional.linear = zero3_linear_wrap
        if run.method != "full":
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    batch = gloo_worker._batch(run, config["vocab_size"], model.config)
    del model, optimizer
    engine.train()
    recorder = Recorder()
    recorder.start()
    with recorder:
        for _ in range(_STEPS):
            for left in range(run.gradient_accumulation_steps, 0, -1):
                engine.set_gradient_accumulation_boundary(left == 1)
                loss = engine(**batch).loss
                engine.backward(loss)
                del loss
            engine.step()
    engine.destroy()
    return recorder.requests


def _rank(root: Path) -> None:
    cases = json.loads((root / "cases.json").read_text())
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.torch

    # it compiles an operator in shared memory first, which gloo does without
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    requests: list[Requests] = []
    for fields in cases["runs"]:
        requests.append(_requests(cases["config"], RunConfig.from_dict(fields)))
        gc.collect()
        torch.distributed.barrier()
        print(fields, file=sys.stderr, flush=True)
    (root / f"rank{os.environ['RANK']}.json").write_text(json.dumps(requests))
    os._exit(0)  # gloo's threads take long to end


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
