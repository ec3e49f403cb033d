/* Memory of a device as the examples touch it: that of the host directly, that of a GPU through the CUDA driver, which
 * is loaded when it is needed. Each function returns 0, or ends the program with words. */

#ifndef DEVICE_MEMORY_H
#define DEVICE_MEMORY_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct device_memory {
    int device; /* of CUDA, or -1 for the host */
    int (*memset_d8)(uint64_t, unsigned char, size_t);
    int (*memcpy_dtoh)(void*, uint64_t, size_t);
    int (*mem_alloc)(uint64_t*, size_t);
    int (*mem_free)(uint64_t);
    int (*synchronize)(void);
} device_memory;

static inline void device_memory_check(int is_good, const char* what)
{
    if (!is_good) {
        fprintf(stderr, "failed to %s\n", what);
        exit(1);
    }
}

static inline void device_memory_load(void* driver, const char* name, void* function)
{
    void* symbol = dlsym(driver, name);
    device_memory_check(symbol != NULL, name);
    memcpy(function, &symbol, sizeof symbol);
}

/* Opens the device for this thread. */
static inline device_memory device_memory_open(int device)
{
    device_memory memory;
    memset(&memory, 0, sizeof memory);
    memory.device = device;
    if (device < 0) {
        return memory;
    }
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    device_memory_check(driver != NULL, "load libcuda.so.1");
    int (*init)(unsigned);
    int (*retain)(void**, int);
    int (*set_current)(void*);
    void* context = NULL;
    device_memory_load(driver, "cuInit", &init);
    device_memory_load(driver, "cuDevicePrimaryCtxRetain", &retain);
    device_memory_load(driver, "cuCtxSetCurrent", &set_current);
    device_memory_load(driver, "cuMemsetD8_v2", &memory.memset_d8);
    device_memory_load(driver, "cuMemcpyDtoH_v2", &memory.memcpy_dtoh);
    device_memory_load(driver, "cuMemAlloc_v2", &memory.mem_alloc);
    device_memory_load(driver, "cuMemFree_v2", &memory.mem_free);
    device_memory_load(driver, "cuCtxSynchronize", &memory.synchronize);
    device_memory_check(init(0) == 0 && retain(&context, device) == 0 && set_current(context) == 0, "open the GPU");
    return memory;
}

/* Sets n_bytes, and waits until they are set. */
static inline void device_memory_fill(const device_memory* memory, void* start, unsigned char byte, size_t n_bytes)
{
    if (memory->device < 0) {
        memset(start, byte, n_bytes);
        return;
    }
    device_memory_check(
        memory->memset_d8((uint64_t) (uintptr_t) start, byte, n_bytes) == 0 && memory->synchronize() == 0, "write");
}

static inline unsigned char device_memory_byte(const device_memory* memory, const void* place)
{
    unsigned char byte = 0;
    if (memory->device < 0) {
        return *(const unsigned char*) place;
    }
    device_memory_check(memory->memcpy_dtoh(&byte, (uint64_t) (uintptr_t) place, 1) == 0, "read");
    return byte;
}

/* Memory of the device's own allocator; NULL where it has none. */
static inline void* device_memory_take(const device_memory* memory, size_t n_bytes, size_t alignment)
{
    void* start = NULL;
    if (memory->device < 0) {
        return posix_memalign(&start, alignment < 256 ? 256 : alignment, n_bytes) == 0 ? start : NULL;
    }
    uint64_t address = 0;
    return memory->mem_alloc(&address, n_bytes) == 0 ? (void*) (uintptr_t) address : NULL;
}

static inline void device_memory_give_back(const device_memory* memory, void* start)
{
    if (memory->device < 0) {
        free(start);
        return;
    }
    device_memory_check(memory->mem_free((uint64_t) (uintptr_t) start) == 0, "free");
}

#endif
