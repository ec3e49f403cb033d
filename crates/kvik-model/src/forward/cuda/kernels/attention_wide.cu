// Many rows by matrix instructions of a warpgroup, for the widths of heads that models have. They read keys and values from shared
// memory once for 64 rows; the sums are those of `ChunkSums`, instruction by instruction.

#if TILED && (HEAD_DIM == 64 || HEAD_DIM == 128)

#define WIDE_STAGES 4
#define WIDE_THREADS 256

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

// Names an operand whose columns lie side by side: tiles of eight steps by eight columns, 128 bytes each, the next eight columns
// behind it, the next eight steps `step_bytes` further.
static __device__ __forceinline__ u64 columns_at(u32 address, u32 step_bytes) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(step_bytes >> 4) << 16 | (u64)(128 >> 4) << 32;
}

// Copies keys and values of one tile into tiles of eight by eight; as `copy_tile` otherwise.
static __device__ __forceinline__ void copy_wide_tile(const Attention &attention, const u32 *table, int kv_head, int tile, int last,
                                                      u32 target) {
    u64 stride = block_elements(attention.n_kv_heads);
    const u16 *head = attention.pages + (u64)kv_head * HEAD_DIM * 32;
    #pragma unroll 4
    for (int first = 0; first < TILE_TOKENS * UNITS; first += WIDE_THREADS) {
        // Eight neighbouring threads take eight dimensions of the same eight tokens: one tile of shared memory.
        int unit = first + threadIdx.x;
        int block = unit / (HEAD_DIM * 2);
        int dim = unit % (HEAD_DIM * 2) / 16 * 8 + unit % 8;
        int half = unit / 8 % 2;
        int token = tile * TILE_TOKENS + block * 16;
        bool is_there = token <= last;
        const u16 *source = is_there ? head + table[token / 16] * stride + dim * 16 + half * 8 : head;
        copy_async(target + ((dim >> 3) * 8 + block * 2 + half) * 128 + (dim & 7) * 16, source, is_there);
    }
    #pragma unroll 4
    for (int first = 0; first < TILE_TOKENS * UNITS; first += WIDE_THREADS) {
        // Eight neighbouring threads take eight tokens of the same eight dimensions, and a warp four such.
        int group = (first + threadIdx.x) / 32;
        int at = group / (UNITS / 4) * 8 + threadIdx.x % 8;
        int unit = group % (UNITS / 4) * 4 + threadIdx.x / 8 % 4;
        int token = tile * TILE_TOKENS + at;
        bool is_there = token <= last;
        const u16 *source =
            is_there ? head + table[token / 16] * stride + HEAD_DIM * 16 + (token % 16) * HEAD_DIM + unit * 8 : head;
        copy_async(target + TILE_BYTES + ((at >> 3) * UNITS + unit) * 128 + (at & 7) * 16, source, is_there);
    }
}

// Writes the queries of an item into tiles of eight by eight, 64 for each warpgroup; those that do not exist are zero.
static __device__ __forceinline__ void stage_queries(const Attention &attention, int first_row, int n_rows, int kv_head, u8 *target) {
    for (int unit = threadIdx.x; unit < WIDE_THREADS / 2 * UNITS; unit += WIDE_THREADS) {
        int query = unit / UNITS;
        int at = unit % UNITS;
        int row = query / GROUP;
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (row < n_rows) {
            const float4 *values = (const float4 *)(attention.queries + (u64)(first_row + row) * attention.query_stride +
                                                    (kv_head * GROUP + query % GROUP) * HEAD_DIM + at * 8);
            float4 low = values[0], high = values[1];
            bits = make_uint4(pair_of<KvType>(low.x, low.y), pair_of<KvType>(low.z, low.w), pair_of<KvType>(high.x, high.y),
                              pair_of<KvType>(high.z, high.w));
        }
        int place = query / 64 * 64 * UNITS + (at * 8 + query % 64 / 8) * 8 + query % 8;
        *(uint4 *)(target + place * 16) = bits;
    }
}

// Queues the scores of a tile.
static __device__ __forceinline__ void queue_scores(float (&scores)[8][4], u32 queries, u32 keys) {
    group_fence();
    #pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        score_mma(scores, columns_at(queries + step * 2048, 1024), columns_at(keys + step * 2048, 1024), step > 0);
    }
    group_commit();
}

// Queues the sums of a tile.
static __device__ __forceinline__ void queue_values(ChunkSums &chunk, const u32 (&weights)[4][4], u32 values) {
    group_fence();
    #pragma unroll
    for (int step = 0; step < 4; step++) {
        VALUE_MMA(chunk.values, weights[step], columns_at(values + step * UNITS * 256, UNITS * 128), 1);
    }
    group_commit();
}

// Items of four: first row, rows, where the table starts, unused. Two warpgroups take 128 queries. The scores of a tile are
// turned into weights while the values of the tile before are summed.
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attend_wide(const __grid_constant__ Attention attention) {
    // The last items see the most positions: they begin first.
    const int *item = attention.items + (gridDim.x - 1 - blockIdx.x) * 4;
    int first_row = item[0];
    int n_rows = item[1];
    const u32 *table = attention.tables + item[2];
    int kv_head = blockIdx.y;
    int warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    Rows rows;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = (warp * 16 + lane / 4 + half * 8) / GROUP;
        rows.position[half] = row < n_rows ? attention.positions[first_row + row] : -1;
    }
    int last = attention.positions[first_row + n_rows - 1];
    int first_tile = first_seen(attention.positions[first_row], attention.window) / TILE_TOKENS;
    int last_tile = last / TILE_TOKENS;
    u32 place = shared_address(shared);
    u8 *staged = shared + WIDE_STAGES * 2 * TILE_BYTES;
    u32 queries = shared_address(staged) + threadIdx.x / 128 * 64 * HEAD_DIM * 2;

    for (int ahead = 0; ahead < WIDE_STAGES - 1; ahead++) {
        if (first_tile + ahead <= last_tile) {
            copy_wide_tile(attention, table, kv_head, first_tile + ahead, last, place + ahead * 2 * TILE_BYTES);
        }
        copy_commit();
    }
    stage_queries(attention, first_row, n_rows, kv_head, staged);
    Totals totals;
    totals.clear();
    ChunkSums chunk;
    chunk.clear();
    float scores[8][4];
    u32 weights[4][4];
    float shrinks[2];
    copy_wait<WIDE_STAGES - 2>();
    // What ordinary threads wrote becomes visible to the matrix instructions.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    queue_scores(scores, queries, place);
    group_wait<0>();
    chunk.weigh(attention, rows, first_tile, scores, shrinks);
    pack_weights(scores, weights);
    int stage = 0;
    for (int tile = first_tile; tile < last_tile; tile++) {
        u32 values = place + stage * 2 * TILE_BYTES + TILE_BYTES;
        int before = stage == 0 ? WIDE_STAGES - 1 : stage - 1;
        stage = stage == WIDE_STAGES - 1 ? 0 : stage + 1;
        copy_wait<WIDE_STAGES - 3>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        // All threads are done with the tile before, whose place the next copy takes.
        __syncthreads();
        int ahead = tile + WIDE_STAGES - 1;
        if (ahead <= last_tile) {
            copy_wide_tile(attention, table, kv_head, ahead, last, place + before * 2 * TILE_BYTES);
        }
        copy_commit();
        bool is_end = tile % CHUNK_TILES == CHUNK_TILES - 1;
        Part ended[2] = {chunk.parts[0], chunk.parts[1]};
        if (is_end) {
            chunk.clear_parts();
        }
        queue_scores(scores, queries, place + stage * 2 * TILE_BYTES);
        queue_values(chunk, weights, values);
        // The scores are there; the sums of this tile may still be under way.
        group_wait<1>();
        chunk.weigh(attention, rows, tile + 1, scores, shrinks);
        group_wait<0>();
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

#endif
