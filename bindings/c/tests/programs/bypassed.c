/* A program whose environment says KVIK_MEMORY_BYPASS: its allocations are not granted, until it says otherwise. */

#include "check.h"

int main(void)
{
    kvik_config config = config_of("bypassed", 0, 0);
    config.max_bytes = 2 * MIB;
    kvik_pool* pool = NULL;
    void* memory = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    CHECK(kvik_alloc(pool, 8 * MIB, 0, &memory) == KVIK_OK);
    CHECK(stats_of(pool).bypassed_bytes == 8 * MIB && stats_of(pool).held_bytes == 0);
    CHECK(kvik_free(pool, memory) == KVIK_OK);
    CHECK(kvik_set_bypass(pool, 0) == KVIK_OK);
    CHECK(kvik_alloc(pool, 8 * MIB, 0, &memory) == KVIK_NO_MEMORY);
    CHECK(kvik_close(pool) == KVIK_OK);
    return 0;
}
