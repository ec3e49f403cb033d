/*
 * An example of a tier in a library: chunks in a hash table in memory.
 *
 *     cc -O2 -shared -fPIC -I bindings/c/include bindings/c/examples/map_tier.c -o /usr/lib/kvik/map_tier.so -pthread
 *     kvik store serve --remote 'plugin:///usr/lib/kvik/map_tier.so?max_bytes=1073741824'
 *
 * A tier of this kind has one table for each time it is opened. A real one would talk to a store here.
 */

#include "kvik_tier.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_BUCKETS 4096

struct chunk {
    struct chunk *next;
    kvik_tier_key key;
    size_t n_bytes;
    uint8_t bytes[];
};

struct map {
    pthread_mutex_t lock;
    uint64_t used_bytes;
    uint64_t max_bytes;
    struct chunk *buckets[N_BUCKETS];
};

/* The place of a key: FNV-1a over all of it. */
static size_t bucket_of(const kvik_tier_key *key) {
    const uint8_t *bytes = (const uint8_t *)key;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t place = 0; place < sizeof *key; place++) {
        hash = (hash ^ bytes[place]) * 0x100000001b3u;
    }
    return hash % N_BUCKETS;
}

/* What points to the chunk of a key, or to the NULL at the end of its bucket. The lock is held. */
static struct chunk **find(struct map *map, const kvik_tier_key *key) {
    struct chunk **place = &map->buckets[bucket_of(key)];
    while (*place != NULL && memcmp(&(*place)->key, key, sizeof *key) != 0) {
        place = &(*place)->next;
    }
    return place;
}

static int32_t put_one(struct map *map, const kvik_tier_put_item *item) {
    struct chunk **place = find(map, &item->key);
    if (*place != NULL) {
        return KVIK_TIER_PRESENT;
    }
    if (item->n_bytes > map->max_bytes - map->used_bytes) {
        return KVIK_TIER_NO_ROOM;
    }
    struct chunk *chunk = malloc(sizeof *chunk + item->n_bytes);
    if (chunk == NULL) {
        return KVIK_TIER_NO_ROOM;
    }
    chunk->next = NULL;
    chunk->key = item->key;
    chunk->n_bytes = item->n_bytes;
    uint8_t *end = chunk->bytes;
    for (size_t part_idx = 0; part_idx < item->n_parts; part_idx++) {
        const kvik_tier_part *part = &item->parts[part_idx];
        if (part->n_bytes > 0) {
            memcpy(end, part->bytes, part->n_bytes);
        }
        end += part->n_bytes;
    }
    map->used_bytes += chunk->n_bytes;
    *place = chunk;
    return KVIK_TIER_STORED;
}

static void put(void *state, kvik_tier_put_item *items, size_t n_items) {
    struct map *map = state;
    pthread_mutex_lock(&map->lock);
    for (size_t item_idx = 0; item_idx < n_items; item_idx++) {
        items[item_idx].outcome = put_one(map, &items[item_idx]);
    }
    pthread_mutex_unlock(&map->lock);
}

static void get_one(struct map *map, kvik_tier_get_item *item) {
    const struct chunk *chunk = *find(map, &item->key);
    if (chunk == NULL) {
        item->outcome = KVIK_TIER_MISS;
        return;
    }
    size_t n_behind = item->offset < chunk->n_bytes ? chunk->n_bytes - (size_t)item->offset : 0;
    item->n_read = item->n_wanted < n_behind ? item->n_wanted : n_behind;
    if (item->n_read > 0) {
        memcpy(item->buffer, chunk->bytes + item->offset, item->n_read);
    }
    item->chunk_bytes = chunk->n_bytes;
    item->outcome = KVIK_TIER_HIT;
}

static void get(void *state, kvik_tier_get_item *items, size_t n_items) {
    struct map *map = state;
    pthread_mutex_lock(&map->lock);
    for (size_t item_idx = 0; item_idx < n_items; item_idx++) {
        get_one(map, &items[item_idx]);
    }
    pthread_mutex_unlock(&map->lock);
}

static int32_t contains(void *state, const kvik_tier_key *keys, size_t n_keys, uint8_t *present) {
    struct map *map = state;
    pthread_mutex_lock(&map->lock);
    for (size_t key_idx = 0; key_idx < n_keys; key_idx++) {
        present[key_idx] = *find(map, &keys[key_idx]) != NULL;
    }
    pthread_mutex_unlock(&map->lock);
    return 0;
}

static int64_t remove_keys(void *state, const kvik_tier_key *keys, size_t n_keys) {
    struct map *map = state;
    int64_t n_removed = 0;
    pthread_mutex_lock(&map->lock);
    for (size_t key_idx = 0; key_idx < n_keys; key_idx++) {
        struct chunk **place = find(map, &keys[key_idx]);
        struct chunk *chunk = *place;
        if (chunk != NULL) {
            *place = chunk->next;
            map->used_bytes -= chunk->n_bytes;
            free(chunk);
            n_removed++;
        }
    }
    pthread_mutex_unlock(&map->lock);
    return n_removed;
}

static void close_map(void *state) {
    struct map *map = state;
    for (size_t bucket_idx = 0; bucket_idx < N_BUCKETS; bucket_idx++) {
        struct chunk *chunk = map->buckets[bucket_idx];
        while (chunk != NULL) {
            struct chunk *next = chunk->next;
            free(chunk);
            chunk = next;
        }
    }
    pthread_mutex_destroy(&map->lock);
    free(map);
}

static const kvik_tier_functions FUNCTIONS = {
    .abi_version = KVIK_TIER_ABI_VERSION,
    .struct_bytes = sizeof(kvik_tier_functions),
    .put = put,
    .get = get,
    .contains = contains,
    .remove = remove_keys,
    .flush = NULL,
    .close = close_map,
};

int32_t kvik_tier_open(
    uint32_t abi_version, const char *options, kvik_tier *tier, char *message, size_t message_bytes) {
    if (abi_version != KVIK_TIER_ABI_VERSION) {
        snprintf(message, message_bytes, "version %u is not %d", abi_version, KVIK_TIER_ABI_VERSION);
        return -1;
    }
    unsigned long long max_bytes = UINT64_MAX;
    char rest;
    if (options[0] != '\0' && sscanf(options, "max_bytes=%llu%c", &max_bytes, &rest) != 1) {
        snprintf(message, message_bytes, "the only option is max_bytes=NUMBER");
        return -1;
    }
    struct map *map = calloc(1, sizeof *map);
    if (map == NULL || pthread_mutex_init(&map->lock, NULL) != 0) {
        free(map);
        snprintf(message, message_bytes, "no memory");
        return -1;
    }
    map->max_bytes = max_bytes;
    tier->functions = &FUNCTIONS;
    tier->state = map;
    return 0;
}
