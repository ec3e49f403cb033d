// An allocator in the shape of nvinfer1::IGpuAllocator: ranges of any size, made of chunks of physical
// memory that the ledger has granted. On a GPU the same calls are cuMemAddressReserve and cuMemMap.

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <sys/mman.h>

#include "check.h"

namespace {

// What an engine programs against.
class IGpuAllocator {
public:
    virtual ~IGpuAllocator() = default;
    virtual void* allocate(std::uint64_t size, std::uint64_t alignment, std::uint32_t flags) noexcept = 0;
    virtual bool deallocate(void* memory) noexcept = 0;
};

class KVCachedAllocator : public IGpuAllocator {
public:
    explicit KVCachedAllocator(std::uint64_t limitBytes)
    {
        kvik_config config = config_of("allocator", 0, 0);
        config.max_bytes = limitBytes;
        config.label = "allocator";
        CHECK(kvik_open(&config, &mPool) == KVIK_OK);
        mChunkBytes = stats_of(mPool).page_bytes;
    }

    KVCachedAllocator(KVCachedAllocator const&) = delete;
    KVCachedAllocator& operator=(KVCachedAllocator const&) = delete;

    ~KVCachedAllocator() override { CHECK(kvik_close(mPool) == KVIK_OK); }

    void* allocate(std::uint64_t size, std::uint64_t alignment, std::uint32_t) noexcept override
    {
        if (size == 0 || alignment > 4096) {
            return nullptr;
        }
        Range range;
        range.chunks.resize((size + mChunkBytes - 1) / mChunkBytes);
        if (kvik_acquire_chunks(mPool, range.chunks.size(), range.chunks.data()) != KVIK_OK) {
            return nullptr;
        }
        range.bytes = range.chunks.size() * mChunkBytes;
        auto* base = static_cast<char*>(
            mmap(nullptr, range.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        CHECK(base != MAP_FAILED);
        for (std::size_t i = 0; i < range.chunks.size(); ++i) {
            CHECK(mmap(base + i * mChunkBytes, mChunkBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      static_cast<int>(range.chunks[i]), 0)
                != MAP_FAILED);
        }
        std::lock_guard<std::mutex> guard(mMutex);
        mRanges.emplace(base, std::move(range));
        return base;
    }

    bool deallocate(void* memory) noexcept override
    {
        std::lock_guard<std::mutex> guard(mMutex);
        auto found = mRanges.find(memory);
        if (found == mRanges.end()) {
            return memory == nullptr;
        }
        Range const& range = found->second;
        CHECK(munmap(memory, range.bytes) == 0);
        CHECK(kvik_release_chunks(mPool, range.chunks.data(), range.chunks.size()) == KVIK_OK);
        mRanges.erase(found);
        return true;
    }

    std::uint64_t heldBytes() const { return stats_of(mPool).held_bytes; }
    kvik_pool* pool() const { return mPool; }

private:
    struct Range {
        std::vector<std::uint64_t> chunks;
        std::uint64_t bytes = 0;
    };

    kvik_pool* mPool = nullptr;
    std::uint64_t mChunkBytes = 0;
    std::mutex mMutex;
    std::map<void*, Range> mRanges;
};

} // namespace

int main()
{
    KVCachedAllocator allocator(16 * MIB);
    IGpuAllocator& asEngineSeesIt = allocator;
    void* small = asEngineSeesIt.allocate(1000, 256, 0);
    void* large = asEngineSeesIt.allocate(5 * MIB, 256, 0);
    CHECK(small != nullptr && large != nullptr);
    CHECK(allocator.heldBytes() == 8 * MIB);
    std::memset(large, 3, 5 * MIB);
    std::memset(small, 4, 1000);
    CHECK(static_cast<char*>(large)[5 * MIB - 1] == 3);
    CHECK(asEngineSeesIt.allocate(10 * MIB, 256, 0) == nullptr);
    CHECK(allocator.heldBytes() == 8 * MIB);
    CHECK(asEngineSeesIt.deallocate(large));
    CHECK(!asEngineSeesIt.deallocate(large));
    CHECK(asEngineSeesIt.deallocate(nullptr));
    large = asEngineSeesIt.allocate(14 * MIB, 256, 0);
    CHECK(large != nullptr && allocator.heldBytes() == 16 * MIB);

    // An engine that creates its memory itself only asks whether it may.
    CHECK(kvik_admit(allocator.pool(), 2 * MIB) == KVIK_NO_MEMORY);
    CHECK(asEngineSeesIt.deallocate(large));
    CHECK(kvik_admit(allocator.pool(), 14 * MIB) == KVIK_OK);
    CHECK(asEngineSeesIt.allocate(1, 1, 0) == nullptr);
    CHECK(kvik_retire(allocator.pool(), 14 * MIB) == KVIK_OK);
    CHECK(asEngineSeesIt.deallocate(small));
    CHECK(allocator.heldBytes() == 0);
    return 0;
}
