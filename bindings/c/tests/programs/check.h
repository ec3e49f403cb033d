/* Checks of the test programs: a failed one tells where and ends the program. */

#ifndef CHECK_H
#define CHECK_H

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kvik.h"

#define MIB ((uint64_t) 1 << 20)

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, kvik_last_error(NULL)); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

/* Waits until a condition holds, at most 20 seconds; it is not looked at again once it did. */
#define EVENTUALLY(condition)                           \
    do {                                                \
        time_t deadline_ = time(NULL) + 20;             \
        while (!(condition)) {                          \
            CHECK(time(NULL) < deadline_ && #condition); \
            sched_yield();                              \
        }                                               \
    } while (0)

static inline kvik_config config_of(const char* ipc_name, uint64_t block_bytes, uint64_t n_blocks)
{
    kvik_config config;
    CHECK(kvik_config_init(&config, sizeof config) == KVIK_OK);
    config.ipc_name = ipc_name;
    config.block_bytes = block_bytes;
    config.n_blocks = n_blocks;
    config.host_bytes = 256 * MIB;
    return config;
}

static inline kvik_stats stats_of(kvik_pool* pool)
{
    kvik_stats stats;
    stats.size = sizeof stats;
    CHECK(kvik_get_stats(pool, &stats) == KVIK_OK);
    return stats;
}

#endif
