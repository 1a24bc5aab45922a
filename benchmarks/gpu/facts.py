"""What a CUDA process takes beside its tensors; prints one JSON object.

Run as a program of its own: a context is created once per process.
"""

import json
import threading

import pynvml
import torch


def device_used_bytes() -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
idle = device_used_bytes()
torch.cuda.init()
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
reserved = torch.cuda.memory_reserved()
context = device_used_bytes() - idle - reserved
free, total = torch.cuda.mem_get_info()


def product() -> None:
    one = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (one @ one).sum().backward()


before = torch.cuda.memory_allocated()
with torch.no_grad():
    square = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    square @ square
    del square
forward_workspace = torch.cuda.memory_allocated() - before
product()
training_workspace = torch.cuda.memory_allocated() - before
thread = threading.Thread(target=product)
thread.start()
thread.join()
other_thread_workspace = torch.cuda.memory_allocated() - before
torch.cuda.synchronize()
torch.cuda.empty_cache()
loaded = device_used_bytes() - idle - torch.cuda.memory_reserved()
properties = torch.cuda.get_device_properties(0)
print(
    json.dumps(
        {
            "device": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "total_bytes": total,
            "nvml_total_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            "num_multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "used_idle_bytes": idle,
            "free_with_context_bytes": free,
            "context_bytes": context,
            "context_after_products_bytes": loaded,
            "forward_workspace_bytes": forward_workspace,
            "training_workspace_bytes": training_workspace,
            "second_thread_workspace_bytes": other_thread_workspace,
        }
    )
)
