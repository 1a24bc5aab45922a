// Devices with the rules of llama.cpp's CUDA or Metal backend that hold nothing and compute nothing:
// its scheduler divides a graph and sizes every buffer as on GPUs. FREE_MIB and TOTAL_MIB are what
// they say of their memory, with a comma between devices; RULES=metal asks for Metal's. Rules read in
// llama.cpp 0c1e570 ggml/src/ggml-cuda/ggml-cuda.cu and fattn.cu, ggml/src/ggml-metal/ggml-metal.cpp,
// ggml-metal-ops.cpp and ggml-metal-device.m.
#include "ggml-backend-impl.h"
#include "ggml.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <vector>

// one of the devices, which the interfaces below find as the context of a device or a buffer type
struct device_state {
    std::string name;
    size_t available;
    size_t total;
    ggml_backend_device device;
    ggml_backend_buffer_type memory;
    ggml_backend_buffer_type pinned;
};

static ggml_backend_reg_t the_reg();
static std::vector<device_state *> & devices();

static std::vector<size_t> mib(const char * name) {
    std::vector<size_t> sizes;
    const char * text = getenv(name);
    while (text && *text) {
        char * end;
        sizes.push_back(strtoull(text, &end, 10) << 20);
        text = *end ? end + 1 : end;
    }
    return sizes;
}

static device_state * state(ggml_backend_dev_t device) { return (device_state *) device->context; }
static device_state * state(ggml_backend_buffer_type_t buft) { return (device_state *) buft->context; }

static const char * name_of_buft(ggml_backend_buffer_type_t buft) { return state(buft)->name.c_str(); }
static const char * name_of_pinned(ggml_backend_buffer_type_t) { return "FAKE_Host"; }
static void free_buffer(ggml_backend_buffer_t) {}
static void * base(ggml_backend_buffer_t) { return (void *) 0x1000; }
static void set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
static void get(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {}
static void clear(ggml_backend_buffer_t, uint8_t) {}

static ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_i buffer = {};
    buffer.free_buffer = free_buffer;
    buffer.get_base    = base;
    buffer.set_tensor  = set;
    buffer.get_tensor  = get;
    buffer.clear       = clear;
    return ggml_backend_buffer_init(buft, buffer, nullptr, size);
}

// a GPU's pinned memory is the host's
static ggml_backend_buffer_t alloc_pinned(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    buffer->buft = buft;
    return buffer;
}

static bool is_metal() {
    const char * rules = getenv("RULES");
    return rules && std::string(rules) == "metal";
}

static size_t alignment(ggml_backend_buffer_type_t) { return is_metal() ? 32 : 128; }

// beside the result of one fused attention: the last cells once more, which blocks are masked, parts
// of results of 32 groups, and keys and values in fp16
static size_t metal_attention(const ggml_tensor * tensor) {
    const ggml_tensor * q = tensor->src[0], * k = tensor->src[1], * v = tensor->src[2], * mask = tensor->src[3];
    const bool copied = ggml_is_quantized(k->type) && q->ne[1] >= 32;
    const bool is_view = v->view_src && (v->view_src == k || (v->view_src == k->view_src && v->view_offs == k->view_offs));
    const size_t k_row = copied ? 2 * k->ne[0] : k->nb[1];
    const size_t v_row = copied ? 2 * (is_view ? k->ne[0] : v->ne[0]) : v->nb[1];
    size_t size = 64 * (k_row * k->ne[2] * k->ne[3] + v_row * v->ne[2] * v->ne[3] + (mask ? 2 * mask->ne[1] * mask->ne[2] * mask->ne[3] : 0));
    if (mask) {
        const bool is_short = q->ne[1] < 20 && q->ne[0] % 32 == 0;
        const int64_t queries = is_short ? 1 : 8, cells = is_short ? 32 : 64;
        size += GGML_PAD((q->ne[1] + queries - 1) / queries * ((mask->ne[0] + cells - 1) / cells) * mask->ne[2] * mask->ne[3], 32);
    }
    size += 4 * std::min<int64_t>(q->ne[1], 32) * q->ne[2] * q->ne[3] * 32 * (v->ne[0] + 2);
    size += GGML_PAD(2 * ggml_nelements(k), 16);
    return is_view ? size : size + GGML_PAD(2 * ggml_nelements(v), 16);
}

static size_t metal_size(const ggml_tensor * tensor) {
    const size_t size = ggml_nbytes(tensor);
    switch (tensor->op) {
        case GGML_OP_MUL_MAT_ID:
            return size + 4 * tensor->src[0]->ne[2] * (1 + tensor->src[2]->ne[1]) + 8 + 256 * sizeof(float);
        case GGML_OP_FLASH_ATTN_EXT:
            return size + metal_attention(tensor);
        case GGML_OP_CUMSUM:
        case GGML_OP_ARGSORT:
            return 2 * size;
        case GGML_OP_TOP_K:
            return 2 * sizeof(int32_t) * ggml_nelements(tensor->src[0]);
        default:
            return size;
    }
}

// keys and values of a layer that are not in fp16 are widened behind the result of its attention
static size_t widened(const ggml_tensor * tensor) { return tensor->type == GGML_TYPE_F16 ? 0 : GGML_PAD(2 * ggml_nelements(tensor), 128); }

static size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    if (is_metal()) { return metal_size(tensor); }
    size_t size = ggml_nbytes(tensor);
    if (tensor->op == GGML_OP_FLASH_ATTN_EXT && tensor->src[0]->ne[1] > 2) {
        size = GGML_PAD(size, 128) + widened(tensor->src[1]) + widened(tensor->src[2]);
    }
    if (ggml_is_quantized(tensor->type) && tensor->ne[0] % 512) {
        size += ggml_row_size(tensor->type, 512 - tensor->ne[0] % 512);
    }
    return size;
}

static bool yes(ggml_backend_buffer_type_t) { return true; }
static bool no(ggml_backend_buffer_type_t) { return false; }

static const char * backend_name(ggml_backend_t backend) { return state(backend->device)->name.c_str(); }
static void backend_free(ggml_backend_t backend) { delete backend; }
static void synchronize(ggml_backend_t) {}
static ggml_status compute(ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_SUCCESS; }
static void event(ggml_backend_t, ggml_backend_event_t) {}
static ggml_guid guid = {1, 2, 3};

static ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) {
    ggml_backend_i backend = {};
    backend.get_name      = backend_name;
    backend.free          = backend_free;
    backend.synchronize   = synchronize;
    backend.graph_compute = compute;
    backend.event_record  = event;
    backend.event_wait    = event;
    return new ggml_backend{&guid, backend, device, nullptr};
}

static const char * dev_name(ggml_backend_dev_t device) { return state(device)->name.c_str(); }
static void memory(ggml_backend_dev_t device, size_t * available, size_t * total) { *available = state(device)->available; *total = state(device)->total; }
static enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
static void props(ggml_backend_dev_t device, ggml_backend_dev_props * found) {
    *found = {dev_name(device), dev_name(device), 0, 0, GGML_BACKEND_DEVICE_TYPE_GPU, nullptr, {true, true, false, true, true}};
    memory(device, &found->memory_free, &found->memory_total);
}
static ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t device) { return &state(device)->memory; }
static ggml_backend_buffer_type_t dev_host_buft(ggml_backend_dev_t device) { return is_metal() ? nullptr : &state(device)->pinned; }
static bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    if (!is_metal() || op->op != GGML_OP_FLASH_ATTN_EXT) { return true; }
    static const int64_t heads[] = {32, 40, 48, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576};
    const bool has_kernel = std::find(std::begin(heads), std::end(heads), op->src[0]->ne[0]) != std::end(heads);
    return has_kernel && op->src[1]->type == op->src[2]->type;
}
static bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft) { return buft == dev_buft(device); }
static bool offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    if (is_metal() && op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) { return false; }
    switch (op->op) {
        case GGML_OP_GET_ROWS:   return false;
        case GGML_OP_MUL_MAT:    return op->ne[1] >= 32;
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:       return op->ne[2] >= 32;
        default:                 return ggml_nrows(op) >= 32;
    }
}
static ggml_backend_event_t event_new(ggml_backend_dev_t device) { return new ggml_backend_event{device, nullptr}; }
static void event_free(ggml_backend_dev_t, ggml_backend_event_t made) { delete made; }
static void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

static std::vector<device_state *> & devices() {
    static std::vector<device_state *> made;
    const auto available = mib("FREE_MIB"), total = mib("TOTAL_MIB");
    while (made.size() < total.size()) {
        const size_t index = made.size();
        auto * each = new device_state{"FAKE" + std::to_string(index), available[index], total[index], {}, {}, {}};
        each->device = {
            {dev_name, dev_name, memory, type, props, init_backend, dev_buft, dev_host_buft, nullptr,
             supports_op, supports_buft, offload_op, event_new, event_free, event_synchronize},
            the_reg(), each};
        each->memory = {{name_of_buft, alloc, alignment, nullptr, alloc_size, no}, &each->device, each};
        each->pinned = {{name_of_pinned, alloc_pinned, ggml_backend_cpu_buffer_type()->iface.get_alignment, nullptr, nullptr, yes}, &each->device, each};
        made.push_back(each);
    }
    return made;
}

static const char * reg_name(ggml_backend_reg_t) { return "FAKE"; }
static size_t count(ggml_backend_reg_t) { return devices().size(); }
static ggml_backend_dev_t device_at(ggml_backend_reg_t, size_t index) { return &devices()[index]->device; }
static void * no_address(ggml_backend_reg_t, const char *) { return nullptr; }

static ggml_backend_reg_t the_reg() {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {reg_name, count, device_at, no_address}, nullptr};
    return &reg;
}

// when it is preloaded, as for llama-fit-params
__attribute__((constructor)) static void register_devices() {
    const auto total = mib("TOTAL_MIB");
    if (!total.empty() && total[0]) { ggml_backend_register(the_reg()); }
}

// a row of logits for each slot, as llama-server plans it, and not for each token
extern "C" llama_context * llama_init_from_model(llama_model * model, llama_context_params params) {
    static const auto next = (decltype(&llama_init_from_model)) dlsym(RTLD_NEXT, "llama_init_from_model");
    params.n_outputs_max = params.n_seq_max;
    return next(model, params);
}

// bytes of weights, cache and buffers of computing, of each device (from 1) and of the host (0)
extern "C" void print_memory(const llama_context * context) {
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(context)) {
        size_t number = 0;
        for (size_t index = 0; index < devices().size(); index++) {
            if (buft == &devices()[index]->memory) { number = index + 1; }
        }
        printf("memory %zu %zu %zu %zu\n", number, bytes.model, bytes.context, bytes.compute);
    }
    fflush(stdout);
}
