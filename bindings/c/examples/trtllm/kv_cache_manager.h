// A KV cache manager in the shape of TensorRT-LLM's whose blocks come from elastic memory. It has addresses for all the
// blocks that the model could ever have, memory for those that it has, and the tables of pointers that attention reads.

#ifndef KV_CACHE_MANAGER_H
#define KV_CACHE_MANAGER_H

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kvcached_trtllm.h"
#include "kvik.h"

using SizeType32 = std::int32_t;

// What the engine programs against: the shape of TensorRT-LLM's manager.
class KVCacheManager {
public:
    virtual ~KVCacheManager() = default;
    virtual void allocate(SizeType32 numBlocks) = 0;
    virtual void free(std::vector<SizeType32> const& blockIds) = 0;
    // Of layer l and block i at [l * number of blocks + i].
    virtual std::vector<void*> getKCacheBlockPointers() const = 0;
    virtual std::vector<void*> getVCacheBlockPointers() const = 0;
};

// The KV of a model on one rank.
struct KvShape {
    SizeType32 numLayers;
    SizeType32 numKvHeads;
    SizeType32 headSize;
    SizeType32 tokensPerBlock;
    SizeType32 elementBytes;

    // K, or V, of one layer in one block.
    std::size_t planeBytes() const
    {
        return static_cast<std::size_t>(numKvHeads) * static_cast<std::size_t>(tokensPerBlock)
            * static_cast<std::size_t>(headSize) * static_cast<std::size_t>(elementBytes);
    }

    std::size_t blockBytes() const { return 2 * static_cast<std::size_t>(numLayers) * planeBytes(); }
};

// The adapter.
class KVCachedCacheManager : public KVCacheManager {
public:
    KVCachedCacheManager(int device, std::size_t maxMemory, KvShape const& shape)
        : mShape(shape)
        , mContext(kvcached_init_trtllm(device, maxMemory, static_cast<int>(shape.blockBytes())))
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
        std::vector<void*> blocks(static_cast<std::size_t>(numBlocks));
        if (kvcached_alloc_blocks_trtllm(mContext, numBlocks, blocks.data()) != numBlocks) {
            throw std::bad_alloc();
        }
        mBlocks.insert(mBlocks.end(), blocks.begin(), blocks.end());
    }

    // A block that is listed twice, or was freed before, is freed once.
    void free(std::vector<SizeType32> const& blockIds) override
    {
        // All are known before one is freed.
        for (auto id : blockIds) {
            (void) mBlocks.at(static_cast<std::size_t>(id));
        }
        std::vector<void*> blocks;
        for (auto id : blockIds) {
            blocks.push_back(std::exchange(mBlocks[static_cast<std::size_t>(id)], nullptr));
        }
        kvcached_free_blocks_trtllm(mContext, blocks.data(), static_cast<int>(blocks.size()));
    }

    std::vector<void*> getKCacheBlockPointers() const override { return pointers(0); }
    std::vector<void*> getVCacheBlockPointers() const override { return pointers(1); }

    std::size_t used() const { return kvcached_used_memory_trtllm(mContext); }
    std::size_t available() const { return kvcached_available_memory_trtllm(mContext); }

private:
    // A block that was freed has no pointers.
    std::vector<void*> pointers(int part) const
    {
        auto const numLayers = static_cast<std::size_t>(mShape.numLayers);
        std::vector<void*> table(numLayers * mBlocks.size(), nullptr);
        std::vector<void*> keys(numLayers);
        std::vector<void*> values(numLayers);
        for (std::size_t id = 0; id < mBlocks.size(); ++id) {
            void* block = mBlocks[id];
            if (block == nullptr) {
                continue;
            }
            if (kvcached_block_pointers_trtllm(mContext, mShape.numLayers, &block, 1, keys.data(), values.data()) != 1) {
                throw std::runtime_error(kvik_last_error(reinterpret_cast<kvik_pool*>(mContext)));
            }
            for (std::size_t layer = 0; layer < numLayers; ++layer) {
                table[layer * mBlocks.size() + id] = part == 0 ? keys[layer] : values[layer];
            }
        }
        return table;
    }

    KvShape mShape;
    kvcached_ctx_t mContext;
    std::vector<void*> mBlocks;
};

#endif
