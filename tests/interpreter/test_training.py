"""The example that trains a GPT: by kernels in the interpreter, beside the reference."""

import xml.etree.ElementTree as ET

import pytest
import torch

from examples import train_gpt, train_nsa
from flexattn.frontend.autograd import GradCall


@pytest.mark.parametrize("bias", ["learned", "alibi"])
def test_losses_lie_on_one_another(bias, monkeypatch, tmp_path, capsys):
    ran = []
    attend = GradCall.attend
    monkeypatch.setattr(GradCall, "attend", lambda *a: ran.append(a) or attend(*a))
    picture = tmp_path / "losses.svg"
    sizes = "--batch 1 --length 43 --width 16 --heads 2 --depth 1 --steps 5 --rate 0.03".split()
    curves = train_gpt.main(
        [*sizes, "--bias", bias, "--beside", "reference", "--svg", str(picture)]
    )
    ours, plain = map(torch.tensor, curves.values())
    assert ran, "kernels were differentiated"
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert ours[-1] < ours[0] - 0.3
    said = capsys.readouterr().out
    assert "interpreter" in said and "step 5 of 5" in said and "tokens/s" in said
    assert len(ET.parse(picture).getroot().findall("{*}polyline")) == 2


def test_sparse_attention_learns(capsys):
    sizes = "--batch 1 --length 70 --width 32 --heads 2 --depth 1 --steps 2 --rate 0.03".split()
    first, last = train_nsa.main([*sizes, "--k", "2", "--window", "24"])["nsa"]
    assert last < first - 0.2
    said = capsys.readouterr().out
    assert "interpreter" in said and "nsa    step 2 of 2" in said


def test_a_pack_begins_where_documents_do():
    pack = train_gpt.Pack(torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]))
    assert pack.cu_seqlens.tolist() == [0, 2, 3, 4, 5, 8, 8, 8, 8]


def test_text_has_documents():
    tokens, owners = next(train_gpt.batches(0, 3, 200, "cpu"))
    assert tokens.shape == owners.shape == (3, 201) and tokens.max() < train_gpt.VOCABULARY
    ends = (tokens[:, :-1] == train_gpt.END).int()
    assert torch.equal(ends, owners.diff()) and ends.sum() > 6
    again, _ = next(train_gpt.batches(0, 3, 200, "cpu"))
    assert torch.equal(tokens, again)
