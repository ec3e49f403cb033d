// Attention over keys and values where they lie: blocks of sixteen tokens, named by a table.
//
// A block of a layer has, for each KV head, its keys `[HEAD_DIM][16]` and then its values `[16][HEAD_DIM]`.
//
// Positions are cut into chunks of 256. A chunk's sums run over its tiles of 64 in rising order, and the chunks are merged in
// rising order, always from position 0: by one warp for many rows, or by a warp for each chunk and `merge_chunks` for few. Both
// do the same operations. What a row does not see adds exactly nothing.

#define TILE_TOKENS 64
#define CHUNK_TILES 4

struct Attention {
    const float *queries; // rows of queries, after rotation
    const KvType::Bits *pages;
    const u32 *tables;
    const int *positions; // of each row
    const int *items;     // see the kernels
    Weight::Bits *out;
    float *partials; // of each slot and KV head: sixteen rows of maximum, sum and HEAD_DIM values
    int query_stride;
    int out_padded;
    int n_kv_heads;
    int window;   // positions that a row sees, itself included; 0: all before it
    float scale;  // of scores, for powers of two
};

#define PARTIAL_FLOATS (HEAD_DIM + 2)

static __device__ __forceinline__ float power_of_two(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

// Sums over a part of the positions, of one row: with `maximum` the largest score, each term is weighted relative to it.
struct Part {
    float maximum;
    float sum;
};

// Weights of two parts that become one; `before` becomes that of both.
static __device__ __forceinline__ void merge_parts(Part &before, Part next, float scale, float &old_weight, float &new_weight) {
    if (next.maximum == LOWEST) {
        old_weight = 1.0f;
        new_weight = 0.0f;
        return;
    }
    float maximum = fmaxf(before.maximum, next.maximum);
    old_weight = power_of_two(__fmul_rn(__fsub_rn(before.maximum, maximum), scale));
    new_weight = power_of_two(__fmul_rn(__fsub_rn(next.maximum, maximum), scale));
    before.maximum = maximum;
    before.sum = __fmaf_rn(next.sum, new_weight, __fmul_rn(before.sum, old_weight));
}

static __device__ __forceinline__ float merged(float before, float next, float old_weight, float new_weight) {
    return __fmaf_rn(next, new_weight, __fmul_rn(before, old_weight));
}

static __device__ __forceinline__ int first_seen(int position, int window) {
    return window == 0 ? 0 : max(0, position + 1 - window);
}

static __device__ __forceinline__ u64 block_elements(int n_kv_heads) { return (u64)n_kv_heads * HEAD_DIM * 32; }

#if TILED

// Whether the copy engine fetches keys and values: the widths of heads that models have.
#define BOXED (HEAD_DIM == 64 || HEAD_DIM == 128)
#define DIM_STEPS (HEAD_DIM / 16)
#define UNITS (HEAD_DIM / 8)
#define TILE_BYTES (TILE_TOKENS * HEAD_DIM * 2)

// Where the sixteen bytes of half a block's tokens in one dimension of the keys lie, so that eight dimensions are read at once. The
// copy engine writes lines of 32 bytes so.
static __device__ __forceinline__ u32 key_unit(int block, int dim, int half) {
    return ((block * HEAD_DIM + dim) * 2 + (half ^ (dim >> 2 & 1))) * 16;
}

// Where eight dimensions of the values of a token lie, so that eight tokens are read at once.
static __device__ __forceinline__ u32 value_unit(int token, int unit) {
#if BOXED
    // As the copy engine writes lines of 128 bytes: of a block, the first 64 dimensions before the others.
    return ((token / 16 * (UNITS / 8) + unit / 8) * 128 + token % 16 * 8 + (unit % 8 ^ (token & 7))) * 16;
#else
    int turned = unit;
    if (UNITS % 8 == 0) {
        turned = unit ^ (token & 7);
    } else if (UNITS == 4) {
        turned = unit ^ (token >> 1 & 3);
    } else if (UNITS == 2) {
        turned = unit ^ (token >> 2 & 1);
    }
    return (token * UNITS + turned) * 16;
#endif
}

#if BOXED

// Has the copy engine fetch the keys and values of a tile, of which `n_blocks` blocks are there. `block` is that of this lane of
// the warp: each has the keys or the values of one.
static __device__ __forceinline__ void copy_boxes(const TensorMap *keys_map, const TensorMap *values_map, int head, int n_kv_heads,
                                                  u32 block, int n_blocks, u8 *target, u64 *filled) {
    int lane = threadIdx.x % 32;
    int first = lane / 2;
    if (lane == 0) {
        barrier_expect(filled, n_blocks * HEAD_DIM * 64);
    }
    __syncwarp();
    u8 *place = target + first * HEAD_DIM * 32;
    int at = block * n_kv_heads + head;
    if (first < n_blocks && lane % 2 == 0) {
        copy_box(place, keys_map, 0, 0, at, filled);
    } else if (first < n_blocks) {
        copy_box(place + TILE_BYTES, values_map, 0, at * 32 + 16, 0, filled);
    }
}

// The block of this lane in a tile; `n_blocks` are in the table.
static __device__ __forceinline__ u32 block_of_lane(const u32 *table, int tile, int n_blocks) {
    int lane = threadIdx.x % 32;
    return lane < 8 && tile * 4 + lane / 2 < n_blocks ? table[tile * 4 + lane / 2] : 0;
}

// Values behind `last` were never written, or are of another tile: they become zeros. Their weights are zero already, but what lies
// there may not be a number.
template <int N_THREADS>
static __device__ __forceinline__ void clear_behind(int last, u8 *values) {
    int n_there = last % TILE_TOKENS + 1;
    for (int idx = threadIdx.x % N_THREADS; idx < (TILE_TOKENS - n_there) * UNITS; idx += N_THREADS) {
        *(uint4 *)(values + value_unit(n_there + idx / UNITS, idx % UNITS)) = make_uint4(0, 0, 0, 0);
    }
}

#else

// Copies keys and values of one tile; what lies behind `last` was never written and becomes zeros.
template <int N_THREADS>
static __device__ __forceinline__ void copy_tile(const Attention &attention, const u32 *table, int kv_head, int tile, int last,
                                                 u32 target) {
    u64 stride = block_elements(attention.n_kv_heads);
    const u16 *head = attention.pages + (u64)kv_head * HEAD_DIM * 32;
    #pragma unroll 8
    for (int first = 0; first < TILE_TOKENS * UNITS; first += N_THREADS) {
        int unit = first + threadIdx.x;
        int block = unit / (HEAD_DIM * 2);
        int at = unit % (HEAD_DIM * 2);
        int token = tile * TILE_TOKENS + block * 16;
        bool is_there = token <= last;
        const u16 *source = is_there ? head + table[token / 16] * stride + at * 8 : head;
        copy_async(target + key_unit(block, at >> 1, at & 1), source, is_there);
    }
    #pragma unroll 8
    for (int first = 0; first < TILE_TOKENS * UNITS; first += N_THREADS) {
        int unit = first + threadIdx.x;
        int at = unit / UNITS;
        int token = tile * TILE_TOKENS + at;
        bool is_there = token <= last;
        const u16 *source =
            is_there ? head + table[token / 16] * stride + HEAD_DIM * 16 + (token % 16) * HEAD_DIM + unit % UNITS * 8 : head;
        copy_async(target + TILE_BYTES + value_unit(at, unit % UNITS), source, is_there);
    }
    copy_commit();
}

#endif

// What a warp computes: sixteen rows of queries, of which a thread has parts of two.
struct Rows {
    u32 queries[DIM_STEPS][4];
    int position[2]; // -1 for a row that does not exist
};

// The weights of a tile as the first operand of a matrix instruction.
static __device__ __forceinline__ void pack_weights(const float (&scores)[8][4], u32 (&weights)[4][4]) {
    #pragma unroll
    for (int step = 0; step < 4; step++) {
        weights[step][0] = pair_of<KvType>(scores[step * 2][0], scores[step * 2][1]);
        weights[step][1] = pair_of<KvType>(scores[step * 2][2], scores[step * 2][3]);
        weights[step][2] = pair_of<KvType>(scores[step * 2 + 1][0], scores[step * 2 + 1][1]);
        weights[step][3] = pair_of<KvType>(scores[step * 2 + 1][2], scores[step * 2 + 1][3]);
    }
}

// The sums of a row over its tiles, of which each thread has its own columns.
static __device__ __forceinline__ void finish_parts(Part (&parts)[2]) {
    #pragma unroll
    for (int row = 0; row < 2; row++) {
        parts[row].sum = __fadd_rn(parts[row].sum, __shfl_xor_sync(~0u, parts[row].sum, 1));
        parts[row].sum = __fadd_rn(parts[row].sum, __shfl_xor_sync(~0u, parts[row].sum, 2));
    }
}

// One warp's sums over the tiles of one chunk.
struct ChunkSums {
    float values[UNITS][4];
    Part parts[2];

    __device__ __forceinline__ void clear() {
        clear_values();
        clear_parts();
    }

    __device__ __forceinline__ void clear_values() {
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            #pragma unroll
            for (int idx = 0; idx < 4; idx++) {
                values[unit][idx] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void clear_parts() {
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            parts[row].maximum = LOWEST;
            parts[row].sum = 0.0f;
        }
    }

    // Turns the scores of a tile into weights; what was summed before comes to their scale by `shrinks`. With `IS_WHOLE` the rows
    // see all of the tile.
    template <bool IS_WHOLE>
    __device__ __forceinline__ void weigh(const Attention &attention, const Rows &rows, int tile, float (&scores)[8][4],
                                          float (&shrinks)[2]) {
        int lane = threadIdx.x % 32;
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            int position = rows.position[row];
            int seen_from = first_seen(position, attention.window);
            // Four at a time: a chain of sixteen would be waited for.
            float largest[4];
            #pragma unroll
            for (int column = 0; column < 8; column++) {
                #pragma unroll
                for (int next = 0; next < 2; next++) {
                    int token = tile * TILE_TOKENS + column * 8 + lane % 4 * 2 + next;
                    float &score = scores[column][row * 2 + next];
                    if (!IS_WHOLE) {
                        score = token <= position && token >= seen_from ? score : LOWEST;
                    }
                    int at = (column * 2 + next) % 4;
                    largest[at] = column < 2 ? score : fmaxf(largest[at], score);
                }
            }
            float maximum = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
            maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
            maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
            maximum = fmaxf(maximum, parts[row].maximum);
            float base = maximum == LOWEST ? 0.0f : maximum;
            float shrink = power_of_two(__fmul_rn(__fsub_rn(parts[row].maximum, base), attention.scale));
            float offset = -__fmul_rn(base, attention.scale);
            float sums[4];
            #pragma unroll
            for (int column = 0; column < 8; column++) {
                #pragma unroll
                for (int next = 0; next < 2; next++) {
                    float &score = scores[column][row * 2 + next];
                    score = power_of_two(__fmaf_rn(score, attention.scale, offset));
                    int at = (column * 2 + next) % 4;
                    sums[at] = column < 2 ? score : __fadd_rn(sums[at], score);
                }
            }
            float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
            parts[row].maximum = maximum;
            parts[row].sum = __fmaf_rn(parts[row].sum, shrink, sum);
            shrinks[row] = shrink;
        }
    }

    // Adds a tile that lies at `keys` in shared memory, its values behind it.
    __device__ __forceinline__ void add_tile(const Attention &attention, const Rows &rows, int tile, u32 keys) {
        int lane = threadIdx.x % 32;
        float scores[8][4];
        #pragma unroll
        for (int column = 0; column < 8; column++) {
            #pragma unroll
            for (int idx = 0; idx < 4; idx++) {
                scores[column][idx] = 0.0f;
            }
        }
        #pragma unroll
        for (int step = 0; step < DIM_STEPS; step++) {
            #pragma unroll
            for (int block = 0; block < 4; block++) {
                u32 tiles[4];
                int dim = step * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
                load_tiles_transposed(tiles, keys + key_unit(block, dim, lane >> 4));
                KvType::mma(scores[block * 2], rows.queries[step], tiles[0], tiles[1]);
                KvType::mma(scores[block * 2 + 1], rows.queries[step], tiles[2], tiles[3]);
            }
        }
        u32 weights[4][4];
        float shrinks[2];
        weigh<false>(attention, rows, tile, scores, shrinks);
        pack_weights(scores, weights);
        rescale(shrinks);
        #pragma unroll
        for (int step = 0; step < 4; step++) {
            #pragma unroll
            for (int unit = 0; unit < UNITS; unit += 2) {
                u32 tiles[4];
                int token = step * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
                load_tiles_transposed(tiles, keys + TILE_BYTES + value_unit(token, unit + (lane >> 4)));
                KvType::mma(values[unit], weights[step], tiles[0], tiles[1]);
                KvType::mma(values[unit + 1], weights[step], tiles[2], tiles[3]);
            }
        }
    }

    __device__ __forceinline__ void rescale(const float (&shrinks)[2]) {
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            #pragma unroll
            for (int idx = 0; idx < 4; idx++) {
                values[unit][idx] = __fmul_rn(values[unit][idx], shrinks[idx / 2]);
            }
        }
    }
};

// One warp's sums over chunks.
struct Totals {
    float values[UNITS][4];
    Part parts[2];

    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            #pragma unroll
            for (int idx = 0; idx < 4; idx++) {
                values[unit][idx] = 0.0f;
            }
        }
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            parts[row].maximum = LOWEST;
            parts[row].sum = 0.0f;
        }
    }

    // Adds the values of a chunk with its parts, which are finished.
    __device__ __forceinline__ void merge(const ChunkSums &chunk, const Part (&chunk_parts)[2], float scale) {
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            float old_weight, new_weight;
            merge_parts(parts[row], chunk_parts[row], scale, old_weight, new_weight);
            #pragma unroll
            for (int unit = 0; unit < UNITS; unit++) {
                #pragma unroll
                for (int next = 0; next < 2; next++) {
                    float &value = values[unit][row * 2 + next];
                    value = merged(value, chunk.values[unit][row * 2 + next], old_weight, new_weight);
                }
            }
        }
    }

    // Writes what the rows have seen; those of the warp begin with query `first` of the item's.
    __device__ __forceinline__ void store(const Attention &attention, int first_row, int n_rows, int kv_head, int first) {
        int lane = threadIdx.x % 32;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = first + lane / 4 + half * 8;
            int row = query / GROUP;
            if (row >= n_rows) {
                continue;
            }
            float inverse = __fdiv_rn(1.0f, parts[half].sum);
            int column = (kv_head * GROUP + query % GROUP) * HEAD_DIM + lane % 4 * 2;
            #pragma unroll
            for (int unit = 0; unit < UNITS; unit++) {
                float low = __fmul_rn(values[unit][half * 2], inverse);
                float high = __fmul_rn(values[unit][half * 2 + 1], inverse);
#if WEIGHT == 0
                store_input(attention.out, first_row + row, column + unit * 8, attention.out_padded, low);
                store_input(attention.out, first_row + row, column + unit * 8 + 1, attention.out_padded, high);
#else
                u32 pair = pair_of<Weight>(low, high);
                store_input_pair(attention.out, first_row + row, column + unit * 8, attention.out_padded, pair);
#endif
            }
        }
    }
};

// The rows of a warp begin with query `first` of those of the item: all heads of a token that share the KV head, then the next.
static __device__ __forceinline__ void load_rows(const Attention &attention, int first_row, int n_rows, int kv_head, int first,
                                                 Rows &rows) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = first + lane / 4 + half * 8;
        int row = query / GROUP;
        bool is_there = row < n_rows;
        rows.position[half] = is_there ? attention.positions[first_row + row] : -1;
        const float *values = attention.queries + (u64)(first_row + (is_there ? row : 0)) * attention.query_stride +
                              (kv_head * GROUP + query % GROUP) * HEAD_DIM + lane % 4 * 2;
        #pragma unroll
        for (int step = 0; step < DIM_STEPS; step++) {
            #pragma unroll
            for (int next = 0; next < 2; next++) {
                float2 pair = *(const float2 *)(values + step * 16 + next * 8);
                rows.queries[step][half + next * 2] = is_there ? pair_of<KvType>(pair.x, pair.y) : 0;
            }
        }
    }
}

#if !BOXED

// Items of four: first row, rows, where the table starts, number of items (unused). Four warps take 64 queries.
extern "C" __global__ void __launch_bounds__(128) attend_many(const __grid_constant__ Attention attention) {
    begin_kernel();
    // The last items see the most positions: they begin first.
    const int *item = attention.items + (gridDim.x - 1 - blockIdx.x) * 4;
    int first_row = item[0];
    int n_rows = item[1];
    const u32 *table = attention.tables + item[2];
    int kv_head = blockIdx.y;
    int warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    Rows rows;
    load_rows(attention, first_row, n_rows, kv_head, warp * 16, rows);
    int last = attention.positions[first_row + n_rows - 1];
    int tile = first_seen(attention.positions[first_row], attention.window) / TILE_TOKENS;
    int last_tile = last / TILE_TOKENS;
    u32 place = shared_address(shared);

    Totals totals;
    totals.clear();
    ChunkSums chunk;
    chunk.clear();
    copy_tile<128>(attention, table, kv_head, tile, last, place);
    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        if (tile < last_tile) {
            copy_tile<128>(attention, table, kv_head, tile + 1, last, place + (stage ^ 1) * 2 * TILE_BYTES);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        chunk.add_tile(attention, rows, tile, place + stage * 2 * TILE_BYTES);
        __syncthreads();
        if (tile % CHUNK_TILES == CHUNK_TILES - 1 || tile == last_tile) {
            finish_parts(chunk.parts);
            totals.merge(chunk, chunk.parts, attention.scale);
            chunk.clear();
        }
    }
    totals.store(attention, first_row, n_rows, kv_head, warp * 16);
}

#endif

// Items of four: first row, rows, where the table starts, chunk. One warp takes sixteen queries over one chunk; its slot is its
// place among the items.
#if BOXED
extern "C" __global__ void __launch_bounds__(32)
attend_chunk(const __grid_constant__ Attention attention, const __grid_constant__ TensorMap keys_map,
             const __grid_constant__ TensorMap values_map) {
#else
extern "C" __global__ void __launch_bounds__(32) attend_chunk(const __grid_constant__ Attention attention) {
#endif
    begin_kernel();
    const int *item = attention.items + blockIdx.x * 4;
    int first_row = item[0];
    int n_rows = item[1];
    // An item that fills the list up.
    if (n_rows == 0) {
        return;
    }
    const u32 *table = attention.tables + item[2];
    int kv_head = blockIdx.y;
    int lane = threadIdx.x;
    int last = attention.positions[first_row + n_rows - 1];
    int tile = item[3] * CHUNK_TILES;
    int last_tile = min(last / TILE_TOKENS, tile + CHUNK_TILES - 1);
    tile = max(tile, first_seen(attention.positions[first_row], attention.window) / TILE_TOKENS);
    u32 place = shared_address(shared);
    Rows rows;
    ChunkSums chunk;
    chunk.clear();
    // Nothing of a chunk before the window is seen: then there is no tile.
#if BOXED
    u64 *filled = (u64 *)(shared + 2 * 2 * TILE_BYTES);
    if (lane == 0) {
        barrier_init(filled, 1);
        barrier_init(filled + 1, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    int n_blocks = last / 16 + 1;
    auto copy = [&](int tile, int stage) {
        copy_boxes(&keys_map, &values_map, kv_head, attention.n_kv_heads, block_of_lane(table, tile, n_blocks),
                   min(4, n_blocks - tile * 4), shared + stage * 2 * TILE_BYTES, filled + stage);
    };
    for (int stage = 0; stage < 2 && tile + stage <= last_tile; stage++) {
        copy(tile + stage, stage);
    }
    load_rows(attention, first_row, n_rows, kv_head, 0, rows);
    u32 parity = 0;
    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        barrier_wait(filled + stage, parity);
        if (tile == last / TILE_TOKENS) {
            clear_behind<32>(last, shared + stage * 2 * TILE_BYTES + TILE_BYTES);
            __syncwarp();
        }
        chunk.add_tile(attention, rows, tile, place + stage * 2 * TILE_BYTES);
        __syncwarp();
        if (tile + 2 <= last_tile) {
            copy(tile + 2, stage);
        }
        parity ^= stage;
    }
#else
    load_rows(attention, first_row, n_rows, kv_head, 0, rows);
    if (tile <= last_tile) {
        copy_tile<32>(attention, table, kv_head, tile, last, place);
    }
    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        if (tile < last_tile) {
            copy_tile<32>(attention, table, kv_head, tile + 1, last, place + (stage ^ 1) * 2 * TILE_BYTES);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncwarp();
        chunk.add_tile(attention, rows, tile, place + stage * 2 * TILE_BYTES);
        __syncwarp();
    }
#endif
    finish_parts(chunk.parts);
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = lane / 4 + half * 8;
        if (query / GROUP >= n_rows) {
            continue;
        }
        float *partial = attention.partials + (((u64)blockIdx.x * attention.n_kv_heads + kv_head) * 16 + query) * PARTIAL_FLOATS;
        if (lane % 4 == 0) {
            partial[HEAD_DIM] = chunk.parts[half].maximum;
            partial[HEAD_DIM + 1] = chunk.parts[half].sum;
        }
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            float2 pair = {chunk.values[unit][half * 2], chunk.values[unit][half * 2 + 1]};
            *(float2 *)(partial + unit * 8 + lane % 4 * 2) = pair;
        }
    }
}

// Items of four: row, its place in its item of `attend_chunk`, first slot, slots. A block for each query head, a thread for
// each dimension.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) merge_chunks(const __grid_constant__ Attention attention) {
    begin_kernel();
    const int *item = attention.items + blockIdx.x * 4;
    int head = blockIdx.y;
    int kv_head = head / GROUP;
    int query = item[1] * GROUP + head % GROUP;
    int dim = threadIdx.x;
    Part part = {LOWEST, 0.0f};
    float total = 0.0f;
    #pragma unroll 4
    for (int slot = item[2]; slot < item[2] + item[3]; slot++) {
        const float *partial = attention.partials + (((u64)slot * attention.n_kv_heads + kv_head) * 16 + query) * PARTIAL_FLOATS;
        Part next = {partial[HEAD_DIM], partial[HEAD_DIM + 1]};
        float old_weight, new_weight;
        float value = partial[dim];
        merge_parts(part, next, attention.scale, old_weight, new_weight);
        total = merged(total, value, old_weight, new_weight);
    }
    float value = __fmul_rn(total, __fdiv_rn(1.0f, part.sum));
    store_input(attention.out, item[0], head * HEAD_DIM + dim, attention.out_padded, value);
}

#endif
