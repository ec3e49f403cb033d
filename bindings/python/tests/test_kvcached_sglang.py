"""kvcached's interface for SGLang over kvik."""

from types import SimpleNamespace

import pytest

from kvcached_engine import Engine
from polling import eventually

from kvcached.integration.sglang.cells import StateCells

MIB = 1 << 20


@pytest.fixture
def interfaces():
    pytest.importorskip("torch")
    from kvcached.integration.sglang import interfaces

    interfaces.init_kvcached(tp_rank=0, world_size=1, device="cpu")
    yield interfaces
    interfaces.shutdown_kvcached()


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_keys_and_values_of_tokens_keep_what_is_written(interfaces, page_tokens):
    import torch

    shape = (4097, 4, 64)
    keys, values = interfaces.alloc_kv_cache(shape, torch.float16, "cpu", 3, page_size=page_tokens)
    n_blocks = -(-shape[0] // page_tokens)
    assert [tuple(layer.shape) for layer in [*keys, *values]] == [(n_blocks * page_tokens, 4, 64)] * 6
    manager = interfaces.get_kv_cache_manager(n_blocks, page_tokens, 4 * 64 * 2, 3, pool_name="mha")
    blocks = manager.alloc(2000 // page_tokens)
    assert 0 not in blocks
    tokens = torch.tensor([block * page_tokens + token for block in blocks for token in range(page_tokens)])
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        key[tokens], value[tokens] = number + 1, -number - 1
    assert all((key[tokens] == number + 1).all() for number, key in enumerate(keys))
    assert all((value[tokens] == -number - 1).all() for number, value in enumerate(values))
    (snapshot,) = interfaces.kv_cache_pool_snapshot_dicts()
    assert (snapshot["integration"], snapshot["pool_name"]) == ("sglang", "mha")
    manager.free(blocks)
    eventually(lambda: manager._get_num_alloced_blocks() == 1)


def test_latent_kv_is_one_tensor_a_layer(interfaces):
    import torch

    layers = interfaces.alloc_kv_cache((1024, 1, 64), torch.bfloat16, "cpu", 2, page_size=64, attention_type="MLA")
    assert [tuple(layer.shape) for layer in layers] == [(1024, 1, 64)] * 2
    manager = interfaces.get_kv_cache_manager(16, 64, 64 * 2, 2, num_kv_buffers=1)
    block = manager.alloc(1)[0]
    layers[1][block * 64 : (block + 1) * 64] = 3
    assert (layers[1][block * 64 : (block + 1) * 64] == 3).all()


def test_states_of_a_slot_lie_in_one_cell_and_do_not_overlap(interfaces):
    import torch

    shapes = SimpleNamespace(conv=[(3, 40), (5,)], temporal=(4, 16, 8))
    dtypes = SimpleNamespace(conv=torch.float16, temporal=torch.float32)
    conv, temporal, layout = interfaces.alloc_mamba_states(
        num_slots=100, num_mamba_layers=2, cache_params=SimpleNamespace(shape=shapes, dtype=dtypes), device="cpu", group_id=9
    )
    assert [tuple(layer.shape) for part in conv for layer in part] == [(100, 3, 40)] * 2 + [(100, 5)] * 2
    assert [tuple(layer.shape) for layer in temporal] == [(100, 4, 16, 8)] * 2
    assert 2 * MIB % layout["cell_size"] == 0
    manager = interfaces.get_kv_cache_manager(100, 1, layout["cell_size"], 2, num_kv_buffers=1, group_id=9)
    slots = manager.alloc(99)
    for layer in range(2):
        conv[0][layer][slots], conv[1][layer][slots], temporal[layer][slots] = 1, 2, 3
    assert all((part[layer][slots] == value).all() for layer in range(2) for part, value in [(conv[0], 1), (conv[1], 2), (temporal, 3)])


def test_cells_that_do_not_fit_on_a_page_are_refused():
    item = SimpleNamespace(itemsize=4)
    cells = StateCells.of_shapes([(3,)], (100,), item, item, 2 * MIB)
    assert (cells.n_bytes, cells.temporal.offset, cells.conv[0].end) == (512, 12, 12)
    with pytest.raises(RuntimeError, match="the states of a slot have 2097156 bytes"):
        StateCells.of_shapes([(1,)], (MIB // 2,), item, item, 2 * MIB)


def test_wrong_arguments_are_named(interfaces):
    import torch

    from kvcached.errors import KVCachedConfigError

    with pytest.raises(KVCachedConfigError, match="`kvcache_shape` is"):
        interfaces.alloc_kv_cache((128, 4), torch.float16, "cpu", 1)
    with pytest.raises(KVCachedConfigError, match="`attention_type` is SWA; allowed: MHA, GQA, MLA"):
        interfaces.alloc_kv_cache((128, 4, 8), torch.float16, "cpu", 1, attention_type="SWA")
    with pytest.raises(KVCachedConfigError, match="`kv_layout` is HND; allowed: NHD"):
        interfaces.alloc_kv_cache((128, 4, 8), torch.float16, "cpu", 1, kv_layout="HND")
    with pytest.raises(KVCachedConfigError, match="`tp_rank` is 3"):
        interfaces.init_kvcached(tp_rank=3, world_size=2)


def test_both_interfaces_share_the_memory_of_a_process():
    torch = pytest.importorskip("torch")
    from kvcached.integration.sglang import interfaces

    engine = Engine(torch)
    keys, _ = interfaces.alloc_kv_cache((64, 4, 64), torch.float16, "cpu", 1, group_id=1)
    manager = interfaces.get_kv_cache_manager(64, 1, 4 * 64 * 2, 1, group_id=1)
    assert manager.ipc_name == f"{engine.manager.ipc_name}_g1"
    keys[0][manager.alloc(3)] = 1
    engine.interfaces.shutdown_kvcached()
