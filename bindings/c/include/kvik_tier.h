/*
 * Tiers of kvik in libraries that are loaded at run time: `remote: plugin:///path/to/library.so?options`.
 *
 * A library exports one function, `kvik_tier_open`, which gives a table of functions and a state that is handed to each of
 * them. A tier is a map from keys to chunks of bytes that are written once.
 *
 * - All functions but `kvik_tier_open` and `close` are called from many threads at a time. Nothing is called after `close`,
 *   and `close` is called when no other call runs. The library stays loaded until the process ends.
 * - Memory that a call is given is used until it returns, and not after it.
 * - Calls return in a bounded time: a caller waits for them. kvik leaves a tier alone for a while after failures in a row.
 * - Bytes are proven by kvik: what a tier mixes up, cuts or changes is found and is a miss. Writing outside of the memory
 *   of an item is not found.
 * - No exception and no longjmp leaves a function: the process would end.
 */

#ifndef KVIK_TIER_H
#define KVIK_TIER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. Another one is refused when the library is opened. */
#define KVIK_TIER_ABI_VERSION 1

/* What became of an item. A number that is none of these is a failure. */
enum kvik_tier_outcome {
    /* Not done yet: what kvik sets before a call. */
    KVIK_TIER_PENDING = 0,
    /* Put: it is there. */
    KVIK_TIER_STORED = 1,
    /* Put: it was there before, and stays as it was. */
    KVIK_TIER_PRESENT = 2,
    /* Put: there is no room. */
    KVIK_TIER_NO_ROOM = 3,
    /* Get: the bytes are in the buffer. */
    KVIK_TIER_HIT = 4,
    /* Get: there is no such chunk. */
    KVIK_TIER_MISS = 5,
    /* It did not work, and may work later. */
    KVIK_TIER_FAILED = 6,
    /* It did not work, and will not. */
    KVIK_TIER_REFUSED = 7
};

/* Names what one rank of an engine holds of one chunk. Chunks of keys that differ anywhere are different chunks. */
typedef struct kvik_tier_key {
    uint8_t namespace_id[16];
    uint8_t chunk[16];
    uint16_t rank;
    /* Zeros. */
    uint8_t reserved[6];
} kvik_tier_key;

/* Bytes that are stored behind those of the part before. */
typedef struct kvik_tier_part {
    const uint8_t *bytes;
    size_t n_bytes;
} kvik_tier_part;

/* A chunk to be stored. It is visible to other calls as a whole or not at all. */
typedef struct kvik_tier_put_item {
    kvik_tier_key key;
    const kvik_tier_part *parts;
    size_t n_parts;
    /* Bytes of all parts. */
    size_t n_bytes;
    /* Set by the tier. */
    int32_t outcome;
} kvik_tier_put_item;

/* Bytes of a chunk to be read. */
typedef struct kvik_tier_get_item {
    kvik_tier_key key;
    /* First byte of the chunk that is wanted. */
    uint64_t offset;
    /* Where the bytes go, and how many are wanted; the buffer may be NULL where none are. */
    uint8_t *buffer;
    size_t n_wanted;
    /* Set by the tier for a hit: bytes that are in the buffer, which are fewer than wanted only where the chunk ends. */
    size_t n_read;
    /* Set by the tier for a hit: the length of the whole chunk. */
    uint64_t chunk_bytes;
    /* Set by the tier. */
    int32_t outcome;
} kvik_tier_get_item;

/* The functions of a tier. `put`, `get`, `contains`, `remove` and `close` must be there; others may be NULL. */
typedef struct kvik_tier_functions {
    /* KVIK_TIER_ABI_VERSION. */
    uint32_t abi_version;
    /* sizeof(kvik_tier_functions). */
    uint32_t struct_bytes;
    /* Stores the items in their order and sets every outcome. A key may be there twice: the second is present then. */
    void (*put)(void *state, kvik_tier_put_item *items, size_t n_items);
    /* Reads the items and sets every outcome. */
    void (*get)(void *state, kvik_tier_get_item *items, size_t n_items);
    /* Sets `present` to 1 for each key that is there and to 0 for others; 0, or below it where it did not work. */
    int32_t (*contains)(void *state, const kvik_tier_key *keys, size_t n_keys, uint8_t *present);
    /* Removes the keys; how many were there, or below 0 where it did not work. */
    int64_t (*remove)(void *state, const kvik_tier_key *keys, size_t n_keys);
    /* Makes what was stored survive a loss of power, where the medium does; 0, or below it. */
    int32_t (*flush)(void *state);
    /* Ends the tier. */
    void (*close)(void *state);
} kvik_tier_functions;

/* A tier that is open. The table stays as it is for as long as the tier is open. */
typedef struct kvik_tier {
    const kvik_tier_functions *functions;
    void *state;
} kvik_tier;

/*
 * Opens a tier: what each library exports.
 *
 * `abi_version` is that of the caller. `options` is what stands behind the question mark of the URL, such as `size=1&path=a`,
 * and is not kept. Returns 0 and fills in `tier`; or below 0, and writes a reason of at most `message_bytes` with the NUL at
 * its end.
 */
int32_t kvik_tier_open(
    uint32_t abi_version, const char *options, kvik_tier *tier, char *message, size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
