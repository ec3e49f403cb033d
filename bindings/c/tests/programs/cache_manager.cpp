// A cache manager in the shape of TensorRT-LLM's whose blocks come from the library.

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "kvcached_trtllm.h"

namespace {

using SizeType32 = std::int32_t;

// What an engine programs against.
class KVCacheManager {
public:
    virtual ~KVCacheManager() = default;
    virtual void allocate(SizeType32 numBlocks) = 0;
    virtual void free(std::vector<SizeType32> const& blockIds) = 0;

    std::vector<void*> const& blockPointers() const { return mBlockPointers; }

protected:
    std::vector<void*> mBlockPointers;
};

class KVCachedCacheManager : public KVCacheManager {
public:
    KVCachedCacheManager(int device, std::size_t maxMemory, int blockBytes)
        : mContext(kvcached_init_trtllm(device, maxMemory, blockBytes))
    {
        if (mContext == nullptr) {
            throw std::runtime_error(kvik_last_error(nullptr));
        }
    }

    KVCachedCacheManager(KVCachedCacheManager const&) = delete;
    KVCachedCacheManager& operator=(KVCachedCacheManager const&) = delete;

    ~KVCachedCacheManager() override { kvcached_shutdown_trtllm(mContext); }

    void allocate(SizeType32 numBlocks) override
    {
        std::vector<void*> pointers(static_cast<std::size_t>(numBlocks));
        if (kvcached_alloc_blocks_trtllm(mContext, numBlocks, pointers.data()) != numBlocks) {
            throw std::bad_alloc();
        }
        mBlockPointers.insert(mBlockPointers.end(), pointers.begin(), pointers.end());
    }

    void free(std::vector<SizeType32> const& blockIds) override
    {
        for (auto id : blockIds) {
            auto& pointer = mBlockPointers.at(static_cast<std::size_t>(id));
            kvcached_free_block_trtllm(mContext, pointer);
            pointer = nullptr;
        }
    }

    std::size_t available() const { return kvcached_available_memory_trtllm(mContext); }
    std::size_t used() const { return kvcached_used_memory_trtllm(mContext); }

private:
    kvcached_ctx_t mContext;
};

template <typename Exception, typename Work>
bool throws(Work work)
{
    try {
        work();
    } catch (Exception const&) {
        return true;
    }
    return false;
}

} // namespace

int main()
{
    CHECK(throws<std::runtime_error>([] { KVCachedCacheManager(-1, 16 * MIB, 0); }));

    // A block of 32 tokens: 2 (K and V) * 8 heads * 64 values * 2 bytes * 32 layers.
    constexpr int blockBytes = 32 * 2 * 8 * 64 * 2 * 32;
    KVCachedCacheManager manager(-1, 32 * MIB, blockBytes);
    KVCacheManager& asEngineSeesIt = manager;
    CHECK(manager.available() == 32 * MIB);
    asEngineSeesIt.allocate(10);
    auto const& pointers = asEngineSeesIt.blockPointers();
    for (std::size_t id = 0; id < pointers.size(); ++id) {
        std::memset(pointers[id], static_cast<int>(id), blockBytes);
    }
    CHECK(manager.used() == 10u * blockBytes);
    asEngineSeesIt.free({0, 9, 4, 4});
    CHECK(manager.used() == 7u * blockBytes);
    for (std::size_t id : {1u, 2u, 3u, 5u, 6u, 7u, 8u}) {
        auto const* bytes = static_cast<unsigned char const*>(pointers[id]);
        CHECK(bytes[0] == id && bytes[blockBytes - 1] == id);
    }
    CHECK(throws<std::bad_alloc>([&] { asEngineSeesIt.allocate(1000); }));
    CHECK(manager.used() == 7u * blockBytes);
    asEngineSeesIt.allocate(9);
    CHECK(manager.available() == 0);
    CHECK(manager.used() == 32 * MIB);
    return 0;
}
