// Approach 2 for TensorRT-LLM: two models whose KV cache managers (kv_cache_manager.h) share elastic memory under one limit.
//
//     g++ -std=c++17 -Iinclude examples/trtllm/cache_manager.cpp -Ltarget/release -lkvik -o cache_manager
//     ./cache_manager [device]      the index of a CUDA device, or -1, the default, for the memory of the host

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <numeric>
#include <vector>

#include "device_memory.h"
#include "kv_cache_manager.h"
#include "kvik.h"

namespace {

void expect(bool isGood, char const* what)
{
    device_memory_check(isGood ? 1 : 0, what);
}

unsigned char markOf(std::size_t layer, std::size_t id, int part)
{
    return static_cast<unsigned char>((layer * 7 + id * 13 + static_cast<std::size_t>(part) * 101) % 251);
}

// A sequence in TensorRT-LLM's blocks becomes one in the blocks of another engine, and comes back unchanged.
void convert(KvShape const& shape)
{
    std::uint32_t const numTokens = 2 * static_cast<std::uint32_t>(shape.tokensPerBlock) - 5;
    std::uint32_t const trtllmTable[2] = {1, 0};
    std::vector<std::uint32_t> vllmTable;
    for (std::uint32_t block = 0; block * 16 < numTokens; ++block) {
        vllmTable.push_back(block);
    }
    kvik_kv_shape kv{};
    kv.size = sizeof kv;
    kv.n_layers = static_cast<std::uint32_t>(shape.numLayers);
    kv.n_tokens = numTokens;
    kv.n_kv_heads = static_cast<std::uint32_t>(shape.numKvHeads);
    kv.head_dim = static_cast<std::uint32_t>(shape.headSize);
    kv.element_bytes = static_cast<std::uint32_t>(shape.elementBytes);
    kvik_kv_buffer trtllm{};
    trtllm.size = sizeof trtllm;
    trtllm.layout = KVIK_LAYOUT_TRTLLM;
    trtllm.block_tokens = static_cast<std::uint32_t>(shape.tokensPerBlock);
    trtllm.n_pool_blocks = 2;
    trtllm.block_table = trtllmTable;
    trtllm.n_table_blocks = 2;
    kvik_kv_buffer vllm{};
    vllm.size = sizeof vllm;
    vllm.layout = KVIK_LAYOUT_KV_FIRST_NHD;
    vllm.block_tokens = 16;
    vllm.n_pool_blocks = vllmTable.size();
    vllm.block_table = vllmTable.data();
    vllm.n_table_blocks = vllmTable.size();
    expect(kvik_kv_bytes(&kv, &trtllm, &trtllm.n_bytes) == KVIK_OK, "size TensorRT-LLM's pool");
    expect(kvik_kv_bytes(&kv, &vllm, &vllm.n_bytes) == KVIK_OK, "size vLLM's pool");
    std::vector<unsigned char> bytes(trtllm.n_bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<unsigned char>(i * 31);
    }
    std::vector<unsigned char> const before(bytes);
    std::vector<unsigned char> other(vllm.n_bytes);
    trtllm.bytes = bytes.data();
    vllm.bytes = other.data();
    expect(kvik_convert_kv(&kv, &trtllm, &vllm) == KVIK_OK, "convert to vLLM's layout");
    expect(kvik_convert_kv(&kv, &vllm, &trtllm) == KVIK_OK && bytes == before, "convert back");
}

} // namespace

int main(int argc, char** argv)
{
    int const device = argc > 1 ? std::atoi(argv[1]) : -1;
    device_memory const memory = device_memory_open(device);
    // 4 layers, 8 heads of 64 elements of 2 bytes, 32 tokens: blocks of 256 KiB.
    KvShape const shape{4, 8, 64, 32, 2};
    std::size_t const limitBytes = 128 * shape.blockBytes();
    std::size_t const numBlocks = 72;
    // Two models under one limit: what one does not have, the other can.
    KVCachedCacheManager first(device, limitBytes, shape);
    KVCachedCacheManager second(device, limitBytes, shape);
    KVCacheManager& asEngineSeesIt = first;
    asEngineSeesIt.allocate(numBlocks);

    auto const keys = asEngineSeesIt.getKCacheBlockPointers();
    auto const values = asEngineSeesIt.getVCacheBlockPointers();
    for (std::size_t layer = 0; layer < 4; ++layer) {
        for (std::size_t id = 0; id < numBlocks; ++id) {
            std::size_t const entry = layer * numBlocks + id;
            device_memory_fill(&memory, keys[entry], markOf(layer, id, 0), shape.planeBytes());
            device_memory_fill(&memory, values[entry], markOf(layer, id, 1), shape.planeBytes());
        }
    }
    for (std::size_t layer = 0; layer < 4; ++layer) {
        for (std::size_t id = 0; id < numBlocks; ++id) {
            std::size_t const entry = layer * numBlocks + id;
            auto const* lastOfK = static_cast<unsigned char const*>(keys[entry]) + shape.planeBytes() - 1;
            auto const* lastOfV = static_cast<unsigned char const*>(values[entry]) + shape.planeBytes() - 1;
            expect(device_memory_byte(&memory, lastOfK) == markOf(layer, id, 0), "find K again");
            expect(device_memory_byte(&memory, lastOfV) == markOf(layer, id, 1), "find V again");
        }
    }
    bool isRefused = false;
    try {
        second.allocate(numBlocks);
    } catch (std::bad_alloc const&) {
        isRefused = true;
    }
    expect(isRefused, "keep the second model under the common limit");
    std::size_t const peakBytes = first.used();
    std::vector<SizeType32> all(numBlocks);
    std::iota(all.begin(), all.end(), 0);
    asEngineSeesIt.free(all);
    expect(first.used() == 0, "free all blocks");
    expect(asEngineSeesIt.getKCacheBlockPointers()[0] == nullptr, "forget freed blocks");
    convert(shape);
    std::printf("{\"device\": %d, \"block_bytes\": %zu, \"peak_used_bytes\": %zu}\n", device, shape.blockBytes(), peakBytes);
    return 0;
}
