"""A small server: continuous batching over a paged cache, prompts in chunks, decoding as one CUDA graph.

Requests join the running batch as soon as a slot and pages are free, and leave it when they are done. A step
is one packed call for chunks of prompts and one replay of the graph that decodes a token of every running
request. The model is a tiny transformer with random weights; its tokens are compared with those of plain
PyTorch, which has no cache and no batch.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

import kernels_dsl
from examples.place import DEVICE, GPU, running, size

LAYERS, HEADS, KV_HEADS, DIM = size(4, 1), size(16, 2), size(4, 1), 64
WIDTH, VOCABULARY = HEADS * DIM, 512
PAGE, PAGES = 16, size(4096, 6)
SLOTS, CHUNK = size(64, 2), size(2048, 12)
"""Requests that decode at once; tokens of prompts in a step."""
LONGEST = size(1024, 32)
"""Keys that a request has room for."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, q (T, HEADS, DIM), k and v (T, KV_HEADS, DIM) of new tokens -> their attention (T, HEADS, DIM)."""


class Model:
    """Layers of attention and a gated product, with rotary positions."""

    def __init__(self) -> None:
        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, device=DEVICE) / shape[-2] ** 0.5).bfloat16()

        self.embedding, self.head = weights(VOCABULARY, WIDTH), weights(WIDTH, VOCABULARY)
        self.qkv = weights(LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = weights(LAYERS, WIDTH, WIDTH)
        self.up, self.down = weights(LAYERS, WIDTH, 4 * WIDTH), weights(LAYERS, 2 * WIDTH, WIDTH)
        steps = torch.arange(DIM // 2, device=DEVICE) / (DIM // 2)
        self.frequencies = 10000.0**-steps

    def __call__(self, tokens: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The logits (T, VOCABULARY) after tokens (T,) at places (T,) of their sequences.

        `attend` is all that a cache changes.
        """
        x = functional.rms_norm(self.embedding[tokens], (WIDTH,))
        for layer in range(LAYERS):
            product = (functional.rms_norm(x, (WIDTH,)) @ self.qkv[layer]).unflatten(-1, (-1, DIM))
            q, k, v = product.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            attended = attend(layer, self.rotated(q, places), self.rotated(k, places), v)
            x = x + attended.flatten(1) @ self.out[layer]
            gate, up = (functional.rms_norm(x, (WIDTH,)) @ self.up[layer]).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ self.down[layer]
        return functional.rms_norm(x, (WIDTH,)) @ self.head

    def rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """x (T, heads, DIM), rotated by its places."""
        angles = places[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@dataclass
class Request:
    """A prompt, and how many tokens are wanted. `cached`: tokens of the prompt that the cache has."""

    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0


class Server:
    """The cache, its free pages, and the requests that wait, read their prompts, and decode."""

    def __init__(self, model: Model, requests: list[Request]) -> None:
        self.model = model
        self.waiting = deque(requests)
        self.slots: list[Request | None] = [None] * SLOTS
        self.free = random.sample(range(PAGES), PAGES)  # pages of a request may lie anywhere
        shape = (LAYERS, 2, PAGES, PAGE, KV_HEADS, DIM)
        self.cache = torch.full(shape, float("nan"), device=DEVICE, dtype=torch.bfloat16)
        numbers = {"dtype": torch.int32, "device": DEVICE}
        self.table = torch.zeros(SLOTS, LONGEST // PAGE, **numbers)
        self.lengths, self.latest = torch.zeros(SLOTS, **numbers), torch.zeros(SLOTS, **numbers)
        self.decodes = torch.zeros(SLOTS, **numbers)  # 1 in slots whose prompt is read
        self.replay = self.captured() if GPU else self.decode

    def slots_of(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Slots of the cache for the tokens (T,) at `places` of the sequences of slots `rows`."""
        return self.table[rows, places // PAGE] * PAGE + places % PAGE

    def admit(self) -> None:
        """Give slots to waiting requests, in their order, while there are pages for all of their tokens."""
        for slot, occupant in enumerate(self.slots):
            if occupant is not None or not self.waiting:
                continue
            request = self.waiting[0]
            need = -(-(len(request.prompt) + request.wanted) // PAGE)
            if need > len(self.free):
                return
            self.slots[slot] = self.waiting.popleft()
            request.pages = [self.free.pop() for _ in range(need)]
            self.table[slot, :need] = torch.tensor(request.pages, dtype=torch.int32)

    def prefill(self) -> int:
        """Read up to CHUNK tokens of prompts in one packed call, and say how many."""
        chunks: list[tuple[int, Request, int]] = []
        room = CHUNK
        for slot, request in enumerate(self.slots):
            if request is not None and room:
                length = min(len(request.prompt) - request.cached, room)
                if length:
                    chunks.append((slot, request, length))
                    room -= length
        if not chunks:
            return 0
        spans = [range(r.cached, r.cached + length) for _, r, length in chunks]
        numbers = {"dtype": torch.int32, "device": DEVICE}
        rows = torch.tensor([slot for slot, _, _ in chunks], device=DEVICE)
        sizes = torch.tensor([len(span) for span in spans], **numbers)
        starts = torch.cat([torch.zeros(1, **numbers), sizes.cumsum(0, dtype=torch.int32)])
        used = torch.tensor([span.stop for span in spans], **numbers)
        places = torch.tensor([place for span in spans for place in span], **numbers)
        where = self.slots_of(rows.repeat_interleave(sizes, output_size=len(places)), places)
        table, longest = self.table[rows], max(map(len, spans))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache[layer]
            kernels_dsl.append_kv(k, v, keys, values, where)
            attended: torch.Tensor = kernels_dsl.attention_varlen(
                q, keys, values, starts, None, longest, causal=True, seqused_k=used, block_table=table
            )
            return attended

        tokens = [r.prompt[place] for (_, r, _), span in zip(chunks, spans) for place in span]
        logits = self.model(torch.tensor(tokens, device=DEVICE), places, attend)
        best = logits[starts[1:].long() - 1].argmax(-1).to(torch.int32)
        self.lengths[rows], self.latest[rows] = used, best
        for (slot, request, length), token in zip(chunks, best.tolist()):
            request.cached += length
            if request.cached == len(request.prompt):
                request.tokens.append(token)
                self.decodes[slot] = 1
                self.leave_if_done(slot)
        return len(tokens)

    def decode(self) -> None:
        """A token of every slot that decodes. The host reads nothing, and no size depends on the requests."""
        rows, used = torch.arange(SLOTS, device=DEVICE), (self.lengths + 1) * self.decodes
        where = self.slots_of(rows, self.lengths * self.decodes)
        where = torch.where(self.decodes == 1, where, -1)  # others write nothing

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache[layer]
            kernels_dsl.append_kv(k, v, keys, values, where)
            attended = kernels_dsl.attention_decode(
                q[:, None], keys, values, seqused_k=used, block_table=self.table
            )
            assert isinstance(attended, torch.Tensor)
            return attended[:, 0]

        best = self.model(self.latest, self.lengths, attend).argmax(-1).to(torch.int32)
        self.latest.copy_(torch.where(self.decodes == 1, best, self.latest))
        self.lengths += self.decodes

    def captured(self) -> Callable[[], None]:
        """`decode` as a CUDA graph. No request is there yet, so a run before the capture changes nothing."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.decode()  # compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decode()
        return graph.replay

    def step(self) -> int:
        """Admit, read prompts, decode: the tokens of prompts that were read."""
        decoding = [slot for slot, at in enumerate(self.decodes.tolist()) if at]
        if decoding:
            self.replay()
            for slot, token in zip(decoding, self.latest[decoding].tolist()):
                request = self.slots[slot]
                assert request is not None
                request.tokens.append(token)
                self.leave_if_done(slot)
        self.admit()
        return self.prefill()

    def leave_if_done(self, slot: int) -> None:
        """Free the slot and the pages of a request that has all of its tokens."""
        request = self.slots[slot]
        if request is not None and len(request.tokens) == request.wanted:
            self.free += request.pages
            self.slots[slot] = None
            self.decodes[slot] = self.lengths[slot] = 0

    @property
    def busy(self) -> int:
        """Requests that have a slot."""
        return sum(request is not None for request in self.slots)


def serve(model: Model, requests: list[Request]) -> None:
    """Serves all requests; prints progress and tokens per second."""
    server, step = Server(model, requests), 0
    start = time.perf_counter()
    while server.waiting or server.busy:
        read = server.step()
        if step % size(50, 1) == 0:
            made = sum(len(request.tokens) for request in requests)
            print(
                f"step {step}: {read} tokens of prompts read, {server.busy} requests running, "
                f"{len(server.waiting)} waiting, {made} tokens made"
            )
        step += 1
    seconds, made = time.perf_counter() - start, sum(len(request.tokens) for request in requests)
    rate = f"{made / seconds:.0f} tokens/s" if GPU else "in the emulator, whose time says nothing"
    print(f"{made} tokens of {len(requests)} requests in {step} steps, {rate}")
    assert len(server.free) == PAGES, "a page was not given back"


def plain(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a whole sequence, by PyTorch."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def compare(model: Model, requests: list[Request]) -> None:
    """AssertionError where a token is not the one that the model finds most likely without cache and batch.

    Logits have a spread of 1. Two that differ by less than the rounding of bf16 may change places.
    """
    equal, worst = 0, 0.0
    for request in requests:
        tokens = torch.tensor(request.prompt + request.tokens[:-1], device=DEVICE)
        logits = model(tokens, torch.arange(len(tokens), device=DEVICE), plain).float()
        logits, chosen = logits[-len(request.tokens) :], torch.tensor(request.tokens, device=DEVICE)
        equal += int((logits.argmax(-1) == chosen).sum())
        behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        worst = max(worst, float(behind.max()))
    made = sum(len(request.tokens) for request in requests)
    print(
        f"{equal} of {made} tokens are plain PyTorch's; no logit is more than {worst:.2g} below the largest"
    )
    assert worst <= 0.1, "a token is wrong"


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model, requests = Model(), []
    for _ in range(size(256, 3)):
        length = random.randint(size(16, 5), size(700, 22))
        wanted = random.randint(size(32, 2), size(256, 3))
        requests.append(Request([random.randrange(VOCABULARY) for _ in range(length)], wanted))
    with running():
        serve(model, requests)
    compare(model, requests)


if __name__ == "__main__":
    main()
