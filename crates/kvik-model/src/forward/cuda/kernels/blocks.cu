// Keys and values from outside: segments that take their place.

struct Segment {
    const KvType::Bits *keys; // [n_tokens][n_kv_heads][HEAD_DIM]
    const KvType::Bits *values;
    const float2 *rotation; // how far every key is turned, HEAD_DIM / 2 long
    KvType::Bits *pages;
    const u32 *table;
    int n_kv_heads;
    int first_position;
};

// A block for each token; a thread for each pair of dimensions of each head in turns.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) place_segment(const __grid_constant__ Segment segment) {
    begin_kernel();
    constexpr int HALF = HEAD_DIM / 2;
    int position = segment.first_position + blockIdx.x;
    u64 block = segment.table[position / 16];
    u64 row = (u64)blockIdx.x * segment.n_kv_heads * HEAD_DIM;
    for (int at = threadIdx.x; at < segment.n_kv_heads * HALF; at += ROW_THREADS) {
        int head = at / HALF;
        int dim = at % HALF;
        float2 turn = segment.rotation[dim];
        float x = KvType::from(segment.keys[row + head * HEAD_DIM + dim]);
        float y = KvType::from(segment.keys[row + head * HEAD_DIM + dim + HALF]);
        KvType::Bits *keys = segment.pages + (block * segment.n_kv_heads + head) * HEAD_DIM * 32;
        KvType::Bits *values = keys + HEAD_DIM * 16 + (position % 16) * HEAD_DIM;
        keys[dim * 16 + position % 16] = kept(__fsub_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y)));
        keys[(dim + HALF) * 16 + position % 16] = kept(__fadd_rn(__fmul_rn(y, turn.x), __fmul_rn(x, turn.y)));
        values[dim] = segment.values[row + head * HEAD_DIM + dim];
        values[dim + HALF] = segment.values[row + head * HEAD_DIM + dim + HALF];
    }
}
