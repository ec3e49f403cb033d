// What all kernels share: element types, matrix instructions, copies and barriers.
//
// The host sets when it compiles:
//   WEIGHT, KV   element types of weights and of keys and values: 0 f32, 1 f16, 2 bf16
//   ACTIVATION   what becomes of the first products of an MLP: OUT_GATE or OUT_GELU
//   HEAD_DIM     width of a head
//   GROUP        query heads of one KV head
//   TILED        whether attention runs on matrix instructions: 16-bit keys and values, HEAD_DIM a multiple of 16 up to 128,
//                GROUP up to 64
//
// Sums are written in one fixed order with explicit rounding, and the module is compiled without contraction of
// multiplications and additions: a row's result depends on neither the shape of a pass nor its place in it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The maximum of no scores.
#define LOWEST (-__int_as_float(0x7f800000))

static __device__ __forceinline__ u16 bf16_of(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

static __device__ __forceinline__ u16 f16_of(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ float from_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

struct F32 {
    typedef float Bits;
    static __device__ __forceinline__ float of(float value) { return value; }
    static __device__ __forceinline__ float from(float bits) { return bits; }
};

struct F16 {
    typedef u16 Bits;
    static __device__ __forceinline__ u16 of(float value) { return f16_of(value); }
    static __device__ __forceinline__ float from(u16 bits) { return from_f16(bits); }
    static __device__ __forceinline__ u32 pair(float low, float high) {
        u32 bits;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
    }
    static __device__ __forceinline__ void mma(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Bf16 {
    typedef u16 Bits;
    static __device__ __forceinline__ u16 of(float value) { return bf16_of(value); }
    static __device__ __forceinline__ float from(u16 bits) { return from_bf16(bits); }
    static __device__ __forceinline__ u32 pair(float low, float high) {
        u32 bits;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
    }
    static __device__ __forceinline__ void mma(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

#if WEIGHT == 0
typedef F32 Weight;
#elif WEIGHT == 1
typedef F16 Weight;
#else
typedef Bf16 Weight;
#endif

#if KV == 0
typedef F32 KvType;
#elif KV == 1
typedef F16 KvType;
#else
typedef Bf16 KvType;
#endif

// Two values side by side, the first in the lower half.
template <typename Type>
static __device__ __forceinline__ u32 pair_of(float low, float high) {
    return Type::pair(low, high);
}

// === Activations that a matrix product reads ===
//
// Of 16-bit weights they lie in tiles of eight rows and eight inputs, 128 bytes each: for each group of eight rows, the tiles
// of all inputs behind each other. Of f32 weights they lie in plain rows. Inputs beyond the real ones are zero from the start
// and never written.

static __device__ __forceinline__ void store_input(Weight::Bits *x, int row, int input, int n_padded, float value) {
#if WEIGHT == 0
    x[(u64)row * n_padded + input] = value;
#else
    x[((u64)(row >> 3) * (n_padded >> 3) + (input >> 3)) * 64 + (row & 7) * 8 + (input & 7)] = Weight::of(value);
#endif
}

// Eight neighbouring inputs, the first of them a multiple of eight; those behind `n_inputs` are not written.
static __device__ __forceinline__ void store_eight(Weight::Bits *x, int row, int input, int n_padded, int n_inputs,
                                                   const float (&values)[8]) {
#if WEIGHT != 0
    if (input + 8 <= n_inputs) {
        uint4 bits = make_uint4(pair_of<Weight>(values[0], values[1]), pair_of<Weight>(values[2], values[3]),
                                pair_of<Weight>(values[4], values[5]), pair_of<Weight>(values[6], values[7]));
        *(uint4 *)(x + ((u64)(row >> 3) * (n_padded >> 3) + (input >> 3)) * 64 + (row & 7) * 8) = bits;
        return;
    }
#endif
    #pragma unroll
    for (int idx = 0; idx < 8; idx++) {
        if (input + idx < n_inputs) {
            store_input(x, row, input + idx, n_padded, values[idx]);
        }
    }
}

#if WEIGHT != 0
// Two neighbouring inputs, the first of them even.
static __device__ __forceinline__ void store_input_pair(u16 *x, int row, int input, int n_padded, u32 pair) {
    *(u32 *)(x + ((u64)(row >> 3) * (n_padded >> 3) + (input >> 3)) * 64 + (row & 7) * 8 + (input & 7)) = pair;
}
#endif

// === Weights ===
//
// 16-bit weights lie in tiles of sixteen outputs and sixteen inputs, 512 bytes each: for each group of sixteen outputs, the
// tiles of all inputs behind each other. A tile is four of eight by eight, 128 bytes each: the first eight outputs with the
// first eight inputs, the same outputs with the other inputs, then the other outputs. f32 weights lie in plain rows.

static __device__ __forceinline__ u64 weight_index(int output, int input, int n_padded) {
#if WEIGHT == 0
    return (u64)output * n_padded + input;
#else
    int part = (output >> 3 & 1) * 2 + (input >> 3 & 1);
    u64 tile = (u64)(output >> 4) * (n_padded >> 4) + (input >> 4);
    return tile * 256 + part * 64 + (output & 7) * 8 + (input & 7);
#endif
}

// === Order of kernels ===
//
// A kernel is started while the one before it still runs. Each lets the next be started as soon as all of its own blocks run, and
// touches nothing that others write before all kernels before it are done. Every block waits, so a kernel that is done has waited
// for all before it.

static __device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

static __device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// What a kernel begins with that prepares nothing.
static __device__ __forceinline__ void begin_kernel() {
    let_next_start();
    wait_for_kernels_before();
}

// === Shared memory, copies and barriers ===

extern __shared__ __align__(1024) u8 shared[];

static __device__ __forceinline__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

static __device__ __forceinline__ void barrier_init(u64 *barrier, u32 n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_expect(u64 *barrier, u32 n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
                 : "memory");
}

static __device__ __forceinline__ void barrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

static __device__ __forceinline__ void barrier_wait(u64 *barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred is_done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
        "@is_done bra done;\n"
        "bra wait;\n"
        "done:\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Copies consecutive bytes, a multiple of sixteen, to shared memory; the barrier counts them.
static __device__ __forceinline__ void copy_bulk(void *target, const void *source, u32 n_bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(n_bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Names a tensor of three dimensions to the copy engine; the host fills it.
struct __align__(64) TensorMap {
    u64 words[16];
};

// Copies a box of a tensor to shared memory; what lies outside of the tensor is zero. The barrier counts all bytes of the box.
static __device__ __forceinline__ void copy_box(void *target, const TensorMap *map, int x, int y, int z, u64 *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(target)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
        : "memory");
}

// Copies sixteen bytes to shared memory, or fills them with zeros.
static __device__ __forceinline__ void copy_async(u32 target, const void *source, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(is_there ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N_LATER>
static __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N_LATER) : "memory");
}

static __device__ __forceinline__ void load_tiles(u32 (&tiles)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void load_tiles_transposed(u32 (&tiles)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance >>= 1) {
        value = __fadd_rn(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
}

static __device__ __forceinline__ float warp_max(float value) {
    for (int distance = 16; distance > 0; distance >>= 1) {
        value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
}

// === Matrix instructions of a warpgroup: queued, then waited for ===

static __device__ __forceinline__ void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

static __device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N_LATER>
static __device__ __forceinline__ void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N_LATER) : "memory");
}
