"""Calls of a cache that grows: each of another length, which nothing remembers."""

from dataclasses import replace

import torch

from bench import host
from bench.inputs import make
from flexattn.frontend.launch_cache import launch_cache


def test_each_call_has_a_key_more_and_a_round_begins_anew(monkeypatch):
    monkeypatch.setattr(host, "CALLS", 3)
    shape = replace(host.GROWING.shape, hq=2, hkv=1, d=16)
    inputs = make(replace(host.GROWING, shape=shape), "cpu", torch.float32)
    lengths = []

    def peer(given):
        assert given.row.shape.kv_len == given.k.shape[2] == given.v.shape[2]
        return lambda: lengths.append(given.k.shape[2])

    call = host.growing(peer)(inputs)
    launch_cache.prepared(("of a length",), object)
    for _ in range(4):
        call()
    assert lengths == [257, 258, 259, 257]
    assert not launch_cache.launches()
