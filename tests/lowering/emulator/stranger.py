"""A program as others write them: it knows nothing of the emulator, and believes that it has a GPU.

Reverses tiles of 128 elements through shared memory, with as many CTAs as there are SMs, each of which takes
several tiles. ``--plant reuse`` takes out the barrier between two tiles, ``--plant end`` reads past the end.
"""

import argparse

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

TILE = 128


class ReverseTiles:
    def __init__(self, plant: str) -> None:
        self.plant = plant

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, sms: cutlass.Constexpr, stream: cuda.CUstream):
        tiles = cute.ceil_div(cute.size(x), TILE)
        self.kernel(x, y, tiles).launch(grid=[min(sms, tiles), 1, 1], block=[TILE, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, tiles: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        tile_of = cutlass.utils.SmemAllocator().allocate_tensor(
            cutlass.Float32, cute.make_layout(TILE), byte_alignment=16
        )
        past = 1 if cutlass.const_expr(self.plant == "end") else 0
        while tile < tiles:
            tile_of[thread] = x[tile * TILE + thread + past]
            cute.arch.sync_threads()
            y[tile * TILE + thread] = tile_of[TILE - 1 - thread]
            if cutlass.const_expr(self.plant != "reuse"):
                cute.arch.sync_threads()
            tile += ctas


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", type=int, default=6)
    parser.add_argument("--plant", default="")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise RuntimeError("a GPU is needed")
    torch.manual_seed(0)
    cutlass.cuda.initialize_cuda_context()
    x = torch.randn(args.tiles * TILE, device="cuda")
    y = torch.empty_like(x)
    assert x.is_cuda and y.device.type == "cuda" and y.device == x.device
    mx, my = (from_dlpack(t, assumed_align=16).mark_layout_dynamic() for t in (x, y))
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    sms = cutlass.utils.HardwareInfo().get_device_multiprocessor_count()
    compiled = cute.compile(ReverseTiles(args.plant), mx, my, sms, stream)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    compiled(mx, my, stream)
    end.record()
    torch.cuda.synchronize()
    print(f"{start.elapsed_time(end):.3f} ms on {torch.cuda.get_device_name()} with {sms} SMs")
    if args.plant != "end":
        expected = x.cpu().view(-1, TILE).flip(1).flatten()
        torch.testing.assert_close(y.cpu(), expected)
    print("PASS")


if __name__ == "__main__":
    main()
