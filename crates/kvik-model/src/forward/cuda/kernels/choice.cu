// The choice of the next token from a row of logits, by a block for each row.
//
// `sampling/draw.rs` says what is chosen, and does the same operations on the host: weights are whole numbers, whose sums are the
// same in any order, so both choose the same token.

#define CHOICE_THREADS 1024
#define CHOICE_WARPS (CHOICE_THREADS / 32)
#define WEIGHT_BITS 40
#define N_BINS 256
// Of exponents, which are 0 to -WEIGHT_BITS.
#define BINS_PER_OCTAVE 6.0

struct Draw {
    double scale; // of logits, for powers of two; 0: the most likely token
    double least; // exponent of tokens that are considered
    double uniform;
    u32 top_k;   // 0: all
    float top_p; // 1: all
};

struct Row {
    const float *logits;
    int vocab_size;
    float largest;
    Draw draw;
};

// Tokens whose logits are above one, and of those at it the ones up to `last`.
struct Kept {
    u32 order;
    int last;

    __device__ __forceinline__ bool has(u32 other, int token) const { return other > order || (other == order && token <= last); }
};

static __device__ __forceinline__ double double_of(const u32 *words) { return __hiloint2double((int)words[1], (int)words[0]); }

// Logits in their order as numbers.
static __device__ __forceinline__ u32 order_of(float logit) {
    u32 bits = __float_as_uint(logit);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float logit_of(u32 order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

static __device__ __forceinline__ double exponent_of(const Row &row, float logit) {
    return __dmul_rn(__dsub_rn((double)logit, (double)row.largest), row.draw.scale);
}

// 2 to the power of an exponent, times 2 to the power of WEIGHT_BITS.
static __device__ __forceinline__ u64 weight_of(double exponent) {
    double whole = floor(exponent);
    double part = __dmul_rn(__dsub_rn(exponent, whole), 0.6931471805599453);
    const double terms[13] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0,
                              1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
    double power = terms[0];
    #pragma unroll
    for (int idx = 1; idx < 13; idx++) {
        power = __dadd_rn(__dmul_rn(power, part), terms[idx]);
    }
    long long bits = __double_as_longlong(power) + (((long long)whole + WEIGHT_BITS) << 52);
    u64 weight = (u64)__longlong_as_double(bits);
    return weight > 0 ? weight : 1;
}

static __device__ __forceinline__ u64 warp_sum_whole(u64 value) {
    for (int distance = 16; distance > 0; distance >>= 1) {
        value += __shfl_xor_sync(~0u, value, distance);
    }
    return value;
}

static __device__ __forceinline__ u64 warp_scan_whole(u64 value) {
    for (int distance = 1; distance < 32; distance <<= 1) {
        u64 before = __shfl_up_sync(~0u, value, distance);
        value += (int)(threadIdx.x % 32) >= distance ? before : 0;
    }
    return value;
}

// Tokens that a thread reads before it uses the first.
#define READ_AHEAD 8

// Reads the logits of the tokens `first`, `first + step` and so on; those behind the end are not numbers, and weigh nothing.
static __device__ __forceinline__ void read_ahead(const Row &row, int first, int step, int end, float (&logits)[READ_AHEAD]) {
    #pragma unroll
    for (int idx = 0; idx < READ_AHEAD; idx++) {
        int token = first + idx * step;
        logits[idx] = token < end ? row.logits[token] : LOWEST;
    }
}

// The first token at which the sum over all tokens up to it is above `target_of(the sum over all)`.
template <typename Value, typename Target> static __device__ int place_of(const Row &row, Value value, Target target_of) {
    __shared__ u64 sums[CHOICE_WARPS];
    __shared__ int place;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int span = ((row.vocab_size + CHOICE_THREADS - 1) / CHOICE_THREADS) * 32;
    int first = warp * span, end = min(row.vocab_size, first + span);
    float logits[READ_AHEAD];
    // Of a group of tokens that a warp reads at a time.
    auto sum_of_lane = [&](int base) {
        read_ahead(row, base + lane, 32, end, logits);
        u64 sum = 0;
        #pragma unroll
        for (int idx = 0; idx < READ_AHEAD; idx++) {
            sum += value(logits[idx], base + lane + idx * 32);
        }
        return sum;
    };
    u64 sum = 0;
    for (int base = first; base < end; base += READ_AHEAD * 32) {
        sum += sum_of_lane(base);
    }
    sum = warp_sum_whole(sum);
    __syncthreads();
    if (lane == 0) {
        sums[warp] = sum;
    }
    if (threadIdx.x == 0) {
        place = 0;
    }
    __syncthreads();
    u64 total = 0;
    for (int idx = 0; idx < CHOICE_WARPS; idx++) {
        total += sums[idx];
    }
    u64 target = target_of(total), before = 0;
    for (int idx = 0; idx < warp; idx++) {
        before += sums[idx];
    }
    if (before <= target && target < before + sums[warp]) {
        int base = first;
        u64 group = warp_sum_whole(sum_of_lane(base));
        while (before + group <= target) {
            before += group;
            base += READ_AHEAD * 32;
            group = warp_sum_whole(sum_of_lane(base));
        }
        #pragma unroll
        for (int idx = 0; idx < READ_AHEAD; idx++) {
            u64 scanned = warp_scan_whole(value(logits[idx], base + idx * 32 + lane));
            u32 above = __ballot_sync(~0u, before <= target && before + scanned > target);
            if (above != 0 && lane == 0) {
                place = base + idx * 32 + __ffs(above) - 1;
            }
            before += __shfl_sync(~0u, scanned, 31);
        }
    }
    __syncthreads();
    return place;
}

// Keeps the most likely tokens of `kept`: so many, or those that reach a share of the sum of the weights. Tokens are counted or summed
// up by ranges of exponents first, and then in the range that is cut by the bytes of their order.
template <bool SUMS> static __device__ Kept narrow(const Row &row, Kept kept) {
    __shared__ u64 bins[N_BINS];
    __shared__ u64 shared_wanted, shared_before, shared_there;
    __shared__ int shared_bin;
    u64 wanted = row.draw.top_k, above = 0, there = 0;
    u32 prefix = 0;
    int range = 0;
    for (int level = 0; level < 5; level++) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < N_BINS; bin += CHOICE_THREADS) {
            bins[bin] = 0;
        }
        __syncthreads();
        for (int base = threadIdx.x; base < row.vocab_size; base += READ_AHEAD * CHOICE_THREADS) {
            float logits[READ_AHEAD];
            read_ahead(row, base, CHOICE_THREADS, row.vocab_size, logits);
            #pragma unroll
            for (int idx = 0; idx < READ_AHEAD; idx++) {
                double exponent = exponent_of(row, logits[idx]);
                u32 order = order_of(logits[idx]);
                if (!(exponent >= row.draw.least) || !kept.has(order, base + idx * CHOICE_THREADS)) {
                    continue;
                }
                int bin = min(N_BINS - 1, (int)(-exponent * BINS_PER_OCTAVE));
                if (level > 0) {
                    if (bin != range || (level > 1 && order >> (40 - 8 * level) != prefix)) {
                        continue;
                    }
                    bin = N_BINS - 1 - (order >> (32 - 8 * level) & 255);
                }
                atomicAdd(&bins[bin], SUMS ? weight_of(exponent) : 1);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            u64 mine = 0;
            for (int idx = 0; idx < N_BINS / 32; idx++) {
                mine += bins[threadIdx.x * (N_BINS / 32) + idx];
            }
            u64 scanned = warp_scan_whole(mine);
            u64 total = __shfl_sync(~0u, scanned, 31);
            if (level == 0 && SUMS) {
                wanted = (u64)ceil(__dmul_rn((double)row.draw.top_p, __ull2double_rn(total)));
                wanted = wanted > 0 ? min(wanted, total) : 1;
            }
            u64 before = above + scanned - mine;
            if (threadIdx.x == 0) {
                shared_wanted = wanted;
                shared_there = level == 0 && total <= wanted ? 0 : 1;
            }
            __syncwarp();
            if (shared_there != 0 && before < wanted && wanted <= before + mine) {
                int bin = threadIdx.x * (N_BINS / 32);
                while (before + bins[bin] < wanted) {
                    before += bins[bin++];
                }
                shared_bin = bin;
                shared_before = before;
            }
        }
        __syncthreads();
        wanted = shared_wanted;
        if (shared_there == 0) {
            return kept;
        }
        above = shared_before;
        there = bins[shared_bin];
        if (level == 0) {
            range = shared_bin;
        } else {
            prefix = prefix << 8 | (u32)(N_BINS - 1 - shared_bin);
        }
    }
    // All tokens at this logit weigh the same.
    u64 each = SUMS ? weight_of(exponent_of(row, logit_of(prefix))) : 1;
    u64 needed = (wanted - above + each - 1) / each;
    Kept next = {prefix, prefix == kept.order ? kept.last : row.vocab_size};
    if (needed * each < there) {
        auto is_at = [&](float logit, int token) { return (u64)(order_of(logit) == prefix && kept.has(prefix, token)); };
        next.last = place_of(row, is_at, [&](u64) { return needed - 1; });
    }
    return next;
}

// The largest logit and the first token that has it.
static __device__ __forceinline__ void take_larger(float &value, int &token, float other, int other_token) {
    if (other > value || (other == value && other_token < token)) {
        value = other;
        token = other_token;
    }
}

extern "C" __global__ void __launch_bounds__(CHOICE_THREADS)
choose_tokens(const float *logits, const u32 *draws, uint2 *chosen, int vocab_size) {
    begin_kernel();
    __shared__ float values[CHOICE_WARPS];
    __shared__ int tokens[CHOICE_WARPS];
    const u32 *words = draws + blockIdx.x * 8;
    Row row = {logits + (u64)blockIdx.x * vocab_size, vocab_size, 0.0f,
               {double_of(words), double_of(words + 2), double_of(words + 4), words[6], __uint_as_float(words[7])}};
    float value = LOWEST;
    int token = vocab_size;
    int is_finite = 1;
    // Many are read before the first is compared.
    #pragma unroll 8
    for (int idx = threadIdx.x; idx < vocab_size; idx += CHOICE_THREADS) {
        float next = row.logits[idx];
        is_finite &= fabsf(next) < -LOWEST;
        if (next > value || token == vocab_size) {
            value = next;
            token = idx;
        }
    }
    for (int distance = 16; distance > 0; distance >>= 1) {
        float other = __shfl_xor_sync(~0u, value, distance);
        take_larger(value, token, other, __shfl_xor_sync(~0u, token, distance));
    }
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = value;
        tokens[threadIdx.x / 32] = token;
    }
    is_finite = __syncthreads_and(is_finite);
    value = values[0], token = tokens[0];
    for (int warp = 1; warp < CHOICE_WARPS; warp++) {
        take_larger(value, token, values[warp], tokens[warp]);
    }
    if (is_finite && row.draw.scale > 0.0) {
        row.largest = value;
        Kept kept = {0, vocab_size};
        if (row.draw.top_k > 0) {
            kept = narrow<false>(row, kept);
        }
        if (row.draw.top_p < 1.0f) {
            kept = narrow<true>(row, kept);
        }
        auto weight = [&](float logit, int token) -> u64 {
            double exponent = exponent_of(row, logit);
            return exponent >= row.draw.least && kept.has(order_of(logit), token) ? weight_of(exponent) : 0;
        };
        auto target_of = [&](u64 total) { return min((u64)__dmul_rn(row.draw.uniform, __ull2double_rn(total)), total - 1); };
        token = place_of(row, weight, target_of);
    }
    if (threadIdx.x == 0) {
        chosen[blockIdx.x] = make_uint2((u32)token, (u32)is_finite);
    }
}
