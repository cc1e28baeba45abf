"""A backward's records are filed apart: by its kind, and by what gets a gradient."""

from dataclasses import replace

import torch

from flexattn.catalogue import causal, relative_bias
from flexattn.device import named
from flexattn.records.environment import source_hash
from flexattn.records.layers import find
from flexattn.records.record import key_of
from tests.problems import problem

BIAS = relative_bias(torch.zeros(32, 128), 64)


def test_keys_of_a_backward():
    plain = problem("backward", score_mod=BIAS, mask_mod=causal)
    learned = replace(plain, structure=replace(plain.structure, grads=(0,)))
    shared = replace(plain, broadcast_kv=True)
    forward = problem("prefill", score_mod=BIAS, mask_mod=causal)
    keys = {key_of(each).digest() for each in (plain, learned, shared, forward)}
    assert len(keys) == 4 and key_of(plain).kind == "backward"
    assert find(plain, named("nvidia-h200")) is None


def test_its_environment_hashes_what_renders_it():
    device = named("nvidia-h200")
    assert source_hash("backward", device) != source_hash("prefill", device)
