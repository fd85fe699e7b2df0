"""The model of examples/train_gpt in PyTorch: same parameters, same names, same data order."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, dim = x.shape
        qkv = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, dim))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, dim, layers, heads, seq, tied=False):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, dim)
        self.wpe = nn.Embedding(seq, dim)
        self.h = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, x):
        y = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            y = block(y)
        return self.head(self.ln(y))


@torch.no_grad()
def initialise(model):
    """The weights that make_gpt of examples/train_gpt/model.h draws, given the same seed."""
    added = 0.02 / math.sqrt(2.0 * len(model.h))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith(("out.weight", "down.weight")):
            parameter.normal_(0, added)
        elif parameter.dim() == 2:
            parameter.normal_(0, 0.02)


def parameter_groups(model, weight_decay):
    """Matrices and embeddings decay; biases and LayerNorm do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def mix(x):
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


class Text:
    """Windows of a text, chosen by (seed, step, index) as examples/train_gpt/data.cpp does."""

    def __init__(self, path, seq, seed):
        with open(path, "rb") as file:
            self.bytes = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
        self.window = seq + 1
        self.train_size = len(self.bytes) - len(self.bytes) // 20
        self.seed = seed

    def batch(self, step, begin, end):
        starts = self.train_size - self.window + 1
        rows = []
        for index in range(begin, end):
            at = mix((mix((mix(self.seed) + step) % 2**64) + index) % 2**64) % starts
            rows.append(self.bytes[at : at + self.window])
        return torch.stack(rows)


def learning_rate(peak, warmup, steps, done):
    if done < warmup:
        return peak * (done + 1) / warmup
    part = min(1.0, (done - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)))
