// CRC-64/NVME of sections of memory, a block for each; the reader of files compares it with what was stored.
//
// A section is a polynomial over two elements: bit 0 of its first word has the highest power. Thread t takes the words t, t + N, ...
// counted from the end, so that all threads end in the last row: for each row it multiplies what it has by x^(64 N) and adds its
// word. The threads' remainders, each multiplied by x^64 for each word behind it, add up to that of the section; as a checksum
// stands behind its words, that is multiplied by x^64 once more.

typedef unsigned int u32;
typedef unsigned long long u64;

#define N_THREADS 256
// x^64, the powers from x^0 in the highest bit on.
#define POLYNOMIAL 0x9a6c9329ac4bc9b5ull

// The product of two remainders.
static __device__ u64 multiply(u64 a, u64 b) {
    u64 product = 0;
    for (int power = 63; power >= 0; power--) {
        if ((a >> power) & 1) {
            product ^= b;
        }
        b = (b >> 1) ^ ((b & 1) ? POLYNOMIAL : 0);
    }
    return product;
}

struct Sections {
    const u64 *words;
    u64 *checksums;
    u64 n_words; // of each
};

extern "C" __global__ void __launch_bounds__(N_THREADS) checksum_sections(const __grid_constant__ Sections sections) {
    // The product of each value of each byte with x^(64 N).
    __shared__ u64 products[8][N_THREADS];
    __shared__ u64 sums[N_THREADS];
    u32 thread = threadIdx.x;
    // x^(64 s), for s words.
    u64 shift = POLYNOMIAL;
    for (int s = 1; s < N_THREADS; s *= 2) {
        shift = multiply(shift, shift);
    }
    for (int byte = 0; byte < 8; byte++) {
        products[byte][thread] = multiply((u64)thread << (8 * byte), shift);
    }
    __syncthreads();
    const u64 *words = sections.words + blockIdx.x * sections.n_words;
    u64 n_rows = (sections.n_words + N_THREADS - 1) / N_THREADS;
    // Words before the first are 0, which changes nothing.
    long long at = (long long)thread - (long long)(n_rows * N_THREADS - sections.n_words);
    u64 sum = 0;
#pragma unroll 4
    for (u64 row = 0; row < n_rows; row++, at += N_THREADS) {
        u64 next = 0;
        for (int byte = 0; byte < 8; byte++) {
            next ^= products[byte][(sum >> (8 * byte)) & 255];
        }
        // A checksum begins with ones, which is the same as the first word inverted.
        u64 word = at < 0 ? 0 : at == 0 ? ~words[0] : words[at];
        sum = next ^ word;
    }
    sums[thread] = sum;
    shift = POLYNOMIAL;
    for (u32 s = 1; s < N_THREADS; s *= 2) {
        __syncthreads();
        u64 pair = 0;
        if (thread % (2 * s) == 0) {
            pair = multiply(sums[thread], shift) ^ sums[thread + s];
        }
        __syncthreads();
        if (thread % (2 * s) == 0) {
            sums[thread] = pair;
        }
        shift = multiply(shift, shift);
    }
    if (thread == 0) {
        sections.checksums[blockIdx.x] = ~multiply(sums[0], POLYNOMIAL);
    }
}
