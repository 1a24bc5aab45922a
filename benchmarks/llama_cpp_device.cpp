// A device with the rules of llama.cpp's CUDA backend that holds nothing and computes nothing: its
// scheduler divides a graph and sizes every buffer as on a GPU. FREE_MIB and TOTAL_MIB are what it
// says of its memory. Rules read in llama.cpp 0c1e570 ggml/src/ggml-cuda/ggml-cuda.cu and fattn.cu.
#include "ggml-backend-impl.h"
#include "ggml.h"
#include "llama-ext.h"

#include <cstdio>
#include <cstdlib>

static ggml_backend_reg_t the_reg();
static ggml_backend_dev_t the_device();
static ggml_backend_buffer_type_t device_memory();
static ggml_backend_buffer_type_t pinned_memory();

static size_t mib(const char * name) { const char * text = getenv(name); return (text ? strtoull(text, nullptr, 10) : 0) << 20; }

static const char * name_of_buft(ggml_backend_buffer_type_t buft) { return buft == device_memory() ? "FAKE0" : "FAKE_Host"; }
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

static size_t alignment(ggml_backend_buffer_type_t) { return 128; }

// keys and values of a layer that are not in fp16 are widened behind the result of its attention
static size_t widened(const ggml_tensor * tensor) { return tensor->type == GGML_TYPE_F16 ? 0 : GGML_PAD(2 * ggml_nelements(tensor), 128); }

static size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
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

static ggml_backend_buffer_type_t device_memory() {
    static ggml_backend_buffer_type type = {{name_of_buft, alloc, alignment, nullptr, alloc_size, no}, the_device(), nullptr};
    return &type;
}

static ggml_backend_buffer_type_t pinned_memory() {
    static ggml_backend_buffer_type type = {{name_of_buft, alloc, alignment, nullptr, nullptr, yes}, the_device(), nullptr};
    return &type;
}

static const char * backend_name(ggml_backend_t) { return "FAKE0"; }
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

static const char * dev_name(ggml_backend_dev_t) { return "FAKE0"; }
static void memory(ggml_backend_dev_t, size_t * available, size_t * total) { *available = mib("FREE_MIB"); *total = mib("TOTAL_MIB"); }
static enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
static void props(ggml_backend_dev_t device, ggml_backend_dev_props * found) {
    *found = {"FAKE0", "FAKE0", 0, 0, GGML_BACKEND_DEVICE_TYPE_GPU, nullptr, {true, true, false, true, true}};
    memory(device, &found->memory_free, &found->memory_total);
}
static ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t) { return device_memory(); }
static ggml_backend_buffer_type_t dev_host_buft(ggml_backend_dev_t) { return pinned_memory(); }
static bool supports_op(ggml_backend_dev_t, const ggml_tensor *) { return true; }
static bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) { return buft == device_memory(); }
static bool offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
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

static ggml_backend_dev_t the_device() {
    static ggml_backend_device device = {
        {dev_name, dev_name, memory, type, props, init_backend, dev_buft, dev_host_buft, nullptr,
         supports_op, supports_buft, offload_op, event_new, event_free, event_synchronize},
        the_reg(), nullptr};
    return &device;
}

static const char * reg_name(ggml_backend_reg_t) { return "FAKE"; }
static size_t count(ggml_backend_reg_t) { return 1; }
static ggml_backend_dev_t device_at(ggml_backend_reg_t, size_t) { return the_device(); }
static void * no_address(ggml_backend_reg_t, const char *) { return nullptr; }

static ggml_backend_reg_t the_reg() {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {reg_name, count, device_at, no_address}, nullptr};
    return &reg;
}

// when it is preloaded, as for llama-fit-params
__attribute__((constructor)) static void register_device() {
    if (mib("TOTAL_MIB")) { ggml_backend_register(the_reg()); }
}

// bytes of weights, cache and buffers of computing, of the device (1) and of the host (0)
extern "C" void print_memory(const llama_context * context) {
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(context)) {
        printf("memory %d %zu %zu %zu\n", !ggml_backend_buft_is_host(buft) && buft == device_memory(), bytes.model, bytes.context, bytes.compute);
    }
    fflush(stdout);
}
