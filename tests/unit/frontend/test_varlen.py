"""varlen_attn(): packed sequences against the float64 oracle of each by itself."""

import copy
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from flexattn import flex_attention, settings, varlen_attn
from flexattn.catalogue import softcap
from flexattn.errors import InputError, InputTypeError, LayoutError, UnsupportedError
from flexattn.frontend import varlen
from flexattn.kernels.hopper_backward.masks import band_of
from tests.packs import KEYS, LENGTHS, alone, offsets, pack

WINDOWS = {
    "all": {},
    "causal": {"causal": True},
    "band": {"window": (20, 7)},
    "before": {"window": (20, -1)},
    "after": {"window": (-1, 5)},
    "causal window": {"window": (40, -1), "causal": True},
}


def sides(causal=False, window=(-1, -1)):
    return {"left": window[0], "right": 0 if causal else window[1]}


def close(got, wanted):
    torch.testing.assert_close([x.double() for x in got], list(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [None, KEYS], ids=["alike", "other keys"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_sequences(name, keys):
    given = pack(keys=keys)
    got = varlen_attn(*given, 128, 130, return_lse=True, **WINDOWS[name])
    assert got[0].is_contiguous()
    close(got, alone(*given, **sides(**WINDOWS[name])))


def test_another_window_is_a_band_too():
    """The number of a process's second window became a kernel's argument.

    Hopper's backward of packs, which takes no mask but a band, then left these calls to others:
    1.1 to 1.4 times the time.
    """
    for left, right in (512, 0), (128, 0), (64, 3), (40, 9):
        mask = varlen.window_mask(left, right)
        assert band_of(mask.mod.expr) == (-right, left) and not mask.scalars


@pytest.mark.parametrize("lengths", [[200], [0], [1], [0, 0, 7], [0, 300, 0]], ids=str)
def test_few_sequences(lengths):
    given = pack(lengths)
    close(varlen_attn(*given, causal=True, return_lse=True), alone(*given, right=0))


@pytest.mark.parametrize("lengths", [([0, 0], [3, 0]), ([3, 0], [0, 0])], ids=str)
def test_no_query_or_no_key(lengths):
    given = pack(*lengths)
    out, lse = varlen_attn(*given, return_lse=True)
    assert out.shape == (sum(lengths[0]), 4, 8) and not out.any() and (lse == -torch.inf).all()


def by_sequence(table, bias):
    """Mods that read all positions."""

    def score_mod(score, b, h, q_idx, kv_idx):
        near = bias[h, (q_idx - kv_idx).clamp(0, 40)]
        return score + near + table[b] * kv_idx + 0.01 * q_idx

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx % 3 != b % 3) | (kv_idx == 0) | (q_idx == kv_idx)

    return score_mod, mask_mod


def graded(keys, packed):
    """Results and gradients of a pack, or of its sequences by themselves."""
    q, k, v, *cu = pack(keys=keys, dtype=torch.float64)
    table = torch.linspace(-0.1, 0.1, len(LENGTHS), dtype=torch.float64)
    bias = torch.linspace(-1, 1, 4 * 41, dtype=torch.float64).view(4, 41)
    logits = torch.linspace(-1, 1, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, table, bias, logits)]
    score_mod, mask_mod = by_sequence(table, bias)
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "sinks": logits}
    if packed:
        out, lse = varlen_attn(q, k, v, *cu, causal=True, return_lse=True, **mods)
    else:
        out, lse = alone(q, k, v, *cu, right=0, **mods)
    weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
    return out, lse, *torch.autograd.grad((out * weights).sum() + 0.1 * lse[lse.isfinite()].sum(),
                                          leaves)  # fmt: skip


@pytest.mark.parametrize("keys", [None, KEYS], ids=["alike", "other keys"])
def test_packed_equals_unpacked_with_mods_by_position_and_gradients(keys):
    close(graded(keys, True), graded(keys, False))


def test_rows_behind_the_last_sequence_are_one_more():
    q, k, v, cu, _ = pack(more=30)
    table = torch.zeros(len(LENGTHS))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[b]

    whole = offsets([*LENGTHS, 30])
    got = varlen_attn(q, k, v, cu, cu, causal=True, score_mod=score_mod, return_lse=True)
    close(got, alone(q, k, v, whole, whole, right=0))


def test_what_is_asked_beside():
    given = pack()
    out, aux = varlen_attn(*given, return_aux=AuxRequest(lse=True, max_scores=True))
    wanted = varlen_attn(*given, return_lse=True)
    torch.testing.assert_close((out, aux.lse), wanted)
    assert aux.max_scores.shape == aux.lse.shape == (4, sum(LENGTHS))


def test_names_and_values_of_other_functions():
    q, k, v, cu, _ = pack()
    got = varlen_attn(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=128, max_seqlen_k=128,
        softmax_scale=0.3, window_size=(20, 0), softcap=0.0, alibi_slopes=None, block_table=None,
        deterministic=True, num_splits=1, dropout_p=0.0,
    )  # fmt: skip
    torch.testing.assert_close(got, varlen_attn(q, k, v, cu, cu, scale=0.3, window=(20, 0)))
    capped = varlen_attn(q, k, v, cu.long(), cu.long(), score_mod=softcap(2.0), window=(None, 0))
    assert capped.isfinite().all()


Q, K, V, CU, _ = pack()
REFUSED = {
    "four dimensions": ({"q": Q[None]}, LayoutError, "q is of shape.*total length"),
    "a list": ({"v": [1.0]}, LayoutError, "v is list"),
    "a list of lengths": ({"cu_seqlens_q": [0, 3]}, InputTypeError, "is a list.*cumsum"),
    "float lengths": ({"cu_seqlens_k": CU.float()}, InputTypeError, "of torch.float32.*int32"),
    "fewer sequences": ({"cu_seqlens_k": CU[:-1]}, InputError, r"\(7,\).*\(6,\).*one more"),
    "past the end": ({"cu_seqlens_k": CU + CU}, InputError, "cu_seqlens_k is .*k has 261"),
    "not from 0": ({"cu_seqlens_q": CU + 1}, InputError, "begins with 0"),
    "falling": ({"cu_seqlens_q": CU.flip(0)}, InputError, "never decreases"),
    "a window": ({"window": 5}, InputTypeError, r"window is 5.*\(left, right\).*causal=True"),
    "softcap": ({"softcap": 30.0}, UnsupportedError, "softcap is 30.0.*score_mod=.*softcap"),
    "slopes": ({"alibi_slopes": Q}, UnsupportedError, "alibi_slopes is a Tensor.*slopes"),
    "pages": ({"block_table": CU}, UnsupportedError, "block_table.*DecodePlan"),
    "a misspelt name": ({"casual": True}, InputTypeError, "no argument casual"),
    "values of another length": ({"v": V[1:]}, InputError, "key and value agree"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changed, error, words = REFUSED[name]
    given = {"q": Q, "k": K, "v": V, "cu_seqlens_q": CU, "cu_seqlens_k": CU} | changed
    with pytest.raises(error, match=f"(?s){words}"):
        varlen_attn(**given)


def seen(monkeypatch):
    """The masks and score_mods that flex_attention is called with."""
    calls = []

    def watched(*args, **kwargs):
        calls.append((kwargs["block_mask"], kwargs["score_mod"]))
        return flex_attention(*args, **kwargs)

    monkeypatch.setattr(varlen, "flex_attention", watched)
    return calls


def test_layers_of_a_step_share_what_was_found(monkeypatch):
    calls = seen(monkeypatch)
    q, k, v, cu, _ = pack()
    cap = softcap(5.0)
    for _ in range(2):
        varlen_attn(q, k, v, cu, cu, causal=True, score_mod=cap)
    varlen_attn(q, k, v, cu, cu, window=(9, 0), score_mod=cap)
    assert calls[0][0] is calls[1][0] and calls[0][1] is calls[1][1]
    assert calls[2][0] is not calls[0][0]


def test_new_lengths_in_the_same_tensor(monkeypatch):
    q, k, v, cu, _ = pack()
    for lengths in ([100, 0, 61, 0, 50, 50], [0, 0, 0, 0, 0, 261]):
        cu.copy_(offsets(lengths))
        got = varlen_attn(q, k, v, cu, cu, causal=True, return_lse=True)
        close(got, alone(q, k, v, cu, cu, right=0))
    with torch.inference_mode():
        inner = cu.clone()
        for lengths in ([261, 0, 0, 0, 0, 0], LENGTHS):
            inner.copy_(offsets(lengths))
            got = varlen_attn(q, k, v, inner, inner, causal=True, return_lse=True)
            close(got, alone(q, k, v, inner, inner, right=0))


def test_nothing_is_kept_of_cu_seqlens_that_are_gone():
    q, k, v, cu, _ = pack()
    before = len(varlen._packs)
    varlen_attn(q, k, v, cu, cu)
    assert len(varlen._packs) == before + 1
    cu.add_(0)
    varlen_attn(q, k, v, cu, cu)
    assert len(varlen._packs[cu][1].items()) == 1
    assert torch.equal(copy.deepcopy(cu), cu)
    del cu, _
    assert len(varlen._packs) == before


def test_a_compiled_graph_reads_new_lengths_and_is_compiled_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v, cu, _ = pack()
    score_mod, mask_mod = by_sequence(torch.zeros(len(LENGTHS)), torch.ones(4, 41))

    def attend(cu, longest):
        return varlen_attn(
            q, k, v, cu, cu, longest, longest, causal=True, score_mod=score_mod,
            mask_mod=mask_mod, return_lse=True,
        )  # fmt: skip

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in (LENGTHS, [0, 0, 0, 0, 0, 261]):
        cu.copy_(offsets(lengths))
        torch.testing.assert_close(compiled(cu, max(lengths)), attend(cu, max(lengths)))
    assert counter.frame_count == 1
    with torch.no_grad():  # where no lists by key are made
        torch.testing.assert_close(compiled(cu, 261), attend(cu, 261))


@pytest.mark.parametrize("rows", [100, 261])
def test_a_compiled_graph_searches_no_view(rows):
    """Inductor of torch 2.11 loses a view's offset: https://github.com/pytorch/pytorch/issues/182343."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    searched = []

    def seen(graph, example):
        found = [x for x in graph.graph.nodes if "searchsorted" in str(x.target)]
        searched.extend(str(x.args[0].target) for x in found)
        return make_boxed_func(graph.forward)

    q, k, v, cu, _ = pack([rows - 30, 0, 30])
    attend = partial(varlen_attn, q, k, v, causal=True)
    compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=seen))
    torch.testing.assert_close(compiled(cu, cu), attend(cu, cu))
    assert len(searched) == 5
    assert not any(name in each for each in searched for name in ("slice", "view", "select"))


def test_a_trace_by_make_fx_is_refused_by_name():
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(UnsupportedError, match="is traced, as by torch"):
        make_fx(lambda q, cu: varlen_attn(q, q, q, cu, cu))(Q, CU)


def test_checked_mode_reads_inside_of_a_sequence():
    """Positions of pairs that the mask removes may be anywhere."""
    q, k, v, cu, _ = pack()
    table = torch.zeros(128, 128)
    with settings.override(check=True):
        varlen_attn(q, k, v, cu, cu, score_mod=lambda s, b, h, i, j: s + table[i, j])
