/* An engine with blocks of 1 MiB under a limit of 16 MiB that reads orders and answers each with a line:
 * "take N" with how many blocks it got, "give" with how many it has then. */

#include <string.h>

#include "check.h"
#include "kvcached_trtllm.h"

int main(void)
{
    kvcached_ctx_t ctx = kvcached_init_trtllm(-1, 16 * MIB, 1 << 20);
    CHECK(ctx != NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    void* taken[64];
    int n_taken = 0;
    char order[64];
    while (fgets(order, sizeof order, stdin) != NULL) {
        int n_blocks = 0;
        if (sscanf(order, "take %d", &n_blocks) == 1) {
            CHECK(n_taken + n_blocks <= 64);
            int n_got = kvcached_alloc_blocks_trtllm(ctx, n_blocks, taken + n_taken);
            for (int i = 0; i < n_got; ++i) {
                memset(taken[n_taken + i], 1, MIB);
            }
            n_taken += n_got;
            printf("%d\n", n_got);
        } else {
            kvcached_free_blocks_trtllm(ctx, taken, n_taken);
            n_taken = 0;
            printf("%d\n", (int) (kvcached_used_memory_trtllm(ctx) / MIB));
        }
    }
    kvcached_shutdown_trtllm(ctx);
    return 0;
}
