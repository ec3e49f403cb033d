// Matrix products: the rows of a pass times the transpose of a weight matrix.
//
// Every output is one chain of matrix instructions over its inputs in rising order, sixteen at a time, in every variant: the
// shape of a tile decides the speed and no bit of the result. Nothing is split along the inputs.

// What becomes of the outputs.
#define OUT_STORE 0 // f32 rows, replaced
#define OUT_ADD 1   // f32 rows, added to
#define OUT_GATE 2  // silu(gate) * up, as activations; outputs come in turns of eight gates and eight ups
#define OUT_GELU 3  // gelu with tanh, as activations

static __device__ __forceinline__ float silu_gate(float gate, float up) {
    // Approximations of the device, the same in every variant; both are within two units in the last place.
    return __fmul_rn(__fdividef(gate, __fadd_rn(1.0f, __expf(-gate))), up);
}

static __device__ __forceinline__ float gelu_tanh(float value) {
    float cube = __fmul_rn(__fmul_rn(value, value), value);
    float inner = __fmul_rn(0.7978845608028654f, __fmaf_rn(0.044715f, cube, value));
    return __fmul_rn(__fmul_rn(0.5f, value), __fadd_rn(1.0f, tanhf(inner)));
}

struct Product {
    const Weight::Bits *weights;
    const Weight::Bits *inputs;
    const float *bias; // null without
    void *out;
    int n_outputs;
    int n_rows;
    int n_padded_inputs;
    int out_stride; // elements of a row of `out`; of activations, their padded number
    int out_kind;
};

#if WEIGHT != 0

// The sums of one tile of sixteen outputs and eight rows become activations. `output` and `row` are those of sum[0]; sum[1] is
// the next row, sum[2] and sum[3] are eight outputs further.
template <int KIND>
static __device__ __forceinline__ void put_activation(const Product &product, int output, int row, float (&sum)[4], bool has_low,
                                                      bool has_high) {
    if (KIND == OUT_GATE) {
        // Threads of neighbouring features exchange values, so that each writes two features of one row.
        float first = silu_gate(sum[0], sum[2]);
        float second = silu_gate(sum[1], sum[3]);
        bool is_odd = output & 1;
        float got = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
        u32 pair = is_odd ? pair_of<Weight>(got, second) : pair_of<Weight>(first, got);
        int feature = (output >> 4) * 8 + (output & 6);
        row += is_odd;
        if (has_high && row < product.n_rows) {
            store_input_pair((u16 *)product.out, row, feature, product.out_stride, pair);
        }
        return;
    }
    #pragma unroll
    for (int next = 0; next < 2; next++) {
        if (row + next < product.n_rows && has_low) {
            store_input((u16 *)product.out, row + next, output, product.out_stride, gelu_tanh(sum[next]));
        }
        if (row + next < product.n_rows && has_high) {
            store_input((u16 *)product.out, row + next, output + 8, product.out_stride, gelu_tanh(sum[2 + next]));
        }
    }
}

// What a thread holds of one tile goes out; places as in `put_activation`.
static __device__ __forceinline__ void put_tile(const Product &product, int output, int row, float (&sum)[4]) {
    bool has_low = output < product.n_outputs;
    bool has_high = output + 8 < product.n_outputs;
    if (product.bias != nullptr) {
        float low = has_low ? product.bias[output] : 0.0f;
        float high = has_high ? product.bias[output + 8] : 0.0f;
        sum[0] = __fadd_rn(sum[0], low);
        sum[1] = __fadd_rn(sum[1], low);
        sum[2] = __fadd_rn(sum[2], high);
        sum[3] = __fadd_rn(sum[3], high);
    }
    if (product.out_kind == OUT_GATE) {
        put_activation<OUT_GATE>(product, output, row, sum, has_low, has_high);
        return;
    }
    if (product.out_kind == OUT_GELU) {
        put_activation<OUT_GELU>(product, output, row, sum, has_low, has_high);
        return;
    }
    #pragma unroll
    for (int next = 0; next < 2; next++) {
        if (row + next >= product.n_rows) {
            return;
        }
        float *out = (float *)product.out + (u64)(row + next) * product.out_stride + output;
        bool is_added = product.out_kind == OUT_ADD;
        if (has_low) {
            out[0] = is_added ? __fadd_rn(out[0], sum[next]) : sum[next];
        }
        if (has_high) {
            out[8] = is_added ? __fadd_rn(out[8], sum[2 + next]) : sum[2 + next];
        }
    }
}

// A tile of weights as the first operand of a matrix instruction, which names the other outputs before the other inputs.
static __device__ __forceinline__ void load_weights(u32 (&fragment)[4], u32 address) {
    u32 tiles[4];
    load_tiles(tiles, address);
    fragment[0] = tiles[0];
    fragment[1] = tiles[2];
    fragment[2] = tiles[1];
    fragment[3] = tiles[3];
}

// WARPS_O x WARPS_R warps compute, each OUTPUTS tiles of sixteen outputs by ROWS groups of eight rows; one more warp copies
// STEPS tiles of inputs at a time into a ring of N_STAGES. Blocks take tiles of the result in turns until all are done.
template <int WARPS_O, int WARPS_R, int OUTPUTS, int ROWS, int STEPS, int N_STAGES>
static __device__ __forceinline__ void multiply(const Product &product) {
    constexpr int WEIGHT_TILES = WARPS_O * OUTPUTS;
    constexpr int ROW_GROUPS = WARPS_R * ROWS;
    constexpr int WEIGHT_BYTES = WEIGHT_TILES * STEPS * 512;
    constexpr int STAGE_BYTES = WEIGHT_BYTES + ROW_GROUPS * STEPS * 256;
    u64 *filled = (u64 *)(shared + N_STAGES * STAGE_BYTES);
    u64 *emptied = filled + N_STAGES;
    int warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < N_STAGES; stage++) {
            barrier_init(filled + stage, 1);
            barrier_init(emptied + stage, WARPS_O * WARPS_R);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int n_steps = product.n_padded_inputs / 16;
    int n_turns = (n_steps + STEPS - 1) / STEPS;
    int n_weight_tiles = (product.n_outputs + 15) / 16;
    int n_row_groups = (product.n_rows + 7) / 8;
    int n_tiles_o = (n_weight_tiles + WEIGHT_TILES - 1) / WEIGHT_TILES;
    int n_tiles_r = (n_row_groups + ROW_GROUPS - 1) / ROW_GROUPS;
    int n_tiles = n_tiles_o * n_tiles_r;
    int stage = 0;
    u32 parity = 0;

    if (warp == WARPS_O * WARPS_R) {
        auto copy_weights = [&](int tile, int turn, int stage) {
            int n_now = min(STEPS, n_steps - turn * STEPS);
            if (lane == 0) {
                barrier_expect(filled + stage, n_now * (WEIGHT_TILES * 512 + ROW_GROUPS * 256));
            }
            __syncwarp();
            if (lane < WEIGHT_TILES) {
                // What lies beyond the matrix is copied from its end, and its results are dropped.
                int from = min(tile / n_tiles_r * WEIGHT_TILES + lane, n_weight_tiles - 1);
                const Weight::Bits *source = product.weights + ((u64)from * n_steps + turn * STEPS) * 256;
                copy_bulk(shared + stage * STAGE_BYTES + lane * STEPS * 512, source, n_now * 512, filled + stage);
            }
        };
        // Weights are written by no kernel: the first are fetched while the kernels before still run.
        int n_ahead = blockIdx.x < n_tiles ? min(N_STAGES, n_turns) : 0;
        for (int turn = 0; turn < n_ahead; turn++) {
            copy_weights(blockIdx.x, turn, turn);
        }
        wait_for_kernels_before();
        for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
            int first_group = tile % n_tiles_r * ROW_GROUPS;
            for (int turn = 0; turn < n_turns; turn++) {
                if (n_ahead > 0) {
                    n_ahead--;
                } else {
                    barrier_wait(emptied + stage, parity ^ 1);
                    copy_weights(tile, turn, stage);
                }
                if (lane < ROW_GROUPS) {
                    int n_now = min(STEPS, n_steps - turn * STEPS);
                    int from = min(first_group + lane, n_row_groups - 1);
                    const Weight::Bits *source = product.inputs + ((u64)from * n_steps + turn * STEPS) * 128;
                    u8 *place = shared + stage * STAGE_BYTES + WEIGHT_BYTES + lane * STEPS * 256;
                    copy_bulk(place, source, n_now * 256, filled + stage);
                }
                if (++stage == N_STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        return;
    }

    wait_for_kernels_before();
    int warp_o = warp / WARPS_R;
    int warp_r = warp % WARPS_R;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        float sums[OUTPUTS][ROWS][4] = {};
        for (int turn = 0; turn < n_turns; turn++) {
            int n_now = min(STEPS, n_steps - turn * STEPS);
            u32 place = shared_address(shared) + stage * STAGE_BYTES;
            u32 weights = place + warp_o * OUTPUTS * STEPS * 512 + lane * 16;
            u32 inputs = place + WEIGHT_BYTES + warp_r * ROWS * STEPS * 256 + lane * 16;
            barrier_wait(filled + stage, parity);
            auto two_steps = [&](int step) {
                u32 first[OUTPUTS][4], second[OUTPUTS][4];
                #pragma unroll
                for (int output = 0; output < OUTPUTS; output++) {
                    load_weights(first[output], weights + (output * STEPS + step) * 512);
                    load_weights(second[output], weights + (output * STEPS + step + 1) * 512);
                }
                #pragma unroll
                for (int row = 0; row < ROWS; row++) {
                    u32 tiles[4];
                    load_tiles(tiles, inputs + (row * STEPS + step) * 256);
                    #pragma unroll
                    for (int output = 0; output < OUTPUTS; output++) {
                        Weight::mma(sums[output][row], first[output], tiles[0], tiles[1]);
                    }
                    #pragma unroll
                    for (int output = 0; output < OUTPUTS; output++) {
                        Weight::mma(sums[output][row], second[output], tiles[2], tiles[3]);
                    }
                }
            };
            if (n_now == STEPS) {
                #pragma unroll
                for (int step = 0; step < STEPS; step += 2) {
                    two_steps(step);
                }
            } else {
                for (int step = 0; step < n_now; step += 2) {
                    two_steps(step);
                }
            }
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(emptied + stage);
            }
            if (++stage == N_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        int first_output = (tile / n_tiles_r * WEIGHT_TILES + warp_o * OUTPUTS) * 16 + lane / 4;
        int first_row = (tile % n_tiles_r * ROW_GROUPS + warp_r * ROWS) * 8 + lane % 4 * 2;
        #pragma unroll
        for (int row = 0; row < ROWS; row++) {
            #pragma unroll
            for (int output = 0; output < OUTPUTS; output++) {
                put_tile(product, first_output + output * 16, first_row + row * 8, sums[output][row]);
            }
        }
    }
}

// The host's table of variants has the same numbers: threads and bytes of shared memory follow from them.
#define PRODUCT(NAME, WARPS_O, WARPS_R, OUTPUTS, ROWS, STEPS, N_STAGES)                                                      \
    extern "C" __global__ void __launch_bounds__((WARPS_O * WARPS_R + 1) * 32) NAME(const __grid_constant__ Product product) { \
        multiply<WARPS_O, WARPS_R, OUTPUTS, ROWS, STEPS, N_STAGES>(product);                                                 \
    }

PRODUCT(product_8_rows, 2, 1, 1, 1, 16, 5)
PRODUCT(product_16_rows, 2, 1, 1, 2, 8, 8)

#else

// One thread an output: the sum runs over the inputs in rising order.
extern "C" __global__ void __launch_bounds__(256) product_f32(const __grid_constant__ Product product) {
    __shared__ float weights[16][17], inputs[16][17];
    begin_kernel();
    int column = threadIdx.x % 16;
    int line = threadIdx.x / 16;
    int output = blockIdx.x * 16 + column;
    int row = blockIdx.y * 16 + line;
    bool is_gated = product.out_kind == OUT_GATE;
    // Of gated outputs a thread computes both halves.
    float sums[2] = {0.0f, 0.0f};
    int n_halves = is_gated ? 2 : 1;
    int n_outputs = is_gated ? product.n_outputs / 2 : product.n_outputs;
    for (int half = 0; half < n_halves; half++) {
        for (int first = 0; first < product.n_padded_inputs; first += 16) {
            int weight_row = blockIdx.x * 16 + line;
            int input_row = blockIdx.y * 16 + line;
            int input = first + column;
            u64 source = is_gated ? (weight_row / 8) * 16 + weight_row % 8 + half * 8 : weight_row;
            bool is_in = input < product.n_padded_inputs;
            weights[line][column] =
                is_in && weight_row < n_outputs ? product.weights[source * product.n_padded_inputs + input] : 0.0f;
            inputs[line][column] =
                is_in && input_row < product.n_rows ? product.inputs[(u64)input_row * product.n_padded_inputs + input] : 0.0f;
            __syncthreads();
            for (int k = 0; k < 16; k++) {
                sums[half] = __fmaf_rn(weights[column][k], inputs[line][k], sums[half]);
            }
            __syncthreads();
        }
    }
    if (output >= n_outputs || row >= product.n_rows) {
        return;
    }
    if (product.bias != nullptr) {
        int at = is_gated ? output / 8 * 16 + output % 8 : output;
        sums[0] = __fadd_rn(sums[0], product.bias[at]);
        sums[1] = is_gated ? __fadd_rn(sums[1], product.bias[at + 8]) : 0.0f;
    }
    float *out = (float *)product.out + (u64)row * product.out_stride + output;
    if (product.out_kind == OUT_STORE) {
        *out = sums[0];
    } else if (product.out_kind == OUT_ADD) {
        *out = __fadd_rn(*out, sums[0]);
    } else if (is_gated) {
        *out = silu_gate(sums[0], sums[1]);
    } else {
        *out = gelu_tanh(sums[0]);
    }
}

#endif
