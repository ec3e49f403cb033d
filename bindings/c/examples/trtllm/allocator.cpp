// Approach 1 for TensorRT-LLM: a memory allocator hook. The engine allocates through IGpuAllocator as before; its
// memory comes from pages that the ledger grants, and other engines get what it frees.
//
//     g++ -std=c++17 -Iinclude examples/trtllm/allocator.cpp -Ltarget/release -lkvik -o allocator
//     ./allocator [device]          the index of a CUDA device, or -1, the default, for the memory of the host

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "device_memory.h"
#include "kvcached_trtllm.h"
#include "kvik.h"

namespace nvinfer1 {

// The part of TensorRT's interface that the hook has; with TensorRT, include <NvInferRuntime.h> in its place.
class IGpuAllocator {
public:
    virtual ~IGpuAllocator() = default;
    virtual void* allocate(std::uint64_t size, std::uint64_t alignment, std::uint32_t flags) noexcept = 0;
    virtual bool deallocate(void* memory) noexcept = 0;
};

} // namespace nvinfer1

// The adapter. TensorRT calls it from any thread, and frees when the device is done with the memory.
class KVCachedAllocator : public nvinfer1::IGpuAllocator {
public:
    KVCachedAllocator(int device, std::size_t maxMemory)
        : mContext(kvcached_init(device, maxMemory))
    {
        if (mContext == nullptr) {
            throw std::runtime_error(kvik_last_error(nullptr));
        }
    }

    KVCachedAllocator(KVCachedAllocator const&) = delete;
    KVCachedAllocator& operator=(KVCachedAllocator const&) = delete;

    ~KVCachedAllocator() override { kvcached_shutdown_trtllm(mContext); }

    void* allocate(std::uint64_t size, std::uint64_t alignment, std::uint32_t) noexcept override
    {
        return kvcached_alloc(mContext, size, alignment);
    }

    bool deallocate(void* memory) noexcept override { return kvcached_free(mContext, memory) != 0; }

    // The way around the hook, for a comparison or in an emergency; KVIK_MEMORY_BYPASS=1 does it from outside.
    void setBypass(bool isBypassed) noexcept { kvcached_set_bypass(mContext, isBypassed ? 1 : 0); }

    kvik_stats stats() const noexcept
    {
        kvik_stats stats{};
        stats.size = sizeof stats;
        kvik_get_stats(reinterpret_cast<kvik_pool*>(mContext), &stats);
        return stats;
    }

private:
    kvcached_context_t mContext;
};

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

void expect(bool isGood, char const* what)
{
    device_memory_check(isGood ? 1 : 0, what);
}

} // namespace

int main(int argc, char** argv)
{
    int const device = argc > 1 ? std::atoi(argv[1]) : -1;
    device_memory const memory = device_memory_open(device);
    // As two engines of two models would: one limit for both, by their common name.
    KVCachedAllocator first(device, 64 * mib);
    KVCachedAllocator second(device, 64 * mib);
    nvinfer1::IGpuAllocator& asTensorRtSeesIt = first;

    // Weights, a workspace, and small buffers: all of their own size, each filled and found again.
    std::vector<std::size_t> const sizes{24 * mib, 5 * mib + 17, 1000, 64 * 1024, 1};
    std::vector<unsigned char*> taken;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        auto* start = static_cast<unsigned char*>(asTensorRtSeesIt.allocate(sizes[i], 256, 0));
        expect(start != nullptr && reinterpret_cast<std::uintptr_t>(start) % 256 == 0, "allocate");
        device_memory_fill(&memory, start, static_cast<unsigned char>(i + 1), sizes[i]);
        taken.push_back(start);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        expect(device_memory_byte(&memory, taken[i] + sizes[i] - 1) == i + 1, "find the bytes again");
    }
    std::uint64_t const peakBytes = first.stats().held_bytes;
    expect(second.allocate(48 * mib, 256, 0) == nullptr, "keep the second engine under the common limit");

    for (auto* start : taken) {
        expect(asTensorRtSeesIt.deallocate(start), "free");
    }
    expect(!asTensorRtSeesIt.deallocate(taken[0]), "refuse a second free");
    // What the first engine does not use is there for the second: its pages are asked for, and come a moment later.
    void* large = nullptr;
    auto const deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (large == nullptr && std::chrono::steady_clock::now() < deadline) {
        large = second.allocate(48 * mib, 256, 0);
        std::this_thread::yield();
    }
    expect(large != nullptr && second.deallocate(large), "give the memory to the second engine");

    first.setBypass(true);
    void* plain = asTensorRtSeesIt.allocate(8 * mib, 256, 0);
    expect(plain != nullptr && first.stats().bypassed_bytes == 8 * mib, "bypass the hook");
    expect(asTensorRtSeesIt.deallocate(plain), "free what was bypassed");
    std::printf("{\"device\": %d, \"peak_held_bytes\": %llu, \"n_allocations_left\": %llu}\n", device,
        static_cast<unsigned long long>(peakBytes), static_cast<unsigned long long>(first.stats().n_allocations));
    return 0;
}
