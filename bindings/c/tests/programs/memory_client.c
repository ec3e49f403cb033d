/* The client of the memory service, against two services with 8 units of 2 MiB each: argv has their sockets. It links
 * no library. */

#include <stdlib.h>

#include "kvik_memory.h"

#define UNIT KVIK_MEMORY_UNIT_BYTES
#define PATIENCE_MS 20000

static const char* words = "";

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, words); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static void open_session(kvik_memory_session* session, const char* socket, const char* ipc_name)
{
    kvik_memory_options options;
    kvik_memory_options_init(&options);
    options.socket = socket;
    options.ipc_name = ipc_name;
    options.label = "c";
    words = session->error;
    CHECK(kvik_memory_connect(session, &options) == KVIK_MEMORY_OK);
}

static void claims(const char* socket)
{
    kvik_memory_session session;
    open_session(&session, socket, "claims");
    CHECK(kvik_memory_claim(&session, 6 * UNIT, 0) == KVIK_MEMORY_OK);
    CHECK(session.held_bytes == 6 * UNIT && session.claimable_bytes == 8 * UNIT && session.limit_bytes == 8 * UNIT);
    CHECK(kvik_memory_claim(&session, 3 * UNIT, 0) == KVIK_MEMORY_DEVICE_FULL && session.held_bytes == 6 * UNIT);
    /* A claim that waits gets its answer when its time is over. */
    CHECK(kvik_memory_claim(&session, 3 * UNIT, 50) == KVIK_MEMORY_DEVICE_FULL);
    CHECK(kvik_memory_give_back(&session, 2 * UNIT) == KVIK_MEMORY_OK && session.held_bytes == 4 * UNIT);
    /* What is wrong is refused with words, and the session goes on. */
    CHECK(kvik_memory_claim(&session, 1, 0) == KVIK_MEMORY_REFUSED);
    CHECK(strstr(session.error, "a multiple of 2 MiB") != NULL);
    CHECK(kvik_memory_give_back(&session, 5 * UNIT) == KVIK_MEMORY_REFUSED && session.held_bytes == 4 * UNIT);
    kvik_memory_stats stats;
    CHECK(kvik_memory_get_stats(&session, &stats) == KVIK_MEMORY_OK);
    CHECK(stats.budget_bytes == 8 * UNIT && stats.held_bytes == 4 * UNIT && stats.group_held_bytes == 4 * UNIT);
    CHECK(kvik_memory_set_limit(&session, 4 * UNIT) == KVIK_MEMORY_OK);
    CHECK(kvik_memory_claim(&session, UNIT, 0) == KVIK_MEMORY_GROUP_LIMIT);
    /* Its own change of the limit is told as well. */
    kvik_memory_notice notice;
    CHECK(kvik_memory_next_notice(&session, PATIENCE_MS, &notice) == KVIK_MEMORY_OK);
    CHECK(notice.kind == KVIK_MEMORY_NOTICE_LIMIT && notice.n_bytes == 4 * UNIT);
    int status;
    do {
        status = kvik_memory_next_notice(&session, 0, &notice);
    } while (status == KVIK_MEMORY_OK);
    CHECK(status == KVIK_MEMORY_NOTHING);
    kvik_memory_disconnect(&session);
    CHECK(kvik_memory_claim(&session, UNIT, 0) == KVIK_MEMORY_LOST && session.held_bytes == 0);
    CHECK(kvik_memory_next_notice(&session, 0, &notice) == KVIK_MEMORY_LOST);
}

/* A session that holds more than its share is asked for what another waits for. */
static void sharing(const char* socket)
{
    kvik_memory_session greedy, modest;
    open_session(&greedy, socket, "greedy");
    /* The end of the session before is seen by the service a little later. */
    CHECK(kvik_memory_claim(&greedy, 8 * UNIT, PATIENCE_MS) == KVIK_MEMORY_OK);
    open_session(&modest, socket, "modest");
    /* Sent, and answered later: the greedy session answers the notice in between. */
    kvik_memory_frame frame;
    kvik_memory_begin_(&modest, &frame, 2);
    kvik_memory_put_(&frame, 2 * UNIT, 8);
    kvik_memory_put_(&frame, PATIENCE_MS, 4);
    CHECK(send(modest.descriptor, frame.bytes, frame.length, 0) == (ssize_t) frame.length);
    kvik_memory_notice notice;
    words = greedy.error;
    do {
        CHECK(kvik_memory_next_notice(&greedy, PATIENCE_MS, &notice) == KVIK_MEMORY_OK);
    } while (notice.kind != KVIK_MEMORY_NOTICE_RECLAIM);
    CHECK(notice.n_bytes == 2 * UNIT);
    CHECK(kvik_memory_give_back(&greedy, notice.n_bytes) == KVIK_MEMORY_OK);
    CHECK(kvik_memory_receive_(&modest, &frame, kvik_memory_now_ms_() + PATIENCE_MS) == KVIK_MEMORY_OK);
    CHECK(kvik_memory_give_back(&modest, 2 * UNIT) == KVIK_MEMORY_OK);
    kvik_memory_disconnect(&greedy);
    kvik_memory_disconnect(&modest);
}

static void ranks(const char* const* sockets)
{
    kvik_memory_session of_rank[2], other;
    open_session(&of_rank[0], sockets[0], "ranks");
    open_session(&of_rank[1], sockets[1], "ranks");
    size_t at_fault = 7;
    CHECK(kvik_memory_claim_all(of_rank, 2, 6 * UNIT, PATIENCE_MS, &at_fault) == KVIK_MEMORY_OK && at_fault == 7);
    CHECK(of_rank[0].held_bytes == 6 * UNIT && of_rank[1].held_bytes == 6 * UNIT);
    CHECK(kvik_memory_give_back_all(of_rank, 2, 4 * UNIT) == KVIK_MEMORY_OK);
    /* The second device has too little: the first keeps nothing of the claim. */
    open_session(&other, sockets[1], "other");
    CHECK(kvik_memory_claim(&other, 4 * UNIT, 0) == KVIK_MEMORY_OK);
    CHECK(kvik_memory_claim_all(of_rank, 2, 4 * UNIT, 0, &at_fault) == KVIK_MEMORY_DEVICE_FULL && at_fault == 1);
    CHECK(of_rank[0].held_bytes == 2 * UNIT && of_rank[1].held_bytes == 2 * UNIT);
    kvik_memory_disconnect(&other);
    CHECK(kvik_memory_claim_all(of_rank, 2, 4 * UNIT, PATIENCE_MS, NULL) == KVIK_MEMORY_OK);
    CHECK(of_rank[0].held_bytes == 6 * UNIT && of_rank[1].held_bytes == 6 * UNIT);
    kvik_memory_disconnect(&of_rank[0]);
    kvik_memory_disconnect(&of_rank[1]);
}

static void refusals(const char* socket)
{
    kvik_memory_session session;
    kvik_memory_options options;
    kvik_memory_options_init(&options);
    words = session.error;
    CHECK(kvik_memory_connect(&session, &options) == KVIK_MEMORY_REFUSED);
    options.socket = "/nowhere/at/all";
    CHECK(kvik_memory_connect(&session, &options) == KVIK_MEMORY_LOST && session.descriptor == -1);
    options.socket = socket;
    /* The service has no group of its own. */
    CHECK(kvik_memory_connect(&session, &options) == KVIK_MEMORY_REFUSED && session.descriptor == -1);
    CHECK(strstr(session.error, "ipc_name") != NULL);
    options.ipc_name = "../escape";
    CHECK(kvik_memory_connect(&session, &options) == KVIK_MEMORY_REFUSED);
}

int main(int argc, char** argv)
{
    CHECK(argc == 3);
    const char* sockets[2] = {argv[1], argv[2]};
    claims(sockets[0]);
    sharing(sockets[0]);
    ranks(sockets);
    refusals(sockets[0]);
    return 0;
}
