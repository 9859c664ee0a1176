"""fp8 training of a small MLP: every Linear but the last becomes a ScaledLinear; the optimizer keeps bf16."""

from __future__ import annotations

import torch

import kernels_dsl
from examples.place import DEVICE, running, size


def main() -> None:
    torch.manual_seed(0)
    width, rows, steps = size(2048, 32), size(4096, 32), size(100, 2)
    layers = [
        torch.nn.Linear(width, 2 * width, bias=False), torch.nn.ReLU(),
        torch.nn.Linear(2 * width, width, bias=False), torch.nn.ReLU(),
        torch.nn.Linear(width, 16),
    ]  # fmt: skip
    model = torch.nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    replaced = kernels_dsl.ScaledLinear.replace(model, lambda name, layer: name != "4", recipe="row")
    print("multiplied in fp8:", ", ".join(f"layer {name}" for name in replaced))
    optimizer = torch.optim.AdamW(model.parameters(), lr=size(1, 30) * 1e-4)
    x = torch.randn(rows, width, device=DEVICE).bfloat16()
    classes = torch.randint(16, (rows,), device=DEVICE)
    losses = []
    with running():
        for step in range(steps):
            loss = torch.nn.functional.cross_entropy(model(x).float(), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"step {step + 1} of {steps}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0], "the loss must fall"


if __name__ == "__main__":
    main()
