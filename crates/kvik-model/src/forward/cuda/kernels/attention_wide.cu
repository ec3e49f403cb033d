// Many rows by matrix instructions of a warpgroup, for the widths of heads that models have. They read keys and values from shared
// memory once for 64 rows; the sums are those of `ChunkSums`, instruction by instruction.

#if TILED
#if BOXED

#define WIDE_STAGES 5
// Two warpgroups compute, a third copies.
#define WIDE_THREADS 384
#define WIDE_COMPUTING 256

#if KV == 1
#define WIDE_INSTRUCTION(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16"
#else
#define WIDE_INSTRUCTION(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16"
#endif

// Scores of 64 queries and 64 tokens over sixteen dimensions; both lie in shared memory.
static __device__ __forceinline__ void score_mma(float (&sums)[8][4], u64 queries, u64 keys, int is_added) {
    asm volatile(
        "{\n.reg .pred is_added;\nsetp.ne.b32 is_added, %34, 0;\n" WIDE_INSTRUCTION(64) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, is_added, 1, 1, 0, 1;\n}"
        : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]), "+f"(sums[1][0]), "+f"(sums[1][1]),
          "+f"(sums[1][2]), "+f"(sums[1][3]), "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
          "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]), "+f"(sums[4][0]), "+f"(sums[4][1]),
          "+f"(sums[4][2]), "+f"(sums[4][3]), "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
          "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]), "+f"(sums[7][0]), "+f"(sums[7][1]),
          "+f"(sums[7][2]), "+f"(sums[7][3])
        : "l"(queries), "l"(keys), "r"(is_added));
}

#if HEAD_DIM == 64
static __device__ __forceinline__ void group_mma_64(float (&sums)[8][4], const u32 (&a)[4], u64 b, int is_added) {
    asm volatile(
        "{\n.reg .pred is_added;\nsetp.ne.b32 is_added, %37, 0;\n" WIDE_INSTRUCTION(64) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, is_added, 1, 1, 1;\n}"
        : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]), "+f"(sums[1][0]), "+f"(sums[1][1]),
          "+f"(sums[1][2]), "+f"(sums[1][3]), "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
          "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]), "+f"(sums[4][0]), "+f"(sums[4][1]),
          "+f"(sums[4][2]), "+f"(sums[4][3]), "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
          "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]), "+f"(sums[7][0]), "+f"(sums[7][1]),
          "+f"(sums[7][2]), "+f"(sums[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
#else
static __device__ __forceinline__ void group_mma_128(float (&sums)[16][4], const u32 (&a)[4], u64 b, int is_added) {
    asm volatile(
        "{\n.reg .pred is_added;\nsetp.ne.b32 is_added, %69, 0;\n" WIDE_INSTRUCTION(128) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, is_added, 1, 1, 1;\n}"
        : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]), "+f"(sums[1][0]), "+f"(sums[1][1]),
          "+f"(sums[1][2]), "+f"(sums[1][3]), "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
          "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]), "+f"(sums[4][0]), "+f"(sums[4][1]),
          "+f"(sums[4][2]), "+f"(sums[4][3]), "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
          "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]), "+f"(sums[7][0]), "+f"(sums[7][1]),
          "+f"(sums[7][2]), "+f"(sums[7][3]), "+f"(sums[8][0]), "+f"(sums[8][1]), "+f"(sums[8][2]), "+f"(sums[8][3]),
          "+f"(sums[9][0]), "+f"(sums[9][1]), "+f"(sums[9][2]), "+f"(sums[9][3]), "+f"(sums[10][0]), "+f"(sums[10][1]),
          "+f"(sums[10][2]), "+f"(sums[10][3]), "+f"(sums[11][0]), "+f"(sums[11][1]), "+f"(sums[11][2]), "+f"(sums[11][3]),
          "+f"(sums[12][0]), "+f"(sums[12][1]), "+f"(sums[12][2]), "+f"(sums[12][3]), "+f"(sums[13][0]), "+f"(sums[13][1]),
          "+f"(sums[13][2]), "+f"(sums[13][3]), "+f"(sums[14][0]), "+f"(sums[14][1]), "+f"(sums[14][2]), "+f"(sums[14][3]),
          "+f"(sums[15][0]), "+f"(sums[15][1]), "+f"(sums[15][2]), "+f"(sums[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}

#endif

#if HEAD_DIM == 64
#define VALUE_MMA group_mma_64
#else
#define VALUE_MMA group_mma_128
#endif

// What ordinary threads wrote becomes visible to the matrix instructions of their warpgroup.
static __device__ __forceinline__ void warpgroup_wrote() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (threadIdx.x < 128) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
}

// Queries lie in tiles of eight queries by eight dimensions, 128 bytes each: those of the next eight queries behind each other,
// then the next eight dimensions.
static __device__ __forceinline__ u64 queries_at(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(1024 >> 4) << 16 | (u64)(128 >> 4) << 32;
}

// Keys lie as the copy engine writes a block's: a line of sixteen tokens for each dimension, 32 bytes each, the halves exchanged in
// every other four lines. The next sixteen tokens are those of the next block.
static __device__ __forceinline__ u64 keys_at(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(HEAD_DIM * 32 >> 4) << 16 | (u64)(256 >> 4) << 32 | 3ull << 62;
}

// Values lie as the copy engine writes them: a line of 64 dimensions for each token, 128 bytes each, in which the units of sixteen
// bytes are exchanged by the number of the line. Of a block, the first 64 dimensions come before the others.
static __device__ __forceinline__ u64 values_at(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(2048 >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// What a warp of the third warpgroup does: has all tiles fetched, in rising order.
static __device__ __forceinline__ void copy_wide_tiles(const Attention &attention, const TensorMap *keys_map,
                                                       const TensorMap *values_map, const u32 *table, int kv_head, int first_tile,
                                                       int last_tile, int last, u64 *filled, u64 *emptied) {
    int n_blocks = last / 16 + 1;
    u32 block = block_of_lane(table, first_tile, n_blocks);
    int stage = 0;
    u32 parity = 1;
    for (int tile = first_tile; tile <= last_tile; tile++) {
        u32 next = block_of_lane(table, tile + 1, n_blocks);
        barrier_wait(emptied + stage, parity);
        copy_boxes(keys_map, values_map, kv_head, attention.n_kv_heads, block, min(4, n_blocks - tile * 4),
                   shared + stage * 2 * TILE_BYTES, filled + stage);
        block = next;
        if (++stage == WIDE_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Writes the queries of a warpgroup into tiles of eight by eight; those that do not exist are zero.
static __device__ __forceinline__ void stage_queries(const Attention &attention, int first_row, int n_rows, int kv_head, u8 *target) {
    int first = threadIdx.x / 128 * 64;
    for (int idx = threadIdx.x % 128; idx < 64 * UNITS; idx += 128) {
        // Neighbouring threads write side by side.
        int query = idx % 64;
        int at = idx / 64;
        int row = (first + query) / GROUP;
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (row < n_rows) {
            const float4 *values = (const float4 *)(attention.queries + (u64)(first_row + row) * attention.query_stride +
                                                    (kv_head * GROUP + (first + query) % GROUP) * HEAD_DIM + at * 8);
            float4 low = values[0], high = values[1];
            bits = make_uint4(pair_of<KvType>(low.x, low.y), pair_of<KvType>(low.z, low.w), pair_of<KvType>(high.x, high.y),
                              pair_of<KvType>(high.z, high.w));
        }
        int place = (at * 8 + query / 8) * 8 + query % 8;
        *(uint4 *)(target + place * 16) = bits;
    }
}

// Queues the scores of a tile.
static __device__ __forceinline__ void queue_scores(float (&scores)[8][4], u32 queries, u32 keys) {
    group_fence();
    #pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        score_mma(scores, queries_at(queries + step * 2048), keys_at(keys + step * 512), step > 0);
    }
    group_commit();
}

// Queues the sums of a tile.
static __device__ __forceinline__ void queue_values(ChunkSums &chunk, const u32 (&weights)[4][4], u32 values) {
    group_fence();
    #pragma unroll
    for (int step = 0; step < 4; step++) {
        VALUE_MMA(chunk.values, weights[step], values_at(values + step * HEAD_DIM * 32), 1);
    }
    group_commit();
}

// The tiles that all rows of a warp see whole: they need no comparison of positions.
struct WholeTiles {
    int first;
    int last;

    __device__ __forceinline__ WholeTiles(const Attention &attention, const Rows &rows) {
        int lowest = __reduce_min_sync(~0u, min(rows.position[0], rows.position[1]));
        int highest = __reduce_max_sync(~0u, max(rows.position[0], rows.position[1]));
        first = (first_seen(highest, attention.window) + TILE_TOKENS - 1) / TILE_TOKENS;
        last = (lowest + 1) / TILE_TOKENS - 1;
    }

    __device__ __forceinline__ bool has(int tile) const { return first <= tile && tile <= last; }
};

// Items of four: first row, rows, where the table starts, unused. Two warpgroups take 64 queries each and run at their own pace.
// The scores of a tile are turned into weights while the values of the tile before are summed.
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attend_wide(const __grid_constant__ Attention attention,
                                                                         const __grid_constant__ TensorMap keys_map,
                                                                         const __grid_constant__ TensorMap values_map) {
    begin_kernel();
    // The last items see the most positions: they begin first. Blocks that run at a time read different heads.
    const int *item = attention.items + (gridDim.y - 1 - blockIdx.y) * 4;
    int first_row = item[0];
    int n_rows = item[1];
    const u32 *table = attention.tables + item[2];
    int kv_head = blockIdx.x;
    int last = attention.positions[first_row + n_rows - 1];
    int first_tile = first_seen(attention.positions[first_row], attention.window) / TILE_TOKENS;
    int last_tile = last / TILE_TOKENS;
    u8 *staged = shared + WIDE_STAGES * 2 * TILE_BYTES + threadIdx.x / 128 * 64 * HEAD_DIM * 2;
    u64 *filled = (u64 *)(shared + WIDE_STAGES * 2 * TILE_BYTES + 128 * HEAD_DIM * 2);
    u64 *emptied = filled + WIDE_STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < WIDE_STAGES; stage++) {
            barrier_init(filled + stage, 1);
            barrier_init(emptied + stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x >= WIDE_COMPUTING) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < WIDE_COMPUTING + 32) {
            copy_wide_tiles(attention, &keys_map, &values_map, table, kv_head, first_tile, last_tile, last, filled, emptied);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int warp = threadIdx.x / 32;
        int lane = threadIdx.x % 32;
        Rows rows;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = (warp * 16 + lane / 4 + half * 8) / GROUP;
            rows.position[half] = row < n_rows ? attention.positions[first_row + row] : -1;
        }
        WholeTiles whole(attention, rows);
        stage_queries(attention, first_row, n_rows, kv_head, staged);
        warpgroup_wrote();
        u32 place = shared_address(shared);
        u32 queries = shared_address(staged);
        Totals totals;
        totals.clear();
        ChunkSums chunk;
        chunk.clear();
        float scores[8][4];
        u32 weights[4][4];
        float shrinks[2];
        auto weigh = [&](int tile) {
            if (whole.has(tile)) {
                chunk.weigh<true>(attention, rows, tile, scores, shrinks);
            } else {
                chunk.weigh<false>(attention, rows, tile, scores, shrinks);
            }
        };
        int stage = 0;
        u32 parity = 0;
        barrier_wait(filled, 0);
        // Both warpgroups do this for themselves.
        if (first_tile == last_tile) {
            clear_behind<128>(last, shared + TILE_BYTES);
            warpgroup_wrote();
        }
        queue_scores(scores, queries, place);
        group_wait<0>();
        weigh(first_tile);
        pack_weights(scores, weights);
        for (int tile = first_tile; tile < last_tile; tile++) {
            int before = stage;
            u32 values = place + stage * 2 * TILE_BYTES + TILE_BYTES;
            if (++stage == WIDE_STAGES) {
                stage = 0;
                parity ^= 1;
            }
            bool is_end = tile % CHUNK_TILES == CHUNK_TILES - 1;
            Part ended[2] = {chunk.parts[0], chunk.parts[1]};
            if (is_end) {
                chunk.clear_parts();
            }
            barrier_wait(filled + stage, parity);
            if (tile + 1 == last_tile) {
                clear_behind<128>(last, shared + stage * 2 * TILE_BYTES + TILE_BYTES);
                warpgroup_wrote();
            }
            queue_scores(scores, queries, place + stage * 2 * TILE_BYTES);
            queue_values(chunk, weights, values);
            // The scores are there; the sums of the tile before may still be under way.
            group_wait<1>();
            weigh(tile + 1);
            group_wait<0>();
            if (threadIdx.x % 128 == 0) {
                barrier_arrive(emptied + before);
            }
            pack_weights(scores, weights);
            if (is_end) {
                finish_parts(ended);
                totals.merge(chunk, ended, attention.scale);
                chunk.clear_values();
            } else {
                chunk.rescale(shrinks);
            }
        }
        queue_values(chunk, weights, place + stage * 2 * TILE_BYTES + TILE_BYTES);
        group_wait<0>();
        finish_parts(chunk.parts);
        totals.merge(chunk, chunk.parts, attention.scale);
        totals.store(attention, first_row, n_rows, kv_head, warp * 16);
    }
}

#endif
#endif
