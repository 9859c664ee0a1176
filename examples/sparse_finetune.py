"""Fine-tuning with block-sparse weights: prune a trained layer to its largest blocks, train what is left."""

from __future__ import annotations

import torch

import kernels_dsl
from examples.place import DEVICE, GPU, running, size


def main() -> None:
    torch.manual_seed(0)
    width, rows, steps = size(2048, 64), size(4096, 32), size(100, 4)
    block, density = (64, 64) if GPU else (16, 16), 0.25
    teacher = torch.nn.Linear(width, width, device=DEVICE, dtype=torch.bfloat16)
    layer = kernels_dsl.BsrLinear.from_linear(teacher, block, density=density)
    optimizer = torch.optim.SGD(layer.parameters(), lr=size(50, 20), momentum=0.5)
    x = torch.randn(rows, width, device=DEVICE).bfloat16()
    with torch.no_grad():
        wanted = teacher(x)
    losses = []
    with running():
        for step in range(steps):
            loss = torch.nn.functional.mse_loss(layer(x).float(), wanted.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"step {step + 1} of {steps}: loss {losses[-1]:.5f}")
    print(f"{layer.weight.density:.0%} of the blocks are kept; loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    assert losses[-1] < losses[0], "the loss must fall"


if __name__ == "__main__":
    main()
