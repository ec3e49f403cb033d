// Weights on their way into their tiles.

struct Packing {
    const void *source;
    Weight::Bits *target;
    int source_type;   // 0 f32, 1 f16, 2 bf16
    int is_transposed; // inputs are the rows of the source
    int n_outputs;
    int n_inputs;
    int n_padded;
    int span; // outputs that stay together
    int stride; // from one such run to the next
    int offset; // of the first
};

extern "C" __global__ void __launch_bounds__(256) pack_weights(const __grid_constant__ Packing packing) {
    begin_kernel();
    u64 n_elements = (u64)packing.n_outputs * packing.n_inputs;
    for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < n_elements; at += (u64)gridDim.x * 256) {
        int output = at / packing.n_inputs;
        int input = at % packing.n_inputs;
        u64 from = packing.is_transposed ? (u64)input * packing.n_outputs + output : at;
        float value;
        if (packing.source_type == 0) {
            value = ((const float *)packing.source)[from];
        } else if (packing.source_type == 1) {
            value = from_f16(((const u16 *)packing.source)[from]);
        } else {
            value = from_bf16(((const u16 *)packing.source)[from]);
        }
        int target = output / packing.span * packing.stride + output % packing.span + packing.offset;
        packing.target[weight_index(target, input, packing.n_padded)] = Weight::of(value);
    }
}

// Numbers that look random, evenly spread from -range to range, the same for the same seed.
extern "C" __global__ void __launch_bounds__(256)
fill_weights(Weight::Bits *target, int n_outputs, int n_inputs, int n_padded, float range, u64 seed) {
    begin_kernel();
    u64 n_elements = (u64)n_outputs * n_inputs;
    for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < n_elements; at += (u64)gridDim.x * 256) {
        u64 bits = (at + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull;
        bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
        bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
        bits ^= bits >> 31;
        float value = __fmul_rn(__fsub_rn(__fmul_rn((float)(bits >> 40), 0x1p-23f), 1.0f), range);
        target[weight_index(at / n_inputs, at % n_inputs, n_padded)] = Weight::of(value);
    }
}
