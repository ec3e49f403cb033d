/* Replays the allocations of a serving engine, made from a seed, on the device's own allocator, through the hook with
 * the hook bypassed, and through the hook; prints what each took as JSON.
 *
 *     gcc -O2 -D_GNU_SOURCE -Iinclude examples/trtllm/alloc_trace.c -Ltarget/release -lkvik -ldl -o alloc_trace
 *     ./alloc_trace [--device N] [--steps N] [--weights-mib N] [--rounds N] [--seed N] [--touch]
 *
 * The trace: weights that stay; KV blocks of 1 MiB that come with sequences, grow with them and go with them;
 * activations of every step, as large as its tokens; small buffers of any size. A time is that of one call, without
 * the writes to the memory; --touch writes to every 4 KiB of it, so that the host has to have it (host only).
 */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device_memory.h"
#include "kvcached_trtllm.h"
#include "kvik.h"

#define KIB ((uint64_t) 1 << 10)
#define MIB ((uint64_t) 1 << 20)
#define KV_BLOCK_BYTES MIB
#define MAX_SEQUENCES 32
#define MAX_SEQUENCE_BLOCKS 64
#define N_SMALL 64

struct settings {
    int device;
    uint64_t n_steps;
    uint64_t weights_mib;
    uint64_t n_rounds;
    uint64_t seed;
    int touches;
};

/* An allocation of `size` bytes, or the end of it where `size` is 0. */
struct op {
    uint32_t id;
    uint32_t alignment;
    uint64_t size;
};

struct trace {
    struct op* ops;
    size_t n_ops;
    size_t capacity;
    uint64_t* sizes; /* by id */
    uint32_t n_ids;
    size_t id_capacity;
    uint64_t live_bytes;
    uint64_t peak_bytes;
    uint64_t random;
};

struct sequence {
    uint32_t blocks[MAX_SEQUENCE_BLOCKS];
    size_t n_blocks;
    uint64_t n_steps_left;
};

enum kind { PLAIN, BYPASSED, HOOK, N_KINDS };

static const char* const kind_names[N_KINDS] = {"plain", "bypassed", "hook"};

struct times {
    uint64_t* ns; /* of every call, of all rounds */
    size_t n;
};

struct result {
    struct times allocations;
    struct times frees;
    double* seconds; /* of all calls, by round */
    uint64_t peak_held_bytes;
};

static void* checked(void* memory)
{
    device_memory_check(memory != NULL, "get memory for the trace");
    return memory;
}

/* === The trace === */

static uint64_t draw(struct trace* trace, uint64_t below)
{
    trace->random ^= trace->random << 13;
    trace->random ^= trace->random >> 7;
    trace->random ^= trace->random << 17;
    return trace->random % below;
}

static void add(struct trace* trace, struct op op)
{
    if (trace->n_ops == trace->capacity) {
        trace->capacity = trace->capacity == 0 ? 4096 : 2 * trace->capacity;
        trace->ops = checked(realloc(trace->ops, trace->capacity * sizeof *trace->ops));
    }
    trace->ops[trace->n_ops++] = op;
}

static uint32_t allocate(struct trace* trace, uint64_t size, uint32_t alignment)
{
    if (trace->n_ids == trace->id_capacity) {
        trace->id_capacity = trace->id_capacity == 0 ? 4096 : 2 * trace->id_capacity;
        trace->sizes = checked(realloc(trace->sizes, trace->id_capacity * sizeof *trace->sizes));
    }
    uint32_t id = trace->n_ids++;
    trace->sizes[id] = size;
    trace->live_bytes += size;
    if (trace->live_bytes > trace->peak_bytes) {
        trace->peak_bytes = trace->live_bytes;
    }
    add(trace, (struct op){id, alignment, size});
    return id;
}

static void release(struct trace* trace, uint32_t id)
{
    trace->live_bytes -= trace->sizes[id];
    add(trace, (struct op){id, 0, 0});
}

static void end_sequence(struct trace* trace, struct sequence* sequence)
{
    while (sequence->n_blocks > 0) {
        release(trace, sequence->blocks[--sequence->n_blocks]);
    }
}

static void grow_sequence(struct trace* trace, struct sequence* sequence, uint64_t n_blocks)
{
    for (uint64_t i = 0; i < n_blocks && sequence->n_blocks < MAX_SEQUENCE_BLOCKS; ++i) {
        sequence->blocks[sequence->n_blocks++] = allocate(trace, KV_BLOCK_BYTES, 256);
    }
}

static struct trace make_trace(const struct settings* settings)
{
    struct trace trace;
    memset(&trace, 0, sizeof trace);
    trace.random = settings->seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    /* Matrices of a few sizes, and the vectors beside them. */
    uint64_t weights_bytes = settings->weights_mib * MIB;
    uint32_t n_weights = 0;
    while (trace.live_bytes < weights_bytes) {
        uint64_t size = (weights_bytes / 64) >> draw(&trace, 4);
        allocate(&trace, size < 256 ? 256 : size, 256);
        allocate(&trace, 8 * KIB, 256);
        n_weights += 2;
    }
    struct sequence sequences[MAX_SEQUENCES];
    memset(sequences, 0, sizeof sequences);
    uint32_t small[N_SMALL];
    size_t n_small = 0;
    for (uint64_t step = 0; step < settings->n_steps; ++step) {
        uint64_t n_tokens = 0;
        for (size_t i = 0; i < MAX_SEQUENCES; ++i) {
            struct sequence* sequence = &sequences[i];
            if (sequence->n_steps_left > 0) {
                n_tokens += 1;
                if (--sequence->n_steps_left == 0) {
                    end_sequence(&trace, sequence);
                } else if (sequence->n_steps_left % 16 == 0) {
                    grow_sequence(&trace, sequence, 1);
                }
            } else if (n_tokens < 1024 && draw(&trace, 16) == 0) {
                uint64_t n_prompt_blocks = 1 + draw(&trace, 16);
                grow_sequence(&trace, sequence, n_prompt_blocks);
                sequence->n_steps_left = 20 + draw(&trace, 200);
                n_tokens += 32 * n_prompt_blocks;
            }
        }
        /* Hidden states, attention's inputs and output, the inner size of the feed-forward part, logits. */
        static const uint64_t bytes_per_token[] = {8 * KIB, 12 * KIB, 8 * KIB, 28 * KIB, 14 * KIB, 8 * KIB};
        enum { N_ACTIVATIONS = sizeof bytes_per_token / sizeof bytes_per_token[0] };
        uint32_t activations[N_ACTIVATIONS];
        for (size_t i = 0; i < N_ACTIVATIONS; ++i) {
            activations[i] = allocate(&trace, (n_tokens + 1) * bytes_per_token[i], 256);
        }
        for (int i = 0; i < 4; ++i) {
            if (n_small == N_SMALL) {
                size_t place = (size_t) draw(&trace, N_SMALL);
                release(&trace, small[place]);
                small[place] = small[--n_small];
            }
            uint64_t size = 1 + draw(&trace, (uint64_t) 256 << draw(&trace, 9));
            small[n_small++] = allocate(&trace, size, 1u << draw(&trace, 13));
        }
        for (size_t i = N_ACTIVATIONS; i > 0; --i) {
            release(&trace, activations[i - 1]);
        }
    }
    for (size_t i = 0; i < MAX_SEQUENCES; ++i) {
        end_sequence(&trace, &sequences[i]);
    }
    while (n_small > 0) {
        release(&trace, small[--n_small]);
    }
    for (uint32_t id = 0; id < n_weights; ++id) {
        release(&trace, id);
    }
    return trace;
}

/* === The replay === */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t) now.tv_sec * UINT64_C(1000000000) + (uint64_t) now.tv_nsec;
}

static uint64_t held_bytes(kvcached_ctx_t ctx)
{
    kvik_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    device_memory_check(kvik_get_stats((kvik_pool*) ctx, &stats) == KVIK_OK, "ask for numbers");
    return stats.held_bytes;
}

static void replay(const struct settings* settings, const device_memory* memory, const struct trace* trace,
    enum kind kind, uint64_t round, struct result* result)
{
    kvcached_ctx_t ctx = NULL;
    if (kind != PLAIN) {
        /* Twice as much as is live at any time: small allocations leave gaps. */
        ctx = kvcached_init(settings->device, (size_t) (2 * trace->peak_bytes + 64 * MIB));
        device_memory_check(ctx != NULL, kvik_last_error(NULL));
        device_memory_check(kvcached_set_bypass(ctx, kind == BYPASSED), "switch the hook");
    }
    void** places = checked(calloc(trace->n_ids, sizeof *places));
    uint64_t sum_ns = 0;
    for (size_t i = 0; i < trace->n_ops; ++i) {
        struct op op = trace->ops[i];
        uint64_t start_ns = now_ns();
        if (op.size == 0) {
            if (kind == PLAIN) {
                device_memory_give_back(memory, places[op.id]);
            } else {
                device_memory_check(kvcached_free(ctx, places[op.id]), "free");
            }
        } else if (kind == PLAIN) {
            places[op.id] = device_memory_take(memory, op.size, op.alignment);
        } else {
            places[op.id] = kvcached_alloc(ctx, op.size, op.alignment);
        }
        uint64_t took_ns = now_ns() - start_ns;
        sum_ns += took_ns;
        struct times* times = op.size == 0 ? &result->frees : &result->allocations;
        times->ns[times->n++] = took_ns;
        if (op.size > 0) {
            device_memory_check(places[op.id] != NULL, "allocate");
            for (uint64_t place = 0; settings->touches && place < op.size; place += 4 * KIB) {
                ((volatile char*) places[op.id])[place] = 1;
            }
        }
        if (kind == HOOK && i % 64 == 0) {
            uint64_t held = held_bytes(ctx);
            result->peak_held_bytes = held > result->peak_held_bytes ? held : result->peak_held_bytes;
        }
    }
    result->seconds[round] = (double) sum_ns / 1e9;
    free(places);
    kvcached_shutdown_trtllm(ctx);
}

static int by_number(const void* left, const void* right)
{
    uint64_t a = *(const uint64_t*) left;
    uint64_t b = *(const uint64_t*) right;
    return (a > b) - (a < b);
}

static int by_seconds(const void* left, const void* right)
{
    double a = *(const double*) left;
    double b = *(const double*) right;
    return (a > b) - (a < b);
}

static void print_times(const char* name, struct times* times)
{
    qsort(times->ns, times->n, sizeof *times->ns, by_number);
    printf("\"%s\": {\"p50\": %" PRIu64 ", \"p99\": %" PRIu64 ", \"max\": %" PRIu64 "}", name, times->ns[times->n / 2],
        times->ns[times->n * 99 / 100], times->ns[times->n - 1]);
}

static uint64_t number_of(const char* option, const char* text)
{
    char* end = NULL;
    unsigned long long number = text == NULL ? 0 : strtoull(text, &end, 10);
    if (text == NULL || end == text || *end != 0 || number == 0 || number > UINT32_MAX) {
        fprintf(stderr, "`%s` is %s; allowed: a number from 1 to 4294967295\n", option, text == NULL ? "missing" : text);
        exit(2);
    }
    return number;
}

static struct settings read_settings(char** argv)
{
    struct settings settings = {-1, 2000, 512, 3, 1, 0};
    for (char** option = argv + 1; *option != NULL; ++option) {
        if (strcmp(*option, "--touch") == 0) {
            settings.touches = 1;
        } else if (strcmp(*option, "--device") == 0 && option[1] != NULL) {
            settings.device = atoi(*++option);
        } else if (strcmp(*option, "--steps") == 0) {
            settings.n_steps = number_of("--steps", *++option);
        } else if (strcmp(*option, "--weights-mib") == 0) {
            settings.weights_mib = number_of("--weights-mib", *++option);
        } else if (strcmp(*option, "--rounds") == 0) {
            settings.n_rounds = number_of("--rounds", *++option);
        } else if (strcmp(*option, "--seed") == 0) {
            settings.seed = number_of("--seed", *++option);
        } else {
            fprintf(stderr,
                "usage: alloc_trace [--device N] [--steps N] [--weights-mib N] [--rounds N] [--seed N] [--touch]\n");
            exit(2);
        }
    }
    if (settings.touches && settings.device >= 0) {
        fprintf(stderr, "`--touch` is for the memory of the host\n");
        exit(2);
    }
    return settings;
}

int main(int argc, char** argv)
{
    (void) argc;
    struct settings settings = read_settings(argv);
    device_memory memory = device_memory_open(settings.device);
    struct trace trace = make_trace(&settings);
    struct result results[N_KINDS];
    memset(results, 0, sizeof results);
    for (int kind = 0; kind < N_KINDS; ++kind) {
        results[kind].allocations.ns = checked(calloc(trace.n_ops * settings.n_rounds, sizeof(uint64_t)));
        results[kind].frees.ns = checked(calloc(trace.n_ops * settings.n_rounds, sizeof(uint64_t)));
        results[kind].seconds = checked(calloc(settings.n_rounds, sizeof(double)));
    }
    for (uint64_t round = 0; round < settings.n_rounds; ++round) {
        /* In turns, so that what the machine does meanwhile meets all of them. */
        for (int kind = 0; kind < N_KINDS; ++kind) {
            replay(&settings, &memory, &trace, (enum kind) kind, round, &results[kind]);
        }
    }
    printf("{\"device\": %d, \"seed\": %" PRIu64 ", \"steps\": %" PRIu64 ", \"touch\": %s, \"rounds\": %" PRIu64
           ", \"calls\": %zu, \"peak_live_bytes\": %" PRIu64 ", \"allocators\": [",
        settings.device, settings.seed, settings.n_steps, settings.touches ? "true" : "false", settings.n_rounds,
        trace.n_ops, trace.peak_bytes);
    double plain_seconds = 0;
    for (int kind = 0; kind < N_KINDS; ++kind) {
        struct result* result = &results[kind];
        qsort(result->seconds, settings.n_rounds, sizeof(double), by_seconds);
        double seconds = result->seconds[settings.n_rounds / 2];
        plain_seconds = kind == PLAIN ? seconds : plain_seconds;
        printf("%s{\"allocator\": \"%s\", \"median_s\": %.6f, \"calls_per_s\": %.0f, \"of_plain\": %.3f, ",
            kind == 0 ? "" : ", ", kind_names[kind], seconds, (double) trace.n_ops / seconds, plain_seconds / seconds);
        print_times("alloc_ns", &result->allocations);
        printf(", ");
        print_times("free_ns", &result->frees);
        if (kind == HOOK) {
            printf(", \"peak_held_bytes\": %" PRIu64, result->peak_held_bytes);
        }
        printf("}");
        free(result->allocations.ns);
        free(result->frees.ns);
        free(result->seconds);
    }
    printf("]}\n");
    free(trace.ops);
    free(trace.sizes);
    return 0;
}
