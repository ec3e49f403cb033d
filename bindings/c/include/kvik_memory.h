/*
 * Grants of a device's memory over a unix socket, from `kvik memory serve`: for an engine that cannot link
 * libkvik. Everything is in this header, which needs Linux and no library; with -std=c11 it needs -D_GNU_SOURCE too.
 *
 * A session is a member of the device's ledger. The engine claims a grant, then creates memory by itself; it
 * releases the memory, then gives the grant back. Grants belong to the connection: when it ends, whatever the
 * reason, all go back. After KVIK_MEMORY_LOST the session is over: release the memory and connect again.
 *
 * An engine of several ranks has a session with the service of each rank's device; kvik_memory_claim_all claims
 * of all of them or of none.
 *
 * A session is for one thread at a time. session->error has words about the last call that was not OK.
 */

#ifndef KVIK_MEMORY_H
#define KVIK_MEMORY_H

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What grants are multiples of. */
#define KVIK_MEMORY_UNIT_BYTES ((uint64_t) 2 << 20)

/* As a limit: all that the device has. */
#define KVIK_MEMORY_UNLIMITED UINT64_MAX

#define KVIK_MEMORY_VERSION 1
#define KVIK_MEMORY_MAX_TEXT_BYTES 512

/* What came of a call. Below zero is an error. */
enum {
    KVIK_MEMORY_OK = 0,
    /* Nothing is held of what was claimed: the device is full, the group is at its limit, or others that are below
     * their share wait. */
    KVIK_MEMORY_DEVICE_FULL = 1,
    KVIK_MEMORY_GROUP_LIMIT = 2,
    KVIK_MEMORY_OVER_SHARE = 3,
    /* There was no notice in time. */
    KVIK_MEMORY_NOTHING = 4,
    /* The service refused the request; nothing changed. */
    KVIK_MEMORY_REFUSED = -1,
    /* The session is over, and its grants are gone. */
    KVIK_MEMORY_LOST = -2
};

/* How a session is opened; kvik_memory_options_init fills in the defaults. */
typedef struct kvik_memory_options {
    const char* socket;   /* where the service listens */
    const char* ipc_name; /* the group; NULL, the default, is that of the service */
    const char* label;    /* what tools call this engine; NULL is "client" */
    /* The policy of the group, if it does not exist yet. */
    uint64_t min_bytes;
    uint64_t max_bytes; /* default KVIK_MEMORY_UNLIMITED */
    uint32_t weight;    /* default 1 */
    uint32_t priority;  /* default 0 */
} kvik_memory_options;

typedef struct kvik_memory_session {
    int descriptor; /* -1 when the session is over */
    uint32_t n_requests;
    /* What the session had after the last request. */
    uint64_t held_bytes;
    uint64_t claimable_bytes; /* what it may hold in all now */
    uint64_t limit_bytes;     /* what it may hold if others gave back all they can */
    /* Notices that came between replies; one of a kind is kept. */
    uint64_t reclaim_bytes;
    uint64_t new_limit_bytes;
    int has_reclaim;
    int has_new_limit;
    char error[KVIK_MEMORY_MAX_TEXT_BYTES + 128];
} kvik_memory_session;

/* What the device has. */
typedef struct kvik_memory_stats {
    uint64_t budget_bytes;
    uint64_t held_bytes;
    uint64_t group_held_bytes;
} kvik_memory_stats;

enum kvik_memory_notice_kind { KVIK_MEMORY_NOTICE_RECLAIM = 1, KVIK_MEMORY_NOTICE_LIMIT = 2 };

/* Reclaim: others wait for n_bytes of what this session holds. Limit: the group may hold n_bytes now. */
typedef struct kvik_memory_notice {
    enum kvik_memory_notice_kind kind;
    uint64_t n_bytes;
} kvik_memory_notice;

static inline void kvik_memory_options_init(kvik_memory_options* options)
{
    memset(options, 0, sizeof *options);
    options->max_bytes = KVIK_MEMORY_UNLIMITED;
    options->weight = 1;
}

/* === What follows up to kvik_memory_connect is for this header alone. === */

typedef struct kvik_memory_frame {
    unsigned char bytes[1536];
    size_t length; /* of what was written, or received */
    size_t place;  /* of what is read next */
} kvik_memory_frame;

static inline void kvik_memory_put_(kvik_memory_frame* frame, uint64_t number, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; ++i) {
        frame->bytes[frame->length++] = (unsigned char) (number >> (8 * i));
    }
}

static inline void kvik_memory_put_text_(kvik_memory_frame* frame, const char* text)
{
    size_t n_bytes = strlen(text);
    kvik_memory_put_(frame, n_bytes, 2);
    memcpy(frame->bytes + frame->length, text, n_bytes);
    frame->length += n_bytes;
}

/* Zero where the frame has too few bytes, which its place beyond the length then tells. */
static inline uint64_t kvik_memory_take_(kvik_memory_frame* frame, size_t n_bytes)
{
    uint64_t number = 0;
    for (size_t i = 0; i < n_bytes; ++i) {
        if (frame->place < frame->length) {
            number |= (uint64_t) frame->bytes[frame->place] << (8 * i);
        }
        ++frame->place;
    }
    return number;
}

static inline int kvik_memory_lose_(kvik_memory_session* session, const char* what, const char* why)
{
    snprintf(session->error, sizeof session->error, "%s: %s", what, why);
    if (session->descriptor >= 0) {
        close(session->descriptor);
        session->descriptor = -1;
    }
    session->held_bytes = 0;
    return KVIK_MEMORY_LOST;
}

static inline int kvik_memory_refuse_(kvik_memory_session* session, const char* why)
{
    snprintf(session->error, sizeof session->error, "%s", why);
    return KVIK_MEMORY_REFUSED;
}

static inline int64_t kvik_memory_now_ms_(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Receives one frame; KVIK_MEMORY_NOTHING when the deadline passed first. */
static inline int kvik_memory_receive_(kvik_memory_session* session, kvik_memory_frame* frame, int64_t deadline_ms)
{
    for (;;) {
        ssize_t n_bytes = recv(session->descriptor, frame->bytes, sizeof frame->bytes, MSG_DONTWAIT | MSG_TRUNC);
        if (n_bytes > (ssize_t) sizeof frame->bytes) {
            return kvik_memory_lose_(session, "receive", "a frame that is larger than any");
        }
        if (n_bytes > 0) {
            frame->length = (size_t) n_bytes;
            frame->place = 0;
            return KVIK_MEMORY_OK;
        }
        if (n_bytes == 0) {
            return kvik_memory_lose_(session, "receive", "the service ended the connection");
        }
        if (errno != EAGAIN && errno != EINTR) {
            return kvik_memory_lose_(session, "receive", strerror(errno));
        }
        int64_t left_ms = deadline_ms - kvik_memory_now_ms_();
        if (left_ms < 0) {
            return KVIK_MEMORY_NOTHING;
        }
        struct pollfd readable = {session->descriptor, POLLIN, 0};
        if (poll(&readable, 1, left_ms > 1000000 ? 1000000 : (int) left_ms + 1) < 0 && errno != EINTR) {
            return kvik_memory_lose_(session, "wait for the service", strerror(errno));
        }
    }
}

/* Reads the head of a frame; the second byte of a notice and of a reply are its kind and its status. */
static inline int kvik_memory_is_(kvik_memory_frame* frame, const char* magic, unsigned* first, unsigned* second)
{
    if (frame->length < 8 || memcmp(frame->bytes, magic, 4) != 0) {
        return 0;
    }
    frame->place = 4;
    if (kvik_memory_take_(frame, 2) != KVIK_MEMORY_VERSION) {
        return 0;
    }
    *first = (unsigned) kvik_memory_take_(frame, 1);
    *second = (unsigned) kvik_memory_take_(frame, 1);
    return 1;
}

/* Keeps a notice; 0 where the frame is none. */
static inline int kvik_memory_keep_notice_(kvik_memory_session* session, kvik_memory_frame* frame)
{
    unsigned kind, zero;
    if (!kvik_memory_is_(frame, "KVMN", &kind, &zero) || zero != 0 || frame->length != 16) {
        return 0;
    }
    uint64_t n_bytes = kvik_memory_take_(frame, 8);
    if (kind == KVIK_MEMORY_NOTICE_RECLAIM) {
        session->has_reclaim = 1;
        session->reclaim_bytes = n_bytes;
        return 1;
    }
    session->has_new_limit = 1;
    session->new_limit_bytes = n_bytes;
    return kind == KVIK_MEMORY_NOTICE_LIMIT;
}

static inline void kvik_memory_begin_(kvik_memory_session* session, kvik_memory_frame* frame, unsigned op)
{
    frame->length = 0;
    frame->place = 0;
    memcpy(frame->bytes, "KVMQ", 4);
    frame->length = 4;
    kvik_memory_put_(frame, KVIK_MEMORY_VERSION, 2);
    kvik_memory_put_(frame, op, 2);
    kvik_memory_put_(frame, ++session->n_requests, 4);
}

/* Sends a request and waits for its reply, whose numbers behind the standing are next in the frame then. */
static inline int kvik_memory_ask_(kvik_memory_session* session, kvik_memory_frame* frame, uint32_t timeout_ms)
{
    enum { REPLY_WITHIN_MS = 10000 };
    if (session->descriptor < 0) {
        return kvik_memory_lose_(session, "ask the service", "the session is over");
    }
    unsigned op = frame->bytes[6];
    ssize_t n_sent;
    do {
        n_sent = send(session->descriptor, frame->bytes, frame->length, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n_sent < 0 && errno == EINTR);
    if (n_sent < 0) {
        return kvik_memory_lose_(session, "send", strerror(errno));
    }
    int64_t deadline_ms = kvik_memory_now_ms_() + REPLY_WITHIN_MS + timeout_ms;
    for (;;) {
        int received = kvik_memory_receive_(session, frame, deadline_ms);
        if (received == KVIK_MEMORY_NOTHING) {
            return kvik_memory_lose_(session, "receive", "the service did not answer in time");
        }
        if (received != KVIK_MEMORY_OK) {
            return received;
        }
        if (kvik_memory_keep_notice_(session, frame)) {
            continue;
        }
        unsigned answered_op, status;
        if (!kvik_memory_is_(frame, "KVMA", &answered_op, &status) || status > 4) {
            return kvik_memory_lose_(session, "receive", "not a frame of this version");
        }
        uint64_t number = kvik_memory_take_(frame, 4);
        session->held_bytes = kvik_memory_take_(frame, 8);
        session->claimable_bytes = kvik_memory_take_(frame, 8);
        session->limit_bytes = kvik_memory_take_(frame, 8);
        if (frame->place > frame->length) {
            return kvik_memory_lose_(session, "receive", "a frame that is too short");
        }
        if (status == 4) {
            size_t n_bytes = (size_t) kvik_memory_take_(frame, 2);
            if (frame->place + n_bytes != frame->length || n_bytes > KVIK_MEMORY_MAX_TEXT_BYTES) {
                return kvik_memory_lose_(session, "receive", "a frame that is too short");
            }
            snprintf(session->error, sizeof session->error, "the service refused: %.*s", (int) n_bytes,
                (const char*) frame->bytes + frame->place);
            return KVIK_MEMORY_REFUSED;
        }
        if (number != session->n_requests || answered_op != op) {
            return kvik_memory_lose_(session, "receive", "an answer to another request");
        }
        if (status != 0) {
            static const char* const reasons[] = {"the device has no more memory",
                "the limit of the group is reached", "others that are below their share wait for memory"};
            snprintf(session->error, sizeof session->error, "%s", reasons[status - 1]);
        }
        return (int) status;
    }
}

/* === The interface. === */

/* Ends a session; all that it holds goes back. The memory behind it is released. */
static inline void kvik_memory_disconnect(kvik_memory_session* session)
{
    if (session->descriptor >= 0) {
        /* A copy of the descriptor in a forked child would keep the session open. */
        shutdown(session->descriptor, SHUT_RDWR);
        close(session->descriptor);
        session->descriptor = -1;
    }
    session->held_bytes = 0;
}

/* Connects to the service and opens a session. On failure there is nothing to disconnect. */
static inline int kvik_memory_connect(kvik_memory_session* session, const kvik_memory_options* options)
{
    memset(session, 0, sizeof *session);
    session->descriptor = -1;
    const char* ipc_name = options->ipc_name == NULL ? "" : options->ipc_name;
    const char* label = options->label == NULL ? "client" : options->label;
    struct sockaddr_un address;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    if (options->socket == NULL || strlen(options->socket) >= sizeof address.sun_path) {
        return kvik_memory_refuse_(session, "`socket` is NULL or longer than 107 bytes; allowed: a path");
    }
    if (strlen(ipc_name) > KVIK_MEMORY_MAX_TEXT_BYTES || strlen(label) > KVIK_MEMORY_MAX_TEXT_BYTES) {
        return kvik_memory_refuse_(session, "`ipc_name` or `label` is too long; allowed: up to 512 bytes");
    }
    memcpy(address.sun_path, options->socket, strlen(options->socket));
    session->descriptor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (session->descriptor < 0
        || connect(session->descriptor, (const struct sockaddr*) &address, sizeof address) < 0) {
        return kvik_memory_lose_(session, "connect to the memory service", strerror(errno));
    }
    /* The layout of struct ucred, which not every feature level declares. */
    struct {
        int pid;
        unsigned uid;
        unsigned gid;
    } peer = {0, 0, 0};
    socklen_t peer_bytes = sizeof peer;
    if (getsockopt(session->descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) < 0 || peer.uid != geteuid()) {
        return kvik_memory_lose_(session, "connect to the memory service", "it is not run by this user");
    }
    kvik_memory_frame frame;
    kvik_memory_begin_(session, &frame, 1);
    kvik_memory_put_(&frame, options->min_bytes, 8);
    kvik_memory_put_(&frame, options->max_bytes, 8);
    kvik_memory_put_(&frame, options->weight, 4);
    kvik_memory_put_(&frame, options->priority, 4);
    kvik_memory_put_text_(&frame, ipc_name);
    kvik_memory_put_text_(&frame, label);
    int status = kvik_memory_ask_(session, &frame, 0);
    if (status != KVIK_MEMORY_OK) {
        kvik_memory_disconnect(session);
    }
    return status;
}

/*
 * Claims n_bytes, a multiple of 2 MiB, or nothing; waits up to timeout_ms for others to give them back. A value
 * above zero says why there is not enough memory.
 */
static inline int kvik_memory_claim(kvik_memory_session* session, uint64_t n_bytes, uint32_t timeout_ms)
{
    kvik_memory_frame frame;
    kvik_memory_begin_(session, &frame, 2);
    kvik_memory_put_(&frame, n_bytes, 8);
    kvik_memory_put_(&frame, timeout_ms, 4);
    return kvik_memory_ask_(session, &frame, timeout_ms);
}

/* Gives back n_bytes that are held, a multiple of 2 MiB; their memory is released. */
static inline int kvik_memory_give_back(kvik_memory_session* session, uint64_t n_bytes)
{
    kvik_memory_frame frame;
    kvik_memory_begin_(session, &frame, 3);
    kvik_memory_put_(&frame, n_bytes, 8);
    return kvik_memory_ask_(session, &frame, 0);
}

/* Asks for the numbers of the device. */
static inline int kvik_memory_get_stats(kvik_memory_session* session, kvik_memory_stats* stats)
{
    kvik_memory_frame frame;
    kvik_memory_begin_(session, &frame, 4);
    int status = kvik_memory_ask_(session, &frame, 0);
    if (status == KVIK_MEMORY_OK) {
        stats->budget_bytes = kvik_memory_take_(&frame, 8);
        stats->held_bytes = kvik_memory_take_(&frame, 8);
        stats->group_held_bytes = kvik_memory_take_(&frame, 8);
        if (frame.place > frame.length) {
            return kvik_memory_lose_(session, "receive", "a frame that is too short");
        }
    }
    return status;
}

/* Sets the limit of the session's group; what is held above it is asked for, of this session too. */
static inline int kvik_memory_set_limit(kvik_memory_session* session, uint64_t limit_bytes)
{
    kvik_memory_frame frame;
    kvik_memory_begin_(session, &frame, 5);
    kvik_memory_put_(&frame, limit_bytes, 8);
    return kvik_memory_ask_(session, &frame, 0);
}

/*
 * Waits for the next notice, at most timeout_ms; KVIK_MEMORY_NOTHING where there was none. Of several notices of a
 * kind the latest is told. KVIK_MEMORY_LOST is how the end of the service is seen.
 */
static inline int kvik_memory_next_notice(kvik_memory_session* session, uint32_t timeout_ms, kvik_memory_notice* notice)
{
    int64_t deadline_ms = kvik_memory_now_ms_() + timeout_ms;
    while (!session->has_reclaim && !session->has_new_limit) {
        kvik_memory_frame frame;
        if (session->descriptor < 0) {
            return kvik_memory_lose_(session, "wait for a notice", "the session is over");
        }
        int received = kvik_memory_receive_(session, &frame, deadline_ms);
        if (received != KVIK_MEMORY_OK) {
            return received;
        }
        if (!kvik_memory_keep_notice_(session, &frame)) {
            return kvik_memory_lose_(session, "receive", "an answer to no request");
        }
    }
    if (session->has_new_limit) {
        session->has_new_limit = 0;
        notice->kind = KVIK_MEMORY_NOTICE_LIMIT;
        notice->n_bytes = session->new_limit_bytes;
    } else {
        session->has_reclaim = 0;
        notice->kind = KVIK_MEMORY_NOTICE_RECLAIM;
        notice->n_bytes = session->reclaim_bytes;
    }
    return KVIK_MEMORY_OK;
}

/* Gives back n_bytes of every session; of those that fail the first status is returned. */
static inline int kvik_memory_give_back_all(kvik_memory_session* ranks, size_t n_ranks, uint64_t n_bytes)
{
    int status = KVIK_MEMORY_OK;
    for (size_t rank = 0; rank < n_ranks; ++rank) {
        int given = kvik_memory_give_back(&ranks[rank], n_bytes);
        status = status == KVIK_MEMORY_OK ? given : status;
    }
    return status;
}

/*
 * Claims n_bytes of every session, one for each rank, or of none, within timeout_ms in all; *at_fault, which may be
 * NULL, is the rank whose claim did not succeed. Claims are made in the order of the array: engines that have their
 * devices in one order never wait for each other in a circle.
 */
static inline int kvik_memory_claim_all(
    kvik_memory_session* ranks, size_t n_ranks, uint64_t n_bytes, uint32_t timeout_ms, size_t* at_fault)
{
    int64_t deadline_ms = kvik_memory_now_ms_() + timeout_ms;
    for (size_t rank = 0; rank < n_ranks; ++rank) {
        int64_t left_ms = deadline_ms - kvik_memory_now_ms_();
        int status = kvik_memory_claim(&ranks[rank], n_bytes, left_ms < 0 ? 0 : (uint32_t) left_ms);
        if (status != KVIK_MEMORY_OK) {
            /* A session that is lost here has nothing to give back. */
            (void) kvik_memory_give_back_all(ranks, rank, n_bytes);
            if (at_fault != NULL) {
                *at_fault = rank;
            }
            return status;
        }
    }
    return KVIK_MEMORY_OK;
}

#ifdef __cplusplus
}
#endif

#endif /* KVIK_MEMORY_H */
