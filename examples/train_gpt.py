"""A small GPT, trained on text made on the spot: packed documents, soft-capping, a position bias.

Each document is a sentence of a grammar that has to be looked back on: a noun that was named is
named again. Documents are packed into rows, and a row's tokens attend within their document alone:
varlen_attn takes where each begins. The position bias is ALiBi's, or a table by distance that is
learned.

    python examples/train_gpt.py [--steps 300] [--bias learned] [--beside torch]

--beside trains the same model once more, on torch's compiled flex_attention or on the plain
reference, and prints how far the two losses are apart; --svg draws both. Without a GPU: --tiny.
"""

import argparse
import os
import random
import time
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import flexattn
from flexattn.reference import attention as reference

NOUNS, VERBS, NAMES = 40, 24, 30
END, BE, THE, SO = range(4)
VOCABULARY = 4 + NOUNS + VERBS + NAMES
CAP = 30.0


def document(draw):
    """Tokens of a text: names with their nouns, then questions that the names answer."""
    known = {draw.randrange(NAMES): draw.randrange(NOUNS) for _ in range(draw.randint(1, 4))}
    facts = [(name, noun, draw.randrange(VERBS)) for name, noun in known.items()]
    tokens = []
    for name, noun, verb in facts:
        tokens += [4 + NOUNS + VERBS + name, BE, THE, 4 + noun, 4 + NOUNS + verb]
    for name, noun, _ in draw.choices(facts, k=draw.randint(2, 9)):
        tokens += [SO, 4 + NOUNS + VERBS + name, THE, 4 + noun]
    return [*tokens, END]


def batches(seed, batch, length, device):
    """Tokens and the documents that they belong to, int64 [batch, length + 1], without end."""
    draw = random.Random(seed)
    while True:
        rows, owners = [], []
        for _ in range(batch):
            row, owner = [], []
            while len(row) <= length:
                tokens = document(draw)
                owner += [owner[-1] + 1 if owner else 0] * len(tokens)
                row += tokens
            rows.append(row[: length + 1])
            owners.append(owner[: length + 1])
        yield torch.tensor(rows, device=device), torch.tensor(owners, device=device)


class Pack:
    """Rows of documents: documents int64 [batch, length], the number of each token's within it."""

    def __init__(self, documents):
        self.documents = documents
        places = torch.arange(documents.numel(), device=documents.device).view_as(documents)
        first = F.pad(documents.diff() != 0, (1, 0), value=True)
        # Where each begins in all rows one behind another. The size is the same for all batches,
        # so that nothing waits for the device: what is left over is empty documents at the end.
        starts = torch.where(first, places, places.numel()).flatten().sort().values
        self.cu_seqlens = F.pad(starts, (0, 1), value=places.numel()).int()

    @cached_property
    def mask(self):
        """The same as a BlockMask, for others' functions."""

        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (self.documents[b, q_idx] == self.documents[b, kv_idx])

        B, L = self.documents.shape
        return flexattn.create_block_mask(mask_mod, B, None, L, L, self.documents.device)


def ours(q, k, v, score_mod, pack):
    """This library: [batch, length, heads, head_dim]."""
    rows = (x.flatten(0, 1) for x in (q, k, v))
    starts = pack.cu_seqlens
    out = flexattn.varlen_attn(*rows, starts, starts, score_mod=score_mod, causal=True)
    return out.view_as(q)


def torchs():
    """torch's compiled flex_attention."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    def attend(q, k, v, score_mod, pack):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads, score_mod, pack.mask).transpose(1, 2)

    return attend


def plain(q, k, v, score_mod, pack):
    """The reference, differentiated by autograd."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return reference(*heads, score_mod=score_mod, block_mask=pack.mask).out.transpose(1, 2)


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, width, heads, reach, bias, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.score_mod = self._learned(reach) if bias == "learned" else self._alibi()

    def _alibi(self):
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)
        self.register_buffer("table", slopes)

        def score_mod(score, b, h, q_idx, kv_idx):
            return CAP * torch.tanh(score / CAP) + self.table[h] * (kv_idx - q_idx)

        return score_mod

    def _learned(self, reach):
        self.table = nn.Parameter(torch.zeros(self.heads, reach + 1))

        def score_mod(score, b, h, q_idx, kv_idx):
            distance = (q_idx - kv_idx).clamp(0, reach)
            return CAP * torch.tanh(score / CAP) + self.table[h, distance]

        return score_mod

    def forward(self, x, pack):
        """x [batch, length, width]."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(*qkv, self.score_mod, pack).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Blocks between an embedding and the logits of the next token."""

    def __init__(self, width, heads, depth, bias="learned", attend=ours, reach=64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(Block(width, heads, reach, bias, attend) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens, documents):
        """The mean loss of the next tokens: both int64 [batch, length + 1]."""
        pack = Pack(documents[:, :-1])
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, pack)
        logits = F.linear(self.norm(x), self.embed.weight)
        # What follows a document's last token is of another one.
        same = documents[:, 1:] == documents[:, :-1]
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        return (loss * same.flatten()).sum() / same.sum()


def train(name, attend, asked, device):
    """Losses of each step, tokens a second after the first tenth, and the peak memory in MiB."""
    torch.manual_seed(0)
    model = GPT(asked.width, asked.heads, asked.depth, asked.bias, attend).to(device)
    rate = torch.optim.AdamW(model.parameters(), lr=asked.rate, weight_decay=0.01)
    source, losses, begin, warm = batches(0, asked.batch, asked.length, device), [], 0.0, 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(asked.steps):
        if step == asked.steps // 10:
            begin, warm = now(device), step
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(*next(source))
        rate.zero_grad(set_to_none=True)
        loss.backward()
        rate.step()
        losses.append(loss.detach())
        if (step + 1) % max(1, asked.steps // 10) == 0:
            print(f"{name:10} step {step + 1} of {asked.steps}, loss {loss:.3f}", flush=True)
    seconds = now(device) - begin
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else float("nan")
    tokens = asked.batch * asked.length * (asked.steps - warm)
    return torch.stack(losses).tolist(), tokens / seconds, memory


def now(device):
    """The time, once the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def drawn(curves):
    """Losses by step as an SVG."""
    top = max(max(curve) for curve in curves.values())
    shown = []
    for i, (name, curve) in enumerate(curves.items()):
        color, dash = ("#06c", "") if not i else ("#d50", ' stroke-dasharray="4 3"')
        at = " ".join(
            f"{20 + 400 * n / max(1, len(curve) - 1):.1f},{200 - 180 * y / top:.1f}"
            for n, y in enumerate(curve)
        )
        shown.append(f'<polyline points="{at}" fill="none" stroke="{color}"{dash}/>')
        shown.append(f'<text x="300" y="{30 + 16 * i}" fill="{color}">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 430 210" font-size="12">'
    return "\n".join([head, *shown, "</svg>\n"])


def parsed(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (
        ("steps", 300), ("batch", 8), ("length", 2048), ("width", 512), ("heads", 8), ("depth", 6)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--bias", choices=("learned", "alibi"), default="learned")
    parser.add_argument("--beside", choices=("torch", "reference"))
    parser.add_argument("--svg", type=Path, help="where the curves of the losses are drawn")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU trains in seconds")
    asked = parser.parse_args(arguments)
    if asked.tiny:
        asked.batch, asked.length, asked.width, asked.heads, asked.depth = 2, 96, 32, 2, 2
        asked.rate, asked.steps = 1e-2, min(asked.steps, 60)
    return asked


def said_where(device):
    """Say so if no GPU, or the interpreter, is what trains."""
    interpreted = os.environ.get("FLEXATTN_INTERPRET") == "1"
    if interpreted or device == "cpu":
        why = "There is no GPU" if device == "cpu" else "FLEXATTN_INTERPRET is 1"
        how = (
            "kernels run in Triton's interpreter, slowly" if interpreted else "plain torch attends"
        )
        print(f"{why}: {how}. --tiny has sizes for it.", flush=True)


def main(arguments=None):
    """Train, print, and return the losses by name."""
    asked = parsed(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = {"flexattn": ours}
    if asked.beside:
        chosen[asked.beside] = torchs() if asked.beside == "torch" else plain
    said_where(device)
    curves = {}
    for name, attend in chosen.items():
        curves[name], speed, memory = train(name, attend, asked, device)
        held = "" if device == "cpu" else f", {memory:.0f} MiB at the most"
        first, last = curves[name][0], sum(curves[name][-10:]) / len(curves[name][-10:])
        print(f"{name:10} loss {first:.3f} to {last:.3f}, {speed:.0f} tokens/s{held}")
    if asked.beside:
        apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        print(f"the losses are at most {apart:.2e} apart")
    if asked.svg:
        asked.svg.write_text(drawn(curves))
    return curves


if __name__ == "__main__":
    main()
