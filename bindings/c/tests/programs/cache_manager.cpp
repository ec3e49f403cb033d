// The cache manager of the example for TensorRT-LLM, at its limits and with ids that are wrong.

#include <cstring>
#include <new>
#include <stdexcept>

#include "../../examples/trtllm/kv_cache_manager.h"
#include "check.h"

namespace {

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
    CHECK(throws<std::runtime_error>([] { KVCachedCacheManager(-1, 16 * MIB, KvShape{0, 8, 64, 32, 2}); }));

    // 32 layers, 8 heads of 64 elements of 2 bytes, 32 tokens: blocks of 2 MiB.
    KvShape const shape{32, 8, 64, 32, 2};
    std::size_t const blockBytes = shape.blockBytes();
    KVCachedCacheManager manager(-1, 32 * MIB, shape);
    KVCacheManager& asEngineSeesIt = manager;
    CHECK(manager.available() == 32 * MIB);
    asEngineSeesIt.allocate(10);
    // A block begins with K of its first layer.
    auto const pointers = asEngineSeesIt.getKCacheBlockPointers();
    for (std::size_t id = 0; id < 10; ++id) {
        std::memset(pointers[id], static_cast<int>(id), blockBytes);
    }
    CHECK(manager.used() == 10u * blockBytes);
    CHECK(throws<std::out_of_range>([&] { asEngineSeesIt.free({0, 10}); }));
    CHECK(manager.used() == 10u * blockBytes);
    asEngineSeesIt.free({0, 9, 4, 4});
    asEngineSeesIt.free({9});
    CHECK(manager.used() == 7u * blockBytes);
    CHECK(asEngineSeesIt.getKCacheBlockPointers()[4] == nullptr);
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
