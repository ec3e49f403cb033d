// Matrix products of more than sixteen rows, by instructions of a warpgroup.
//
// As in `product.cu`, an output is one chain of instructions over its inputs, sixteen at a time.

#if WEIGHT != 0

// Names an operand in shared memory: tiles of eight by eight, the two of sixteen inputs 128 bytes apart, those of the next
// eight outputs or rows 256 bytes apart.
static __device__ __forceinline__ u64 operand_at(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}

#if WEIGHT == 1
#define GROUP_INSTRUCTION(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16"
#else
#define GROUP_INSTRUCTION(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16"
#endif

// Adds the product of 64 outputs and 32, 64 or 128 rows over sixteen inputs.
static __device__ __forceinline__ void group_mma(float (&sums)[16], u64 weights, u64 inputs) {
    asm volatile(
        GROUP_INSTRUCTION(32) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, 1, 1, 1, 0, 0;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "l"(weights), "l"(inputs));
}

static __device__ __forceinline__ void group_mma(float (&sums)[32], u64 weights, u64 inputs) {
    asm volatile(
        GROUP_INSTRUCTION(64) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, 1, 1, 1, 0, 0;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]),
          "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
          "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
        : "l"(weights), "l"(inputs));
}

static __device__ __forceinline__ void group_mma(float (&sums)[64], u64 weights, u64 inputs) {
    asm volatile(
        GROUP_INSTRUCTION(128) " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, 1, 1, 1, 0, 0;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]),
          "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
          "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]),
          "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),
          "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]),
          "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
          "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]),
          "+f"(sums[63])
        : "l"(weights), "l"(inputs));
}

// The sums of a thread go out: of two outputs, eight apart, in pairs of rows, eight apart. As `put_tile`, without
// comparisons where the tile lies inside of the matrix: the instructions of a tile are read from memory as often as it is written.
template <bool IS_ACTIVATION, bool IS_INSIDE, int N_SUMS>
static __device__ __forceinline__ void put_wide(const Product &product, int output, int row, float (&sums)[N_SUMS]) {
    bool has_low = IS_INSIDE || output < product.n_outputs;
    bool has_high = IS_INSIDE || output + 8 < product.n_outputs;
    if (product.bias != nullptr) {
        float low = has_low ? product.bias[output] : 0.0f;
        float high = has_high ? product.bias[output + 8] : 0.0f;
        #pragma unroll
        for (int idx = 0; idx < N_SUMS; idx++) {
            sums[idx] = __fadd_rn(sums[idx], idx & 2 ? high : low);
        }
    }
    if (!IS_ACTIVATION) {
        bool is_added = product.out_kind == OUT_ADD;
        u64 stride = product.out_stride;
        float *out = (float *)product.out + row * stride + output;
        // What is added to is read for sixteen sums at a time: one wait for all of them.
        #pragma unroll
        for (int first = 0; first < N_SUMS; first += 16) {
            float *from = out + first * 2 * stride;
            float before[16];
            bool is_there[16];
            #pragma unroll
            for (int idx = 0; idx < 16; idx++) {
                int at = idx / 4 * 8 + idx % 2;
                is_there[idx] = IS_INSIDE || (row + first * 2 + at < product.n_rows && (idx & 2 ? has_high : has_low));
                before[idx] = 0.0f;
                if (is_added && is_there[idx]) {
                    before[idx] = from[at * stride + (idx & 2) * 4];
                }
            }
            #pragma unroll
            for (int idx = 0; idx < 16; idx++) {
                float sum = sums[first + idx];
                if (is_there[idx]) {
                    from[(idx / 4 * 8 + idx % 2) * stride + (idx & 2) * 4] = is_added ? __fadd_rn(before[idx], sum) : sum;
                }
            }
        }
    } else {
        #pragma unroll
        for (int part = 0; part < N_SUMS / 4; part++) {
            float sum[4] = {sums[part * 4], sums[part * 4 + 1], sums[part * 4 + 2], sums[part * 4 + 3]};
            put_activation<ACTIVATION>(product, output, row + part * 8, sum, has_low, has_high);
        }
    }
}

// Steps and tiles of sixteen outputs that the copy engine fetches at a time, as the host names them to it.
#define BOX_STEPS 4
#define BOX_WEIGHT_TILES 4
#define BOX_WEIGHT_BYTES (BOX_STEPS * BOX_WEIGHT_TILES * 512)

// WARPGROUPS compute 64 outputs each by GROUPS times GROUP_ROWS rows; one thread of the warps behind them has the copy engine
// fetch STEPS tiles of inputs at a time into a ring of N_STAGES. Blocks take tiles of the result in turns until all are done.
template <bool IS_ACTIVATION, int WARPGROUPS, int GROUPS, int GROUP_ROWS, int STEPS, int N_STAGES>
static __device__ __forceinline__ void multiply_wide(const Product &product, const TensorMap *weights_map,
                                                     const TensorMap *inputs_map) {
    constexpr int BOX_INPUT_BYTES = BOX_STEPS * GROUP_ROWS * 32;
    constexpr int WEIGHT_BYTES = STEPS * WARPGROUPS * 2048;
    constexpr int STAGE_BYTES = WEIGHT_BYTES + STEPS * GROUPS * GROUP_ROWS * 32;
    constexpr int BOXES = STEPS / BOX_STEPS;
    // Blocks that run at a time take tiles of neighbouring rows and outputs: both operands come from the cache.
    constexpr int SPAN = 16 / GROUPS;
    u64 *filled = (u64 *)(shared + N_STAGES * STAGE_BYTES);
    u64 *emptied = filled + N_STAGES;
    int warpgroup = threadIdx.x / 128;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < N_STAGES; stage++) {
            barrier_init(filled + stage, 1);
            barrier_init(emptied + stage, WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int n_turns = (product.n_padded_inputs / 16 + STEPS - 1) / STEPS;
    int n_tiles_o = (product.n_outputs + WARPGROUPS * 64 - 1) / (WARPGROUPS * 64);
    int n_tiles_r = (product.n_rows + GROUPS * GROUP_ROWS - 1) / (GROUPS * GROUP_ROWS);
    int n_tiles = n_tiles_o * n_tiles_r;
    int stage = 0;
    u32 parity = 0;
    auto place_of = [&](int tile, int &tile_o, int &tile_r) {
        int first = tile / (n_tiles_o * SPAN) * SPAN;
        int at = tile - first * n_tiles_o;
        int span = min(SPAN, n_tiles_r - first);
        tile_o = at / span;
        tile_r = first + at % span;
    };

    if (warpgroup == WARPGROUPS) {
        if (WARPGROUPS > 1) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        }
        if (threadIdx.x != WARPGROUPS * 128) {
            wait_for_kernels_before();
            return;
        }
        // What lies beyond the matrices is zero.
        auto copy_weights = [&](int tile_o, int turn, int stage) {
            barrier_expect(filled + stage, STAGE_BYTES);
            u8 *place = shared + stage * STAGE_BYTES;
            #pragma unroll
            for (int part = 0; part < WARPGROUPS; part++) {
                #pragma unroll
                for (int box = 0; box < BOXES; box++) {
                    copy_box(place + (part * BOXES + box) * BOX_WEIGHT_BYTES, weights_map, 0,
                             (tile_o * WARPGROUPS + part) * BOX_WEIGHT_TILES, turn * STEPS + box * BOX_STEPS, filled + stage);
                }
            }
        };
        int tile_o, tile_r;
        place_of(blockIdx.x, tile_o, tile_r);
        // Weights are written by no kernel: the first are fetched while the kernels before still run.
        int n_ahead = blockIdx.x < n_tiles ? min(N_STAGES, n_turns) : 0;
        for (int turn = 0; turn < n_ahead; turn++) {
            copy_weights(tile_o, turn, turn);
        }
        wait_for_kernels_before();
        for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
            place_of(tile, tile_o, tile_r);
            for (int turn = 0; turn < n_turns; turn++) {
                if (n_ahead > 0) {
                    n_ahead--;
                } else {
                    barrier_wait(emptied + stage, parity ^ 1);
                    copy_weights(tile_o, turn, stage);
                }
                u8 *place = shared + stage * STAGE_BYTES + WEIGHT_BYTES;
                #pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    #pragma unroll
                    for (int box = 0; box < BOXES; box++) {
                        copy_box(place + (group * BOXES + box) * BOX_INPUT_BYTES, inputs_map, 0,
                                 (tile_r * GROUPS + group) * (GROUP_ROWS / 8), turn * STEPS + box * BOX_STEPS, filled + stage);
                    }
                }
                if (++stage == N_STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        return;
    }

    if (WARPGROUPS > 1) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    wait_for_kernels_before();
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        float sums[GROUPS][GROUP_ROWS / 2];
        #pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            #pragma unroll
            for (int idx = 0; idx < GROUP_ROWS / 2; idx++) {
                sums[group][idx] = 0.0f;
            }
        }
        int before = -1;
        for (int turn = 0; turn < n_turns; turn++) {
            u32 weights = shared_address(shared) + stage * STAGE_BYTES + warpgroup * STEPS * 2048;
            u32 inputs = shared_address(shared) + stage * STAGE_BYTES + WEIGHT_BYTES;
            barrier_wait(filled + stage, parity);
            group_fence();
            #pragma unroll
            for (int step = 0; step < STEPS; step++) {
                #pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    group_mma(sums[group], operand_at(weights + step * 2048),
                              operand_at(inputs + (group * STEPS + step) * GROUP_ROWS * 32));
                }
            }
            group_commit();
            group_wait<1>();
            if (before >= 0 && threadIdx.x % 128 == 0) {
                barrier_arrive(emptied + before);
            }
            before = stage;
            if (++stage == N_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        group_wait<0>();
        if (threadIdx.x % 128 == 0) {
            barrier_arrive(emptied + before);
        }
        int tile_o, tile_r;
        place_of(tile, tile_o, tile_r);
        int lane = threadIdx.x % 32;
        int output = tile_o * WARPGROUPS * 64 + threadIdx.x / 32 * 16 + lane / 4;
        int row = tile_r * GROUPS * GROUP_ROWS + lane % 4 * 2;
        bool is_inside =
            (tile_o + 1) * WARPGROUPS * 64 <= product.n_outputs && (tile_r + 1) * GROUPS * GROUP_ROWS <= product.n_rows;
        #pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (is_inside) {
                put_wide<IS_ACTIVATION, true>(product, output, row + group * GROUP_ROWS, sums[group]);
            } else {
                put_wide<IS_ACTIVATION, false>(product, output, row + group * GROUP_ROWS, sums[group]);
            }
        }
    }
}

// The host's table has the same numbers: threads and bytes of shared memory follow from them.
#define WIDE_PRODUCT(NAME, IS_ACTIVATION, N_THREADS, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(N_THREADS, 1)                                                      \
        NAME(const __grid_constant__ Product product, const __grid_constant__ TensorMap weights_map,                \
             const __grid_constant__ TensorMap inputs_map) {                                                        \
        multiply_wide<IS_ACTIVATION, __VA_ARGS__>(product, &weights_map, &inputs_map);                              \
    }
#define WIDE_PRODUCTS(N_ROWS, N_THREADS, ...)                                  \
    WIDE_PRODUCT(product_##N_ROWS##_rows, false, N_THREADS, __VA_ARGS__)       \
    WIDE_PRODUCT(product_##N_ROWS##_activation, true, N_THREADS, __VA_ARGS__)

WIDE_PRODUCTS(32, 160, 1, 1, 32, 8, 4)
WIDE_PRODUCTS(64, 160, 1, 1, 64, 8, 3)
WIDE_PRODUCTS(128, 384, 2, 1, 128, 4, 6)
WIDE_PRODUCTS(256, 384, 2, 2, 128, 4, 4)

#endif
