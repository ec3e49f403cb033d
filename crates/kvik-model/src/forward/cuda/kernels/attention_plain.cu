#if !TILED

// For f32, and for heads that do not fit matrix instructions. Items of four: first row, rows, where the table starts, unused.
// A warp takes one query; positions come 32 at a time, in rising order.
extern "C" __global__ void __launch_bounds__(128) attend_plain(const __grid_constant__ Attention attention) {
    begin_kernel();
    __shared__ float weights[4][32];
    const int *item = attention.items + blockIdx.x * 4;
    const u32 *table = attention.tables + item[2];
    int head = blockIdx.y;
    int kv_head = head / GROUP;
    int warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    u64 stride = block_elements(attention.n_kv_heads);
    const KvType::Bits *pages = attention.pages + (u64)kv_head * HEAD_DIM * 32;
    for (int row = item[0] + warp; row < item[0] + item[1]; row += 4) {
        int position = attention.positions[row];
        int seen_from = first_seen(position, attention.window);
        const float *query = attention.queries + (u64)row * attention.query_stride + head * HEAD_DIM;
        Part part = {LOWEST, 0.0f};
        float totals[(HEAD_DIM + 31) / 32] = {};
        for (int first = seen_from / 32 * 32; first <= position; first += 32) {
            int token = first + lane;
            bool is_seen = token <= position && token >= seen_from;
            float score = 0.0f;
            if (is_seen) {
                const KvType::Bits *keys = pages + table[token / 16] * stride + token % 16;
                for (int dim = 0; dim < HEAD_DIM; dim++) {
                    score = __fmaf_rn(query[dim], KvType::from(keys[dim * 16]), score);
                }
            }
            score = is_seen ? score : LOWEST;
            float largest = fmaxf(part.maximum, warp_max(score));
            float shrink = power_of_two(__fmul_rn(__fsub_rn(part.maximum, largest), attention.scale));
            float weight = power_of_two(__fmul_rn(__fsub_rn(score, largest), attention.scale));
            part.maximum = largest;
            part.sum = __fmaf_rn(part.sum, shrink, warp_sum(weight));
            weights[warp][lane] = weight;
            __syncwarp();
            int n_tokens = min(32, position + 1 - first);
            #pragma unroll
            for (int unit = 0; unit < (HEAD_DIM + 31) / 32; unit++) {
                int dim = unit * 32 + lane;
                if (dim >= HEAD_DIM) {
                    continue;
                }
                float total = __fmul_rn(totals[unit], shrink);
                for (int at = max(0, seen_from - first); at < n_tokens; at++) {
                    int seen = first + at;
                    const KvType::Bits *values = pages + table[seen / 16] * stride + HEAD_DIM * 16 + (seen % 16) * HEAD_DIM;
                    total = __fmaf_rn(weights[warp][at], KvType::from(values[dim]), total);
                }
                totals[unit] = total;
            }
            __syncwarp();
        }
        float inverse = __fdiv_rn(1.0f, part.sum);
        #pragma unroll
        for (int unit = 0; unit < (HEAD_DIM + 31) / 32; unit++) {
            int dim = unit * 32 + lane;
            if (dim < HEAD_DIM) {
                store_input(attention.out, row, head * HEAD_DIM + dim, attention.out_padded, __fmul_rn(totals[unit], inverse));
            }
        }
    }
}

#endif
