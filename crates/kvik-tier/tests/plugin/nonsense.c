/* A tier whose every answer is wrong; the option says in which way reads are. */

#include "kvik_tier.h"

#include <stdlib.h>

static void put(void *state, kvik_tier_put_item *items, size_t n_items) {
    (void)state;
    for (size_t item_idx = 0; item_idx < n_items; item_idx++) {
        items[item_idx].outcome = KVIK_TIER_HIT;
        items[item_idx].n_bytes = SIZE_MAX;
        items[item_idx].parts = NULL;
    }
}

static void get(void *state, kvik_tier_get_item *items, size_t n_items) {
    for (size_t item_idx = 0; item_idx < n_items; item_idx++) {
        kvik_tier_get_item *item = &items[item_idx];
        item->outcome = KVIK_TIER_HIT;
        item->n_read = item->n_wanted;
        item->chunk_bytes = item->n_wanted;
        switch (*(int *)state) {
        case 0:
            item->n_read = SIZE_MAX;
            break;
        case 1:
            item->chunk_bytes = UINT64_MAX;
            break;
        case 2:
            item->chunk_bytes = 0;
            break;
        case 3:
            item->outcome = -1;
            break;
        case 4:
            item->outcome = KVIK_TIER_STORED;
            break;
        case 5:
            item->outcome = KVIK_TIER_PENDING;
            break;
        case 6:
            item->n_read = 0;
            item->chunk_bytes = UINT64_MAX;
            item->buffer = NULL;
            break;
        default:
            item->outcome = KVIK_TIER_REFUSED;
        }
    }
}

static int32_t contains(void *state, const kvik_tier_key *keys, size_t n_keys, uint8_t *present) {
    (void)state, (void)keys;
    for (size_t key_idx = 0; key_idx < n_keys; key_idx++) {
        present[key_idx] = 255;
    }
    return INT32_MIN;
}

static int64_t remove_keys(void *state, const kvik_tier_key *keys, size_t n_keys) {
    (void)state, (void)keys;
    return (int64_t)n_keys + 1;
}

static int32_t flush(void *state) {
    (void)state;
    return 77;
}

static const kvik_tier_functions FUNCTIONS = {
    .abi_version = KVIK_TIER_ABI_VERSION,
    .struct_bytes = sizeof(kvik_tier_functions),
    .put = put,
    .get = get,
    .contains = contains,
    .remove = remove_keys,
    .flush = flush,
    .close = free,
};

int32_t kvik_tier_open(
    uint32_t abi_version, const char *options, kvik_tier *tier, char *message, size_t message_bytes) {
    (void)abi_version, (void)message, (void)message_bytes;
    int *kind = malloc(sizeof *kind);
    *kind = atoi(options);
    tier->functions = &FUNCTIONS;
    tier->state = kind;
    return 0;
}
