"""Streams, threads, CUDA graphs, compile counts and refusals: a call as a server makes it."""

import threading

import pytest
import torch

import flexattn
from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import InputError, ModError
from flexattn.runtime.build import builder
from flexattn.settings import override
from tests.support import (
    KINDS,
    assert_accurate,
    assert_judged,
    block_mask,
    captured,
    inputs,
    run,
)

pytestmark = pytest.mark.usefixtures("poisoned")
each_kind = pytest.mark.parametrize("kind", KINDS)
SIZES = {"prefill": (2, 8, 2, 211, 347, 64), "decode": (2, 8, 2, 1, 2047, 64)}


def tensors(kind, dtype=torch.bfloat16):
    return inputs(*SIZES[kind], dtype=dtype, device="cuda")


@each_kind
def test_two_threads_and_two_streams_call_one_function(kind):
    """The first call of a new mod comes from both threads at once and compiles once."""
    sets = [[x + i for x in tensors(kind)] for i in range(2)]
    torch.cuda.synchronize()
    bias = torch.randn(8, device="cuda")

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h] * 1.25

    before, start = builder().compiled, threading.Barrier(2)
    got, failures = [None, None], []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                start.wait(timeout=60)
                for _ in range(20):
                    got[i] = run(*sets[i], score_mod=score_mod, kernel_options=KINDS[kind])
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert builder().compiled - before <= (1 if kind == "prefill" else 2)
    for i in range(2):
        assert_judged(got[i], *sets[i], score_mod=score_mod)


def test_interleaved_streams_of_one_thread():
    """Each call's workspace belongs to its own stream."""
    q, k, v = tensors("decode")
    wanted = run(q, k, v, kernel_options=KINDS["decode"]).out
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            outs.append(run(q, k, v, kernel_options=KINDS["decode"]).out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


@each_kind
@pytest.mark.parametrize("mod", ["noop", "mask_and_score"])
def test_a_captured_graph_sees_inputs_that_change_in_place(mod, kind):
    q, k, v = tensors(kind)
    call = {"kernel_options": KINDS[kind]}
    slopes = torch.rand(8, device="cuda")
    if mod == "mask_and_score":
        call["block_mask"] = block_mask(sliding_window(1500), q, k)
        call["score_mod"] = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * kv_idx
    graph, got = captured(lambda: run(q, k, v, **call))
    for seed in range(3):
        draw = torch.Generator("cuda").manual_seed(seed)
        for x in (q, k, v, slopes):
            x.normal_(generator=draw)
        graph.replay()
        plain = {name: value for name, value in call.items() if name != "kernel_options"}
        assert_judged(got, q, k, v, **plain)


def test_a_new_length_compiles_nothing():
    def call(B, L, S):
        q, k, v = inputs(B, 8, 2, L, S, 64, dtype=torch.bfloat16, device="cuda")
        mask = block_mask(causal, q, k)
        assert_accurate(q, k, v, score_mod=alibi(8, "cuda"), block_mask=mask)

    call(1, 211, 347)
    before = builder().compiled
    for B, L, S in ((1, 212, 347), (3, 211, 64), (1, 128, 128), (2, 999, 1147), (1, 500, 17)):
        call(B, L, S)
    assert builder().compiled == before


def test_the_same_code_with_other_tensors_compiles_nothing():
    q, k, v = tensors("prefill")

    def with_bias(length):
        bias = torch.randn(length, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        return lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx] + bias[q_idx]

    assert_accurate(q, k, v, score_mod=with_bias(347))
    before = builder().compiled
    for length in (348, 999, 5000):
        assert_accurate(q, k, v, score_mod=with_bias(length))
    assert builder().compiled == before


def test_a_moving_offset_compiles_at_most_twice():
    q, k, v = tensors("prefill")
    before = builder().compiled
    for offset in (0.5, 1.5, -3.0, 0.0, 12.5):

        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx * 3.0 + offset > kv_idx, score, score - 2.0)

        assert_accurate(q, k, v, score_mod=score_mod)
    assert builder().compiled - before <= 2


@each_kind
def test_an_index_out_of_range_reads_no_other_memory(kind):
    q, k, v = tensors(kind)
    memory = torch.full((2**20,), torch.nan, device="cuda")
    table = memory[2**19 : 2**19 + 9].fill_(0.5)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx * 1000 - 300_000]

    with override(check=False):
        out = flexattn.flex_attention(
            q, k, v, score_mod=score_mod, enable_gqa=True, kernel_options=KINDS[kind]
        )
    assert out.isfinite().all()


def test_keys_past_the_end_are_never_read():
    """A sparse block of 256 over a length of 384: what lies behind K and V is NaN here."""
    q, k, v = inputs(1, 4, 2, 384, 384, 64, dtype=torch.bfloat16, device="cuda")
    wide = [torch.full((1, 2, 512, 64), torch.nan, device="cuda").bfloat16() for _ in "kv"]
    for memory, x in zip(wide, (k, v), strict=True):
        memory[:, :, :384] = x
    k, v = (memory[:, :, :384] for memory in wide)
    for options in KINDS.values():
        for block in (256, (128, 64), (64, 128), (48, 80)):
            mask = block_mask(causal, q, k, block)
            assert_accurate(q, k, v, block_mask=mask, kernel_options=options)


def test_refusals_on_a_gpu():
    q, k, v = tensors("prefill")
    with pytest.raises(InputError, match="on one device"):
        flexattn.flex_attention(q, k.cpu(), v, enable_gqa=True)
    mask = flexattn.create_block_mask(causal, None, None, 211, 347, device="cpu")
    with pytest.raises(InputError, match=r"block_mask\.to"):
        flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    on_cpu = torch.zeros(8)
    with pytest.raises((InputError, ModError), match="cpu"):
        flexattn.flex_attention(
            q, k, v, score_mod=lambda s, b, h, m, n: s + on_cpu[h], enable_gqa=True
        )
