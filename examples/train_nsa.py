"""A small language model whose attention is native sparse attention (NSA), trained from scratch.

Each row of a batch is text of examples/train_gpt.py, whose answers lie far back. A layer has three
branches, which `flexattn.sparse.nsa` adds up by gates: keys that a network compresses, the blocks
of keys that these put first, and a window.

    python -m examples.train_nsa [--steps 300] [--beside dense]

--beside dense trains the same model once more on causal attention to all keys. Without a GPU:
--tiny.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from examples.train_gpt import VOCABULARY, batches, now, said_where
from flexattn.sparse import nsa

# Keys that are compressed into one, the step from one to the next, and keys of a block.
LENGTH, STRIDE, UNIT = 32, 16, 32


class Compress(nn.Module):
    """LENGTH neighbouring keys or values as one: each has a place, and an MLP takes them all."""

    def __init__(self, size):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(LENGTH, size))
        self.up, self.down = nn.Linear(LENGTH * size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        """[batch, heads, L, size] as [batch, heads, blocks, size]."""
        parts = x.unfold(2, LENGTH, STRIDE).transpose(3, 4) + self.place
        return self.down(F.gelu(self.up(parts.flatten(3))))


class Attention(nn.Module):
    """Three branches with keys and values of their own, and a gate of each head for each."""

    def __init__(self, width, heads, kv_heads, k, window, dense):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.k, self.window, self.dense = k, window, dense
        self.query = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, 6 * kv_heads * self.size, bias=False)
        self.gates = nn.Linear(width, 3 * heads)
        self.compress = nn.ModuleList(Compress(self.size) for _ in "kv")
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        """[batch, L, width]."""
        q = self.query(x).unflatten(2, (self.heads, self.size)).transpose(1, 2)
        six = self.keys(x).unflatten(2, (6, self.kv_heads, self.size)).permute(2, 0, 3, 1, 4)
        pairs = six.unflatten(0, (3, 2))
        if self.dense:
            out = F.scaled_dot_product_attention(q, *pairs[1], is_causal=True, enable_gqa=True)
        else:
            gates = self.gates(x).sigmoid().unflatten(2, (self.heads, 3)).transpose(1, 2)
            coarse = tuple(net(y) for net, y in zip(self.compress, pairs[0], strict=True))
            out = nsa(
                q, coarse, tuple(pairs[1]), tuple(pairs[2]), gates, length=LENGTH, stride=STRIDE,
                unit=UNIT, k=self.k, window=self.window,
            )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2).to(x.dtype))


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, asked, dense):
        super().__init__()
        width = asked.width
        sizes = width, asked.heads, asked.kv_heads, asked.k, asked.window
        self.attend = Attention(*sizes, dense)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """[batch, L, width]."""
        x = x + self.attend(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Blocks between an embedding of tokens and places, and the logits of the next token."""

    def __init__(self, asked, dense):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, asked.width)
        nn.init.normal_(self.embed.weight, std=asked.width**-0.5)
        self.place = nn.Parameter(torch.randn(asked.length, asked.width) * asked.width**-0.5)
        self.blocks = nn.Sequential(*(Block(asked, dense) for _ in range(asked.depth)))
        self.norm = nn.RMSNorm(asked.width)

    def forward(self, tokens):
        """The mean loss of the next tokens: int64 [batch, length + 1]."""
        x = self.blocks(self.embed(tokens[:, :-1]) + self.place)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(name, asked, device):
    """The losses of all steps."""
    torch.manual_seed(0)
    model = Model(asked, name == "dense").to(device)
    rate = torch.optim.AdamW(model.parameters(), lr=asked.rate)
    losses, source, begin = [], batches(0, asked.batch, asked.length, device), now(device)
    for step in range(1, asked.steps + 1):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(next(source)[0])
        rate.zero_grad(set_to_none=True)
        loss.backward()
        rate.step()
        losses.append(loss.detach())
        if step % max(1, asked.steps // 10) == 0:
            spent = now(device) - begin
            print(
                f"{name:6} step {step} of {asked.steps}, loss {loss:.3f}, {spent:.0f} s",
                flush=True,
            )
    return torch.stack(losses).tolist()


def main(arguments=None):
    """Train, print, and return the losses by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (
        ("steps", 300), ("batch", 4), ("length", 4096), ("width", 512), ("heads", 16),
        ("kv-heads", 1), ("depth", 4), ("k", 16), ("window", 256),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--beside", choices=("dense",))
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU trains in a minute")
    asked = parser.parse_args(arguments)
    if asked.tiny:
        asked.batch, asked.length, asked.width, asked.heads, asked.depth = 2, 128, 32, 2, 2
        asked.k, asked.window, asked.rate, asked.steps = 3, 32, 1e-2, min(asked.steps, 40)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    said_where(device)
    names = ("nsa", "dense") if asked.beside else ("nsa",)
    curves = {name: train(name, asked, device) for name in names}
    for name, curve in curves.items():
        print(f"{name:6} loss {curve[0]:.3f} to {sum(curve[-5:]) / len(curve[-5:]):.3f}")
    return curves


if __name__ == "__main__":
    main()
