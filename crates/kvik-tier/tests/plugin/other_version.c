/* A library of a version that does not exist yet. */

#include "kvik_tier.h"

static const kvik_tier_functions FUNCTIONS = {.abi_version = 2, .struct_bytes = 4096};

int32_t kvik_tier_open(
    uint32_t abi_version, const char *options, kvik_tier *tier, char *message, size_t message_bytes) {
    (void)abi_version, (void)options, (void)message, (void)message_bytes;
    tier->functions = &FUNCTIONS;
    tier->state = 0;
    return 0;
}
