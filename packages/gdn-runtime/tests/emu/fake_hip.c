// A HIP library without a GPU: modules and functions are numbered, the current device is per thread as in HIP, calls are
// logged, launches go to a callback, and any function can be told to fail.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CAPACITY = 4096, DEVICES = 4, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_HANDLE = 400, NOT_FOUND = 500 };

typedef int (*Launch)(void* module, const char* symbol, const unsigned* sizes, unsigned lds, void* stream,
                      const void* kernarg, size_t bytes, int device);

typedef struct {
    int alive, device;
    const void* image;
    char symbol[256];
} Module;

static char calls[CAPACITY][128];
static int call_count;
static Module modules[CAPACITY];
static int module_count = 1;
static Launch launcher;
static char failing[64];
static int failure;
static _Thread_local int current;

static int enter(const char* name, const char* text) {
    int place = __atomic_fetch_add(&call_count, 1, __ATOMIC_SEQ_CST);
    if (place < CAPACITY) snprintf(calls[place], sizeof calls[place], "%s%s%s", name, *text ? " " : "", text);
    return strcmp(name, failing) ? 0 : failure;
}

void fake_reset(Launch callback) {
    call_count = 0;
    failing[0] = 0;
    launcher = callback;
}

void fake_fail(const char* name, int code) {
    snprintf(failing, sizeof failing, "%s", name);
    failure = code;
}

int fake_calls(void) { return call_count; }
const char* fake_call(int place) { return calls[place]; }
const void* fake_image(void* module) { return modules[(intptr_t)module].image; }
int fake_alive(void) {
    int alive = 0;
    for (int m = 1; m < module_count; m++) alive += modules[m].alive;
    return alive;
}

int hipGetDevice(int* device) {
    int code = enter("hipGetDevice", "");
    if (!code) *device = current;
    return code;
}

int hipSetDevice(int device) {
    char text[16];
    snprintf(text, sizeof text, "%d", device);
    int code = enter("hipSetDevice", text);
    if (code) return code;
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    current = device;
    return 0;
}

int hipModuleLoadData(void** module, const void* image) {
    int code = enter("hipModuleLoadData", "");
    if (code) return code;
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    int number = __atomic_fetch_add(&module_count, 1, __ATOMIC_SEQ_CST);
    modules[number] = (Module){1, current, image, ""};
    *module = (void*)(intptr_t)number;
    return 0;
}

int hipModuleGetFunction(void** function, void* module, const char* symbol) {
    int code = enter("hipModuleGetFunction", symbol);
    if (code) return code;
    Module* owner = &modules[(intptr_t)module];
    if (!owner->alive) return INVALID_HANDLE;
    snprintf(owner->symbol, sizeof owner->symbol, "%s", symbol);
    *function = module;
    return 0;
}

int hipModuleUnload(void* module) {
    int code = enter("hipModuleUnload", "");
    if (code) return code;
    if (!modules[(intptr_t)module].alive) return INVALID_HANDLE;
    modules[(intptr_t)module].alive = 0;
    return 0;
}

int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned lds, void* stream, void** params, void** extra) {
    const unsigned sizes[6] = {gx, gy, gz, bx, by, bz};
    char text[64];
    snprintf(text, sizeof text, "device %d stream %d", current, (int)(intptr_t)stream);
    int code = enter("hipModuleLaunchKernel", text);
    if (code) return code;
    Module* owner = &modules[(intptr_t)function];
    if (!owner->alive || owner->device != current) return INVALID_HANDLE;
    if (params || !extra || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4] != (void*)3) return 1;
    return launcher(function, owner->symbol, sizes, lds, stream, extra[1], *(size_t*)extra[3], current);
}

const char* hipGetErrorName(int code) {
    switch (code) {
        case 1: return "hipErrorInvalidValue";
        case INVALID_DEVICE: return "hipErrorInvalidDevice";
        case INVALID_IMAGE: return "hipErrorInvalidImage";
        case INVALID_HANDLE: return "hipErrorInvalidHandle";
        case NOT_FOUND: return "hipErrorNotFound";
        default: return 0;
    }
}

const char* hipGetErrorString(int code) { return code == NOT_FOUND ? "named symbol not found" : ""; }
