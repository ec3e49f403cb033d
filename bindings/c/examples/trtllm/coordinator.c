/* Approach 3 for TensorRT-LLM: an external coordinator. The engine is not changed and links no library of kvik: a small
 * part beside it asks `kvik memory serve` for grants, creates memory after them, and releases memory that the service
 * asks back. Here two engines in two processes have one limit: the first has all of it until the second comes.
 *
 *     gcc -D_GNU_SOURCE -Iinclude examples/trtllm/coordinator.c -ldl -o coordinator
 *     kvik memory serve --socket /run/user/1000/kvik/memory.sock
 *     ./coordinator SOCKET [device]      the index of a CUDA device, or -1, the default, for the memory of the host
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device_memory.h"
#include "kvik_memory.h"

#define CHUNK_BYTES KVIK_MEMORY_UNIT_BYTES
#define MAX_CHUNKS 6
#define PATIENCE_MS 20000

/* The KV memory of an engine, in chunks that are granted one by one. */
struct engine {
    kvik_memory_session session;
    device_memory memory;
    void* chunks[MAX_CHUNKS];
    size_t n_chunks;
};

static void expect(int status, int expected, struct engine* engine, const char* what)
{
    if (status != expected) {
        fprintf(stderr, "failed to %s: status %d, %s\n", what, status, engine->session.error);
        exit(1);
    }
}

static void start(struct engine* engine, const char* socket, int device, const char* label)
{
    memset(engine, 0, sizeof *engine);
    kvik_memory_options options;
    kvik_memory_options_init(&options);
    options.socket = socket;
    options.ipc_name = "coordinator-example";
    options.label = label;
    options.max_bytes = MAX_CHUNKS * CHUNK_BYTES;
    expect(kvik_memory_connect(&engine->session, &options), KVIK_MEMORY_OK, engine, "connect to the memory service");
    engine->memory = device_memory_open(device);
}

/* Grows by a chunk: first the grant, then the memory. */
static int grow(struct engine* engine, uint32_t timeout_ms)
{
    int status = kvik_memory_claim(&engine->session, CHUNK_BYTES, timeout_ms);
    if (status != KVIK_MEMORY_OK) {
        return status;
    }
    /* More than the limit of the group is never granted, so there is a place for it. */
    void* chunk = engine->n_chunks < MAX_CHUNKS ? device_memory_take(&engine->memory, CHUNK_BYTES, 256) : NULL;
    if (chunk == NULL) {
        kvik_memory_give_back(&engine->session, CHUNK_BYTES);
        return KVIK_MEMORY_DEVICE_FULL;
    }
    device_memory_fill(&engine->memory, chunk, (unsigned char) engine->n_chunks, CHUNK_BYTES);
    engine->chunks[engine->n_chunks++] = chunk;
    return KVIK_MEMORY_OK;
}

/* Shrinks by n_bytes or more: first the memory, then the grant. An engine evicts what its chunks held before. */
static void shrink(struct engine* engine, uint64_t n_bytes)
{
    uint64_t n_given_bytes = 0;
    while (engine->n_chunks > 0 && n_given_bytes < n_bytes) {
        device_memory_give_back(&engine->memory, engine->chunks[--engine->n_chunks]);
        n_given_bytes += CHUNK_BYTES;
    }
    if (n_given_bytes > 0) {
        expect(kvik_memory_give_back(&engine->session, n_given_bytes), KVIK_MEMORY_OK, engine, "give grants back");
    }
}

static void stop(struct engine* engine)
{
    shrink(engine, UINT64_MAX);
    kvik_memory_disconnect(&engine->session);
}

/* The second engine: waits until the first has all, and takes three chunks of it. */
static int be_second(const char* socket, int device, int first_is_full)
{
    static struct engine second;
    char byte;
    if (read(first_is_full, &byte, 1) != 1) {
        return 1;
    }
    start(&second, socket, device, "second");
    for (int i = 0; i < 3; ++i) {
        expect(grow(&second, PATIENCE_MS), KVIK_MEMORY_OK, &second, "get a chunk of the first engine's memory");
    }
    stop(&second);
    return 0;
}

int main(int argc, char** argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: coordinator SOCKET [device]\n");
        return 2;
    }
    int device = argc > 2 ? atoi(argv[2]) : -1;
    int is_full[2];
    device_memory_check(pipe(is_full) == 0, "make a pipe");
    /* Before CUDA is used: a forked child cannot use it after its parent did. */
    pid_t child = fork();
    device_memory_check(child >= 0, "start the second engine");
    if (child == 0) {
        close(is_full[1]);
        return be_second(argv[1], device, is_full[0]);
    }
    static struct engine first;
    start(&first, argv[1], device, "first");
    int status;
    do {
        status = grow(&first, 0);
    } while (status == KVIK_MEMORY_OK);
    device_memory_check(status > 0 && first.n_chunks > 3, "reach the limit");
    size_t n_peak_chunks = first.n_chunks;
    device_memory_check(write(is_full[1], "x", 1) == 1, "tell the second engine");

    /* The first engine's work goes on; between steps it looks for notices. */
    int result = -1;
    uint64_t n_reclaimed_bytes = 0;
    while (waitpid(child, &result, WNOHANG) == 0) {
        kvik_memory_notice notice;
        status = kvik_memory_next_notice(&first.session, 20, &notice);
        if (status == KVIK_MEMORY_OK && notice.kind == KVIK_MEMORY_NOTICE_RECLAIM) {
            shrink(&first, notice.n_bytes);
            n_reclaimed_bytes += notice.n_bytes;
        } else if (status < 0) {
            expect(status, KVIK_MEMORY_OK, &first, "wait for a notice");
        }
    }
    device_memory_check(WIFEXITED(result) && WEXITSTATUS(result) == 0, "run the second engine");
    device_memory_check(n_reclaimed_bytes >= CHUNK_BYTES, "be asked for memory");
    for (size_t i = 0; i < first.n_chunks; ++i) {
        unsigned char byte = device_memory_byte(&first.memory, (char*) first.chunks[i] + CHUNK_BYTES - 1);
        device_memory_check(byte == (unsigned char) i, "find the bytes again");
    }
    printf("{\"device\": %d, \"peak_bytes\": %llu, \"reclaimed_bytes\": %llu}\n", device,
        (unsigned long long) (n_peak_chunks * CHUNK_BYTES), (unsigned long long) n_reclaimed_bytes);
    stop(&first);
    return 0;
}
