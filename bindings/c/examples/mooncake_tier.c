/*
 * A tier on Mooncake's store, through Mooncake's own client library.
 *
 * The library of Mooncake's packages (mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda where there is no
 * GPU) exports an interface for Python and none for C, so this runs a Python interpreter inside the process, which it shares
 * with nothing else. Compile it against the Python that has the package:
 *
 *     cc -O2 -shared -fPIC -I bindings/c/include $(python3-config --includes) bindings/c/examples/mooncake_tier.c \
 *         -o /usr/lib/kvik/mooncake_tier.so $(python3-config --ldflags --embed)
 *     kvik store serve --remote 'plugin:///usr/lib/kvik/mooncake_tier.so?master=10.0.0.7:50051&local=10.0.0.8'
 *
 * Options, all with defaults: master (127.0.0.1:50051), metadata (P2PHANDSHAKE), local (127.0.0.1: this machine, as others reach
 * it), protocol (tcp), devices (none), segment_bytes (0: memory that this process gives to the store), buffer_bytes
 * (134217728: at least the longest chunk), prefix (kvik), packages (a folder of Python packages that is looked at first).
 *
 * Mooncake has no ranges for memory that is not registered with it: each chunk is read whole and copied once. Calls of
 * several threads take turns at the interpreter.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kvik_tier.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPTION_BYTES 512
#define NAME_BYTES (OPTION_BYTES + 80)

/* Numbers of Mooncake for "no room", "still being written" and "no such object". */
#define NO_AVAILABLE_HANDLE (-200)
#define REPLICA_IS_NOT_READY (-703)
#define OBJECT_NOT_FOUND (-704)

struct mooncake {
    PyObject *store;
    char prefix[OPTION_BYTES];
};

/* The name of a chunk: prefix/namespace/chunk/rank. */
static void name_of(const struct mooncake *tier, const kvik_tier_key *key, char name[NAME_BYTES]) {
    size_t end = (size_t)snprintf(name, NAME_BYTES, "%s/", tier->prefix);
    for (size_t place = 0; place < 16; place++) {
        end += (size_t)snprintf(name + end, NAME_BYTES - end, "%02x", key->namespace_id[place]);
    }
    end += (size_t)snprintf(name + end, NAME_BYTES - end, "/");
    for (size_t place = 0; place < 16; place++) {
        end += (size_t)snprintf(name + end, NAME_BYTES - end, "%02x", key->chunk[place]);
    }
    snprintf(name + end, NAME_BYTES - end, "/%04x", key->rank);
}

/* The number that a call gave, or INT32_MIN where it gave none; takes the reference. */
static long number_of(PyObject *answer) {
    long number = answer == NULL ? INT32_MIN : PyLong_AsLong(answer);
    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return INT32_MIN;
    }
    return number;
}

static long call_with_name(struct mooncake *tier, const char *method, const kvik_tier_key *key) {
    char name[NAME_BYTES];
    name_of(tier, key, name);
    return number_of(PyObject_CallMethod(tier->store, method, "s", name));
}

static int32_t put_one(struct mooncake *tier, const kvik_tier_put_item *item) {
    long is_there = call_with_name(tier, "is_exist", &item->key);
    if (is_there != 0) {
        return is_there == 1 ? KVIK_TIER_PRESENT : KVIK_TIER_FAILED;
    }
    char name[NAME_BYTES];
    name_of(tier, &item->key, name);
    PyObject *arguments = PyTuple_New((Py_ssize_t)item->n_parts + 1);
    if (arguments == NULL) {
        PyErr_Clear();
        return KVIK_TIER_FAILED;
    }
    PyTuple_SET_ITEM(arguments, 0, PyUnicode_FromString(name));
    for (size_t part_idx = 0; part_idx < item->n_parts; part_idx++) {
        const kvik_tier_part *part = &item->parts[part_idx];
        PyObject *view = PyMemoryView_FromMemory((char *)part->bytes, (Py_ssize_t)part->n_bytes, PyBUF_READ);
        PyTuple_SET_ITEM(arguments, (Py_ssize_t)part_idx + 1, view);
    }
    PyObject *put = PyErr_Occurred() ? NULL : PyObject_GetAttrString(tier->store, "put_parts");
    long status = number_of(put == NULL ? NULL : PyObject_CallObject(put, arguments));
    Py_XDECREF(put);
    Py_DECREF(arguments);
    switch (status) {
    case 0:
        return KVIK_TIER_STORED;
    case NO_AVAILABLE_HANDLE:
        return KVIK_TIER_NO_ROOM;
    default:
        return KVIK_TIER_FAILED;
    }
}

static void put(void *state, kvik_tier_put_item *items, size_t n_items) {
    PyGILState_STATE interpreter = PyGILState_Ensure();
    for (size_t item_idx = 0; item_idx < n_items; item_idx++) {
        items[item_idx].outcome = put_one(state, &items[item_idx]);
    }
    PyGILState_Release(interpreter);
}

/* The bytes of a chunk; NULL where there is none. */
static PyObject *chunk_of(struct mooncake *tier, const kvik_tier_key *key) {
    char name[NAME_BYTES];
    name_of(tier, key, name);
    PyObject *chunk = PyObject_CallMethod(tier->store, "get", "s", name);
    if (chunk != NULL && (!PyBytes_Check(chunk) || PyBytes_GET_SIZE(chunk) == 0)) {
        Py_CLEAR(chunk);
    }
    PyErr_Clear();
    return chunk;
}

static void copy_from(PyObject *chunk, kvik_tier_get_item *item) {
    if (chunk == NULL) {
        item->outcome = KVIK_TIER_MISS;
        return;
    }
    size_t n_bytes = (size_t)PyBytes_GET_SIZE(chunk);
    size_t n_behind = item->offset < n_bytes ? n_bytes - (size_t)item->offset : 0;
    item->n_read = item->n_wanted < n_behind ? item->n_wanted : n_behind;
    if (item->n_read > 0) {
        memcpy(item->buffer, PyBytes_AS_STRING(chunk) + item->offset, item->n_read);
    }
    item->chunk_bytes = n_bytes;
    item->outcome = KVIK_TIER_HIT;
}

static void get(void *state, kvik_tier_get_item *items, size_t n_items) {
    PyGILState_STATE interpreter = PyGILState_Ensure();
    PyObject *chunk = NULL;
    for (size_t item_idx = 0; item_idx < n_items; item_idx++) {
        /* Two ranges of one chunk come one after the other. */
        if (item_idx == 0 || memcmp(&items[item_idx].key, &items[item_idx - 1].key, sizeof(kvik_tier_key)) != 0) {
            Py_XDECREF(chunk);
            chunk = chunk_of(state, &items[item_idx].key);
        }
        copy_from(chunk, &items[item_idx]);
    }
    Py_XDECREF(chunk);
    PyGILState_Release(interpreter);
}

static int32_t contains(void *state, const kvik_tier_key *keys, size_t n_keys, uint8_t *present) {
    PyGILState_STATE interpreter = PyGILState_Ensure();
    int32_t status = 0;
    for (size_t key_idx = 0; key_idx < n_keys && status == 0; key_idx++) {
        long is_there = call_with_name(state, "is_exist", &keys[key_idx]);
        present[key_idx] = is_there == 1;
        status = is_there == 0 || is_there == 1 ? 0 : -1;
    }
    PyGILState_Release(interpreter);
    return status;
}

static int64_t remove_keys(void *state, const kvik_tier_key *keys, size_t n_keys) {
    struct mooncake *tier = state;
    PyGILState_STATE interpreter = PyGILState_Ensure();
    int64_t n_removed = 0;
    for (size_t key_idx = 0; key_idx < n_keys && n_removed >= 0; key_idx++) {
        char name[NAME_BYTES];
        name_of(tier, &keys[key_idx], name);
        /* True: also where a read a moment ago has given it a lease. */
        long status = number_of(PyObject_CallMethod(tier->store, "remove", "sO", name, Py_True));
        if (status == 0) {
            n_removed++;
        } else if (status != OBJECT_NOT_FOUND && status != REPLICA_IS_NOT_READY) {
            n_removed = -1;
        }
    }
    PyGILState_Release(interpreter);
    return n_removed;
}

static void close_store(void *state) {
    struct mooncake *tier = state;
    PyGILState_STATE interpreter = PyGILState_Ensure();
    number_of(PyObject_CallMethod(tier->store, "close", NULL));
    Py_DECREF(tier->store);
    PyGILState_Release(interpreter);
    free(tier);
}

static const kvik_tier_functions FUNCTIONS = {
    .abi_version = KVIK_TIER_ABI_VERSION,
    .struct_bytes = sizeof(kvik_tier_functions),
    .put = put,
    .get = get,
    .contains = contains,
    .remove = remove_keys,
    .flush = NULL,
    .close = close_store,
};

/* Copies the value of an option of `a=b&c=d`, or its default; 0 where it is too long. */
static int option(const char *options, const char *name, const char *fallback, char value[OPTION_BYTES]) {
    size_t name_bytes = strlen(name);
    const char *found = fallback;
    size_t n_bytes = strlen(fallback);
    for (const char *place = options; place != NULL; place = strchr(place, '&')) {
        place += *place == '&';
        if (strncmp(place, name, name_bytes) == 0 && place[name_bytes] == '=') {
            found = place + name_bytes + 1;
            n_bytes = strcspn(found, "&");
        }
    }
    if (n_bytes >= OPTION_BYTES) {
        return 0;
    }
    memcpy(value, found, n_bytes);
    value[n_bytes] = '\0';
    return 1;
}

/* Starts the interpreter of this process, if none runs. */
static void start_python(void) {
    if (Py_IsInitialized()) {
        return;
    }
    /* Modules of Python in C take its functions from the process, where a library that was loaded by another is not seen. */
    Dl_info python;
    if (dladdr((void *)(uintptr_t)&Py_IsInitialized, &python) != 0) {
        dlopen(python.dli_fname, RTLD_NOW | RTLD_GLOBAL);
    }
    Py_InitializeEx(0);
    PyEval_SaveThread();
}

/* Writes why Python has failed. */
static void write_reason(char *message, size_t message_bytes) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    const char *reason = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    snprintf(message, message_bytes, "%s", reason == NULL ? "Python gives no reason" : reason);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
}

/* A store of Mooncake that is set up; NULL and a reason otherwise. */
static PyObject *new_store(const char *options, char *message, size_t message_bytes) {
    char master[OPTION_BYTES], metadata[OPTION_BYTES], local[OPTION_BYTES], protocol[OPTION_BYTES], devices[OPTION_BYTES];
    char segment_bytes[OPTION_BYTES], buffer_bytes[OPTION_BYTES], packages[OPTION_BYTES];
    int is_short = option(options, "master", "127.0.0.1:50051", master) &&
        option(options, "metadata", "P2PHANDSHAKE", metadata) && option(options, "local", "127.0.0.1", local) &&
        option(options, "protocol", "tcp", protocol) && option(options, "devices", "", devices) &&
        option(options, "segment_bytes", "0", segment_bytes) &&
        option(options, "buffer_bytes", "134217728", buffer_bytes) && option(options, "packages", "", packages);
    if (!is_short) {
        snprintf(message, message_bytes, "an option is longer than %d bytes", OPTION_BYTES - 1);
        return NULL;
    }
    PyObject *path = PySys_GetObject("path");
    if (packages[0] != '\0' && path != NULL) {
        PyObject *folder = PyUnicode_DecodeFSDefault(packages);
        if (folder != NULL) {
            PyList_Insert(path, 0, folder);
            Py_DECREF(folder);
        }
    }
    PyObject *module = PyErr_Occurred() ? NULL : PyImport_ImportModule("mooncake.store");
    PyObject *store = module == NULL ? NULL : PyObject_CallMethod(module, "MooncakeDistributedStore", NULL);
    Py_XDECREF(module);
    if (store == NULL) {
        write_reason(message, message_bytes);
        return NULL;
    }
    PyObject *answer = PyObject_CallMethod(
        store, "setup", "ssKKsss", local, metadata, strtoull(segment_bytes, NULL, 10),
        strtoull(buffer_bytes, NULL, 10), protocol, devices, master);
    if (answer == NULL) {
        write_reason(message, message_bytes);
        Py_DECREF(store);
        return NULL;
    }
    long status = number_of(answer);
    if (status != 0) {
        snprintf(message, message_bytes, "Mooncake's setup with master %s gives %ld", master, status);
        Py_DECREF(store);
        return NULL;
    }
    return store;
}

int32_t kvik_tier_open(
    uint32_t abi_version, const char *options, kvik_tier *tier, char *message, size_t message_bytes) {
    if (abi_version != KVIK_TIER_ABI_VERSION) {
        snprintf(message, message_bytes, "version %u is not %d", abi_version, KVIK_TIER_ABI_VERSION);
        return -1;
    }
    struct mooncake *opened = calloc(1, sizeof *opened);
    if (opened == NULL || !option(options, "prefix", "kvik", opened->prefix)) {
        free(opened);
        snprintf(message, message_bytes, "no memory, or a prefix that is too long");
        return -1;
    }
    start_python();
    PyGILState_STATE interpreter = PyGILState_Ensure();
    opened->store = new_store(options, message, message_bytes);
    PyGILState_Release(interpreter);
    if (opened->store == NULL) {
        free(opened);
        return -1;
    }
    tier->functions = &FUNCTIONS;
    tier->state = opened;
    return 0;
}
