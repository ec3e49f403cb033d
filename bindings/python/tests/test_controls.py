"""What a request says of the store, in kvik's words and in LMCache's."""

import kvik
import pytest
from kvik.controls import MAX_TAG_BYTES, MAX_TAGS, Controls


def test_a_request_that_says_nothing_has_no_controls():
    for params in (None, {}, {"kvik": {}}, {"kvik": None}, {"do_remote_prefill": True, "lmcache.other": 1}):
        assert Controls.read(params) == Controls()
    assert Controls().extra_keys() == []


def test_every_control_is_read_by_its_own_name():
    given = {"skip_load": True, "skip_save": False, "pin_s": 60, "ttl_s": 1.5, "priority": "low", "tags": {"b": "2", "a": "1"}}
    expected = Controls(
        skip_load=True, skip_save=False, pin_s=60.0, ttl_s=1.5, priority="low", tags=(("a", "1"), ("b", "2"))
    )
    assert Controls.read({"kvik": given}) == expected


def test_names_of_lmcache_mean_the_same_and_our_own_come_first():
    params = {"lmcache.skip_save": "True", "lmcache.ttl": "30", "lmcache.tag.user": "anna"}
    assert Controls.read(params) == Controls(skip_save=True, ttl_s=30.0, tags=(("user", "anna"),))
    both = params | {"kvik": {"ttl_s": 5, "tags": {"user": "bert"}}}
    assert Controls.read(both) == Controls(skip_save=True, ttl_s=5.0, tags=(("user", "bert"),))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kvik": []}, None),
        ([1], "`kv_transfer_params` is [1]; allowed: an object of names and values"),
        ({1: 2}, "`kv_transfer_params` is {1: 2}; allowed: an object of names and values"),
        ({"kvik": [1]}, "`kvik` is [1]; allowed: an object of names and values"),
        ({"kvik": {"prio": 1}}, "unknown: prio; allowed: skip_load, skip_save, pin_s, ttl_s, priority, tags"),
        ({"kvik": {"skip_load": 1}}, "`skip_load` is 1; allowed: true, false"),
        ({"kvik": {"pin_s": 0}}, "`pin_s` is 0; allowed: more than 0 seconds"),
        ({"kvik": {"ttl_s": True}}, "`ttl_s` is True; allowed: more than 0 seconds"),
        ({"kvik": {"ttl_s": "soon"}}, "`ttl_s` is 'soon'; allowed: more than 0 seconds"),
        ({"kvik": {"ttl_s": 10**400}}, f"`ttl_s` is {10**400}; allowed: more than 0 seconds"),
        ({"kvik": {"ttl_s": float("inf")}}, "`ttl_s` is inf; allowed: more than 0 seconds"),
        ({"kvik": {"priority": "high"}}, "`priority` is 'high'; allowed: normal, low"),
        ({"kvik": {"tags": ["a"]}}, "`tags` is ['a']; allowed: an object of names and values"),
        ({"lmcache.tag.a": 1}, f"`tag a` is 1; allowed: a name and a text, together at most {MAX_TAG_BYTES} bytes"),
        ({"lmcache.tag.": "x"}, f"`tag ` is 'x'; allowed: a name and a text, together at most {MAX_TAG_BYTES} bytes"),
        ({"kvik": {"tags": {"a": "\ud800"}}}, "`tag a` is '\\ud800'; allowed: a name and a text, together at most 256 bytes"),
        ({"kvik": {"tags": {str(n): "" for n in range(MAX_TAGS + 1)}}}, "`tags` is '17 of them'; allowed: at most 16"),
    ],
)
def test_a_wrong_control_is_named_with_what_is_allowed(params, message):
    if message is None:
        # As empty as nothing.
        assert Controls.read(params) == Controls()
        return
    with pytest.raises(kvik.InvalidValueError) as error:
        Controls.read(params)
    assert str(error.value) == message


def test_requests_of_different_tags_share_no_chunk():
    tags = [{}, {"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"}, {"a1": ""}, {"a": "1b"}]
    engine = {"model": "m", "layout": "l", "dtype": "bf16", "n_layers": 1, "token_layer_bytes": 4, "block_tokens": 16}
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=64, **engine) as store:
        names = []
        for given in tags:
            extras = Controls.read({"kvik": {"tags": given}}).extra_keys()
            names += store.chain(range(200), extras=extras).names()
        assert len(set(names)) == len(names) == 3 * len(tags)
