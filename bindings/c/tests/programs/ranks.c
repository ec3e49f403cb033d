/* One pool over two processes: the leader allocates blocks, and they have memory in both, or in none. */

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define N_BLOCKS 16

/* What the leader has the rank do; each is answered with a number. */
enum order { HELD_BYTES, WRITE_BLOCK };

struct message {
    enum order order;
    uint32_t block;
};

static char folder[] = "/tmp/kvik-ranks-XXXXXX";
static char socket_path[64];

/* Two layers, with K and V of each in a buffer of its own. */
static kvik_config config_of_rank(const char* ipc_name, uint64_t max_bytes)
{
    kvik_config config = config_of(ipc_name, MIB, N_BLOCKS);
    config.n_buffers = 4;
    config.max_bytes = max_bytes;
    return config;
}

static void be_rank(int orders, int answers)
{
    /* A page is 2 MiB in each of four buffers: there is room for two pages. */
    kvik_config config = config_of_rank("rank-1", 16 * MIB);
    kvik_pool* pool = NULL;
    CHECK(kvik_open_rank(&config, 0, 2, socket_path, &pool) == KVIK_ERROR_INVALID);
    CHECK(kvik_open_rank(&config, 2, 2, socket_path, &pool) == KVIK_ERROR_INVALID);
    CHECK(kvik_open_rank(&config, 1, 2, NULL, &pool) == KVIK_ERROR_INVALID && pool == NULL);
    CHECK(kvik_open_rank(&config, 1, 2, socket_path, &pool) == KVIK_OK);
    uint32_t block;
    CHECK(kvik_alloc_block_indices(pool, 1, &block) == KVIK_ERROR_INVALID);
    CHECK(strstr(kvik_last_error(pool), "leader") != NULL);
    /* Its other memory is its own. */
    void* memory = NULL;
    CHECK(kvik_alloc(pool, 100, 0, &memory) == KVIK_OK && kvik_free(pool, memory) == KVIK_OK);
    CHECK(kvik_trim(pool, NULL) == KVIK_OK);
    struct message message;
    while (read(orders, &message, sizeof message) == sizeof message) {
        uint64_t answer = stats_of(pool).held_bytes;
        if (message.order == WRITE_BLOCK) {
            void* keys[2];
            void* values[2];
            CHECK(kvik_block_pointers(pool, 2, &message.block, 1, keys, values) == KVIK_OK);
            for (int layer = 0; layer < 2; ++layer) {
                memset(keys[layer], 2 * layer + 1, MIB);
                memset(values[layer], 2 * layer + 2, MIB);
            }
            answer = ((unsigned char*) keys[1])[MIB - 1];
        }
        CHECK(write(answers, &answer, sizeof answer) == sizeof answer);
    }
    CHECK(kvik_close(pool) == KVIK_OK);
}

static int to_rank[2];
static int from_rank[2];

static uint64_t ask(enum order order, uint32_t block)
{
    struct message message = {order, block};
    uint64_t answer = 0;
    CHECK(write(to_rank[1], &message, sizeof message) == sizeof message);
    CHECK(read(from_rank[0], &answer, sizeof answer) == sizeof answer);
    return answer;
}

static void lead(pid_t rank)
{
    const char* sockets[] = {socket_path};
    kvik_config config = config_of_rank("rank-0", UINT64_MAX);
    kvik_pool* pool = NULL;
    CHECK(kvik_open_leader(&config, sockets, 0, 0, &pool) == KVIK_ERROR_INVALID);
    CHECK(kvik_open_leader(&config, NULL, 1, 0, &pool) == KVIK_ERROR_INVALID && pool == NULL);
    /* A rank that has another shape is refused, and does not mind. */
    kvik_config other = config;
    other.n_blocks = 4 * N_BLOCKS;
    CHECK(kvik_open_leader(&other, sockets, 1, 20000, &pool) == KVIK_ERROR_DEVICE && pool == NULL);
    /* It waits until the rank is there. */
    CHECK(kvik_open_leader(&config, sockets, 1, 5000, &pool) == KVIK_OK);
    uint32_t blocks[N_BLOCKS];
    CHECK(kvik_alloc_block_indices(pool, 4, blocks) == KVIK_OK);
    CHECK(stats_of(pool).held_bytes == 16 * MIB && ask(HELD_BYTES, 0) == 16 * MIB);
    for (int i = 0; i < 4; ++i) {
        void* address = NULL;
        CHECK(kvik_block_address(pool, blocks[i], &address) == KVIK_OK);
        memset(address, i + 1, MIB);
        CHECK(ask(WRITE_BLOCK, blocks[i]) == 3);
        CHECK(*(unsigned char*) address == i + 1);
    }
    /* The rank's device does not grant more: the leader has no more either. */
    CHECK(kvik_alloc_block_indices(pool, 1, blocks + 4) == KVIK_NO_MEMORY);
    CHECK(stats_of(pool).held_bytes == 16 * MIB && ask(HELD_BYTES, 0) == 16 * MIB);
    CHECK(kvik_free_block_indices(pool, blocks, 4) == KVIK_OK);
    CHECK(kvik_trim(pool, NULL) == KVIK_OK);
    CHECK(stats_of(pool).held_bytes == 0 && ask(HELD_BYTES, 0) == 0);
    /* Without the rank there is nothing to be had. */
    CHECK(kill(rank, SIGKILL) == 0 && waitpid(rank, NULL, 0) == rank);
    CHECK(kvik_alloc_block_indices(pool, 1, blocks) == KVIK_ERROR_DEVICE);
    CHECK(strstr(kvik_last_error(pool), "rank 1") != NULL);
    CHECK(kvik_close(pool) == KVIK_OK);
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    snprintf(socket_path, sizeof socket_path, "%s/rank-1", folder);
    CHECK(pipe(to_rank) == 0 && pipe(from_rank) == 0);
    pid_t rank = fork();
    CHECK(rank >= 0);
    if (rank == 0) {
        close(to_rank[1]);
        be_rank(to_rank[0], from_rank[1]);
        return 0;
    }
    close(from_rank[1]);
    lead(rank);
    unlink(socket_path);
    CHECK(rmdir(folder) == 0);
    return 0;
}
