// Work on single rows: embedding, normalization, positions, and keys and values on their way into their blocks.

#define ROW_THREADS 256

static __device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[ROW_THREADS / 32];
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < ROW_THREADS / 32; warp++) {
        total = __fadd_rn(total, sums[warp]);
    }
    return total;
}

// Brings words from memory of the host. The copy engine would do it behind the copies of KV that are queued there.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) fetch_words(const u32 *host, u32 *words, int n_words) {
    begin_kernel();
    for (int idx = blockIdx.x * ROW_THREADS + threadIdx.x; idx < n_words; idx += gridDim.x * ROW_THREADS) {
        words[idx] = host[idx];
    }
}

// The embedding of each row's token, and of its position where that is learned.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
embed(const Weight::Bits *embedding, const Weight::Bits *position_embedding, const u32 *tokens, const int *positions, float *hidden,
      int hidden_size, int n_padded) {
    begin_kernel();
    int row = blockIdx.x;
    for (int idx = threadIdx.x; idx < hidden_size; idx += ROW_THREADS) {
        float value = Weight::from(embedding[weight_index(tokens[row], idx, n_padded)]);
        if (position_embedding != nullptr) {
            value = __fadd_rn(value, Weight::from(position_embedding[weight_index(positions[row], idx, n_padded)]));
        }
        hidden[(u64)row * hidden_size + idx] = value;
    }
}

// Eight neighbouring elements of a row.
struct Eight {
    float values[8];

    // Those behind the end of the row are zero.
    __device__ __forceinline__ Eight(const float *row, int first, int n_elements) {
        if (n_elements % 8 == 0) {
            float4 low = *(const float4 *)(row + first), high = *(const float4 *)(row + first + 4);
            values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
            values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
        } else {
            #pragma unroll
            for (int idx = 0; idx < 8; idx++) {
                values[idx] = first + idx < n_elements ? row[first + idx] : 0.0f;
            }
        }
    }
};

// Normalizes rows of the residual stream; the rows named by `chosen`, or all in order. With a shift, mean and variance are
// taken, else the root mean square alone. A thread has eight elements at a time.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
normalize(const float *hidden, const int *chosen, const float *scale, const float *shift, Weight::Bits *out, int hidden_size,
          int n_padded, float epsilon) {
    begin_kernel();
    const float *row = hidden + (u64)(chosen == nullptr ? blockIdx.x : chosen[blockIdx.x]) * hidden_size;
    float mean = 0.0f;
    if (shift != nullptr) {
        float sum = 0.0f;
        for (int first = threadIdx.x * 8; first < hidden_size; first += ROW_THREADS * 8) {
            Eight eight(row, first, hidden_size);
            #pragma unroll
            for (int idx = 0; idx < 8; idx++) {
                sum = __fadd_rn(sum, eight.values[idx]);
            }
        }
        mean = __fdiv_rn(block_sum(sum), (float)hidden_size);
    }
    float squares = 0.0f;
    #pragma unroll 2
    for (int first = threadIdx.x * 8; first < hidden_size; first += ROW_THREADS * 8) {
        Eight eight(row, first, hidden_size);
        #pragma unroll
        for (int idx = 0; idx < 8; idx++) {
            float value = first + idx < hidden_size ? __fsub_rn(eight.values[idx], mean) : 0.0f;
            squares = __fmaf_rn(value, value, squares);
        }
    }
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(block_sum(squares), (float)hidden_size), epsilon)));
    #pragma unroll 2
    for (int first = threadIdx.x * 8; first < hidden_size; first += ROW_THREADS * 8) {
        Eight eight(row, first, hidden_size), scales(scale, first, hidden_size);
        #pragma unroll
        for (int idx = 0; idx < 8; idx++) {
            float &value = eight.values[idx];
            value = __fmul_rn(__fmul_rn(__fsub_rn(value, mean), factor), scales.values[idx]);
            value = shift == nullptr || first + idx >= hidden_size ? value : __fadd_rn(value, shift[first + idx]);
        }
        store_eight(out, blockIdx.x, first, n_padded, hidden_size, eight.values);
    }
}

// Cosine and sine of each row's position times each frequency; the angle is rounded to f32 before, as models are trained.
extern "C" __global__ void rotations(const int *positions, const float *frequencies, float2 *rotations, int n_rows) {
    begin_kernel();
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n_rows * (HEAD_DIM / 2)) {
        return;
    }
    double sine, cosine;
    sincos((double)__fmul_rn((float)positions[at / (HEAD_DIM / 2)], frequencies[at % (HEAD_DIM / 2)]), &sine, &cosine);
    rotations[at] = make_float2((float)cosine, (float)sine);
}

// A value as it is kept. One too large for its type becomes the largest: an infinity would spoil rows that do not see it.
static __device__ __forceinline__ KvType::Bits kept(float value) {
#if KV == 1
    value = fminf(fmaxf(value, -65504.0f), 65504.0f);
#endif
    return KvType::of(value);
}

struct Placing {
    float *rows; // queries, keys and values of each row; queries are changed in place
    const float2 *rotations; // null without
    const float *query_scale; // of heads, null without
    const float *key_scale;
    KvType::Bits *pages;
    const u32 *tables;
    const int *table_starts; // of each row
    const int *positions;
    int n_query_heads;
    int n_kv_heads;
    float epsilon;
};

// A block for each row, a warp for each head in turns: normalizes and rotates queries and keys, and writes keys and values.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) place_rows(const __grid_constant__ Placing placing) {
    begin_kernel();
    constexpr int HALF = HEAD_DIM / 2;
    constexpr int PAIRS = (HALF + 31) / 32;
    int row = blockIdx.x;
    int lane = threadIdx.x % 32;
    int n_heads = placing.n_query_heads + 2 * placing.n_kv_heads;
    int position = placing.positions[row];
    u64 block = placing.tables[placing.table_starts[row] + position / 16];
    KvType::Bits *target = placing.pages + block * placing.n_kv_heads * HEAD_DIM * 32;
    float *values = placing.rows + (u64)row * n_heads * HEAD_DIM;
    for (int head = threadIdx.x / 32; head < n_heads; head += ROW_THREADS / 32) {
        float *at = values + head * HEAD_DIM;
        if (head >= placing.n_query_heads + placing.n_kv_heads) {
            int kv_head = head - placing.n_query_heads - placing.n_kv_heads;
            KvType::Bits *out = target + (u64)kv_head * HEAD_DIM * 32 + HEAD_DIM * 16 + (position % 16) * HEAD_DIM;
            for (int dim = lane; dim < HEAD_DIM; dim += 32) {
                out[dim] = kept(at[dim]);
            }
            continue;
        }
        bool is_query = head < placing.n_query_heads;
        const float *scale = is_query ? placing.query_scale : placing.key_scale;
        float low[PAIRS], high[PAIRS];
        float squares = 0.0f;
        #pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            int dim = pair * 32 + lane;
            low[pair] = dim < HALF ? at[dim] : 0.0f;
            high[pair] = dim < HALF ? at[dim + HALF] : 0.0f;
            squares = __fmaf_rn(high[pair], high[pair], __fmaf_rn(low[pair], low[pair], squares));
        }
        float factor = 1.0f;
        if (scale != nullptr) {
            factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(squares), (float)HEAD_DIM), placing.epsilon)));
        }
        #pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            int dim = pair * 32 + lane;
            if (dim >= HALF) {
                continue;
            }
            float x = low[pair], y = high[pair];
            if (scale != nullptr) {
                x = __fmul_rn(__fmul_rn(x, factor), scale[dim]);
                y = __fmul_rn(__fmul_rn(y, factor), scale[dim + HALF]);
            }
            if (placing.rotations != nullptr) {
                float2 turn = placing.rotations[(u64)row * HALF + dim];
                float turned = __fsub_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y));
                y = __fadd_rn(__fmul_rn(y, turn.x), __fmul_rn(x, turn.y));
                x = turned;
            }
            if (is_query) {
                at[dim] = x;
                at[dim + HALF] = y;
            } else {
                KvType::Bits *out = target + (u64)(head - placing.n_query_heads) * HEAD_DIM * 32 + position % 16;
                out[dim * 16] = kept(x);
                out[(dim + HALF) * 16] = kept(y);
            }
        }
    }
}
