"""What the host of an old vLLM takes for the layers of one eager step, on this machine's CPU.

    python3 -m venv OLD && OLD/bin/pip install vllm==0.6.2 ninja setuptools
    OLD/bin/python benchmarks/eager_host.py none
    OLD/bin/python benchmarks/eager_host.py gptq

The same with 0.4.2. That release's own `Qwen2ForCausalLM` of 28 narrow layers reads one token, with
kernels in C++ that do nothing, so that its Python and torch's dispatcher are left. Needs a C++
compiler and no GPU. `whichlora.serving` has the figures: `EAGER_LAUNCH_S`, `SCRIPTED_TYPE_S`.
"""

from __future__ import annotations

import sys
import time
import types
from statistics import median
from typing import Any

import torch
from torch.utils.cpp_extension import load_inline

LAYERS, HIDDEN, HEAD_DIM, BLOCK = 28, 128, 64, 16
ADDRESS = "tcp://127.0.0.1:29533"
# Signatures are those of each release's csrc.
PYBIND = r"""
#include <torch/extension.h>
using torch::Tensor; using std::string;
void silu(Tensor& o, Tensor& x) {}
void norm(Tensor& o, Tensor& x, Tensor& w, double e) {}
void add_norm(Tensor& x, Tensor& r, Tensor& w, double e) {}
void rotary(Tensor& p, Tensor& q, Tensor& k, int h, Tensor& c, bool n) {}
void store(Tensor& k, Tensor& v, Tensor& kc, Tensor& vc, Tensor& s, const string& d, double a) {}
void attend(Tensor& o, Tensor& e, Tensor& m, Tensor& t, Tensor& q, Tensor& k, Tensor& v, int h,
            double s, Tensor& bt, Tensor& sl, int bs, int ms, const c10::optional<Tensor>& al,
            const string& d, double ks) {}
Tensor marlin(Tensor& a, Tensor& b, Tensor& s, Tensor& g, Tensor& p, Tensor& w, int64_t bits,
              int64_t m, int64_t n, int64_t k, bool full) {
  torch::empty({m, k}, a.options());
  return torch::empty({m, n}, a.options());
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto ops = m.def_submodule("ops"), cache = m.def_submodule("cache_ops");
  ops.def("silu_and_mul", &silu); ops.def("rms_norm", &norm);
  ops.def("fused_add_rms_norm", &add_norm); ops.def("rotary_embedding", &rotary);
  ops.def("paged_attention_v2", &attend); ops.def("gptq_marlin_gemm", &marlin);
  cache.def("reshape_and_cache", &store);
}
"""
DISPATCHED = r"""
#include <torch/library.h>
#include <torch/torch.h>
using torch::Tensor; using std::string;
void silu(Tensor& o, Tensor& x) {}
void norm(Tensor& o, Tensor& x, Tensor& w, double e) {}
void rotary(Tensor& p, Tensor& q, Tensor& k, int64_t h, Tensor& c, bool n) {}
void store(Tensor& k, Tensor& v, Tensor& kc, Tensor& vc, Tensor& s, const string& d, double a,
           double b) {}
void marlin(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 14);
  auto a = args[0].toTensor();
  auto c = torch::empty({args[8].toInt(), args[9].toInt()}, a.options());
  torch::empty({0}, a.options()); torch::empty({64, 256}, torch::kFloat);
  torch::jit::drop(*stack, 14);
  torch::jit::push(*stack, c);
}
TORCH_LIBRARY(_C, m) {
  m.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  m.def("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float e) -> ()");
  m.def("rotary_embedding(Tensor positions, Tensor! query, Tensor! key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox) -> ()");
  m.def("gptq_marlin_gemm(Tensor a, Tensor b_q_weight, Tensor b_scales, Tensor b_zeros, "
        "Tensor g_idx, Tensor perm, Tensor workspace, "
        "__torch__.torch.classes._core_C.ScalarType b_q_type, int size_m, int size_n, "
        "int size_k, bool is_k_full, bool has_zp, bool use_fp32_reduce) -> Tensor");
  m.impl("silu_and_mul", torch::kCPU, &silu);
  m.impl("rms_norm", torch::kCPU, &norm);
  m.impl("fused_add_rms_norm", torch::kCPU, &norm);
  m.impl("rotary_embedding", torch::kCPU, &rotary);
  m.impl("gptq_marlin_gemm", torch::kCPU,
         torch::CppFunction::makeFromBoxedFunction<&marlin>());
}
TORCH_LIBRARY(_C_cache_ops, m) {
  m.def("reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, "
        "Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, float k, float v) -> ()");
  m.impl("reshape_and_cache_flash", torch::kCPU, &store);
}
"""


def attention_that_returns_its_query(name: str) -> None:
    """A module in place of FlashAttention's."""
    module: Any = types.ModuleType(name)
    module.flash_attn_varlen_func = lambda q, k, v, **_: torch.empty_like(q)
    module.flash_attn_with_kvcache = lambda q, *_, **__: torch.empty_like(q)
    sys.modules[name] = module


def of_0_4_2() -> tuple[Any, ...]:
    """Its keys and values, and the metadata of one sequence that decodes."""
    kernels = load_inline("first_kernels", PYBIND, extra_cflags=["-O2"])
    sys.modules["vllm._C"] = kernels
    attention_that_returns_its_query("flash_attn")
    import vllm._custom_ops as ops
    from vllm.attention.backends import flash_attn
    from vllm.attention.backends.abstract import AttentionMetadata

    ops.vllm_ops, ops.vllm_cache_ops = kernels.ops, kernels.cache_ops
    of_stage = flash_attn.FlashAttentionMetadata(
        is_prompt=False,
        seq_lens=[9000],
        seq_lens_tensor=torch.tensor([9000], dtype=torch.int),
        max_query_len=None,
        max_seq_len=9000,
        subquery_start_loc=None,
        seq_start_loc=None,
        context_lens_tensor=torch.tensor([8999], dtype=torch.int),
        use_cuda_graph=False,
        block_tables=torch.zeros(1, 8, dtype=torch.int),
    )
    metadata = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=1,
        prefill_metadata=None,
        decode_metadata=of_stage,
        slot_mapping=torch.zeros(1, dtype=torch.long),
        kv_cache_dtype="auto",
    )
    return flash_attn.FlashAttentionBackend, torch.zeros(2, 4, BLOCK * HEAD_DIM), (metadata,)


def of_0_6_2() -> tuple[Any, ...]:
    """As of `of_0_4_2`; the last None are its intermediate tensors."""
    import vllm._core_C  # noqa: F401 its ScalarType

    load_inline("kernels", DISPATCHED, is_python_module=False, extra_cflags=["-O2"])
    attention_that_returns_its_query("vllm.vllm_flash_attn")
    from vllm.attention.backends import flash_attn

    metadata = flash_attn.FlashAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=1,
        slot_mapping=torch.zeros(1, dtype=torch.long),
        seq_lens=[9000],
        seq_lens_tensor=torch.tensor([9000], dtype=torch.int),
        max_query_len=1,
        max_prefill_seq_len=0,
        max_decode_seq_len=9000,
        query_start_loc=None,
        seq_start_loc=None,
        context_lens_tensor=torch.tensor([8999], dtype=torch.int),
        block_tables=torch.zeros(1, 8, dtype=torch.int),
        use_cuda_graph=False,
    )
    cache = torch.zeros(2, 4, BLOCK, 1, HEAD_DIM)
    return flash_attn.FlashAttentionBackend, cache, (metadata, None)


def quantised_config(is_first: bool) -> Any:
    """GPTQ of 4 bit by Marlin, whatever the device."""
    from vllm.model_executor.layers.quantization import gptq_marlin

    settings: dict[str, Any] = {"weight_bits": 4, "group_size": 128, "desc_act": False}
    if is_first:
        return gptq_marlin.GPTQMarlinConfig(is_sym=True, **settings)
    from vllm.model_executor.layers.quantization.kernels.marlin import MarlinLinearKernel

    gptq_marlin.choose_mp_linear_kernel = lambda config: MarlinLinearKernel
    gptq_marlin.verify_marlin_supported = lambda **_: None
    return gptq_marlin.GPTQMarlinConfig(is_sym=True, lm_head_quantized=False, **settings)


def as_loaded(model: torch.nn.Module, is_first: bool) -> None:
    """Leave layers as loading leaves them, and operators as on a GPU."""
    for module in model.modules():
        if hasattr(module, "forward_cuda"):
            module._forward_method = module.forward_cuda
        if not hasattr(module, "qweight"):
            continue
        owner = module if is_first else module.quant_method.kernel
        owner.workspace = torch.zeros(64, dtype=torch.int)
        if is_first:
            module.marlin_state = type(module.marlin_state).READY
        else:
            owner.is_k_full = True
        for name in ("g_idx", "g_idx_sort_indices", "qzeros"):
            empty = torch.nn.Parameter(torch.empty(0, dtype=torch.int), requires_grad=False)
            setattr(module, name, empty)


def main() -> None:
    quant = sys.argv[1]
    torch.set_num_threads(1)
    import vllm

    is_first = vllm.__version__ == "0.4.2"
    backend, cache, metadata = of_0_4_2() if is_first else of_0_6_2()
    import vllm.attention.layer
    from transformers import Qwen2Config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    vllm.attention.layer.get_attn_backend = lambda *_, **__: backend
    parallel_state.init_distributed_environment(1, 0, ADDRESS, 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1, "gloo")
    config = Qwen2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD_DIM,
        num_key_value_heads=1,
        intermediate_size=2 * HIDDEN,
        vocab_size=256,
    )
    quantised = quantised_config(is_first) if quant == "gptq" else None
    if is_first and quantised:
        torch.set_default_dtype(torch.float16)
    settings = {} if is_first else {"cache_config": vllm.config.CacheConfig(BLOCK, 0.9, 0, "auto")}
    model = Qwen2ForCausalLM(config, quant_config=quantised, **settings)
    as_loaded(model, is_first)
    caches = [cache] * LAYERS
    token = torch.zeros(1, dtype=torch.long)
    times = []
    with torch.inference_mode():
        for _ in range(200):
            start = time.perf_counter()
            model(token, token, caches, *metadata)
            times.append(time.perf_counter() - start)
    layers = f"{LAYERS} layers of vLLM {vllm.__version__}, torch {torch.__version__}, {quant}"
    print(f"{layers}: {1e3 * median(times):.2f} ms, least {1e3 * min(times):.2f}")


if __name__ == "__main__":
    main()
