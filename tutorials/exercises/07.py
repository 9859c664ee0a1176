"""Exercise 7: a better tile for step 7.

Step 7's default, 128 x 256 x 64, does 85 multiply-adds for each number that it loads. Find a `step7.Tile`
that does at least 100, keeps three stages or more, and compiles without spilling registers.

Two consumer warpgroups split bM, so bM is a multiple of 128; N of a WGMMA is a multiple of 8, at most 256; a
CTA may have 232448 bytes of shared memory and a consumer thread 240 registers.
"""

import checker


def tile():
    """A `Tile` of step 7: `common.load("07_gemm_warp_specialized").Tile(m, n, k, stages)`."""
    raise NotImplementedError


def check(answers) -> None:
    """Arithmetic first, then the compiler's word."""
    import common
    import torch

    from lowering import LoweringError

    step7 = common.load("07_gemm_warp_specialized")
    chosen = answers.tile()
    checker.expect(
        chosen.m % 128 == 0, f"bM is {chosen.m}: two warpgroups with WGMMAs of 64 rows need a multiple of 128"
    )
    checker.expect(chosen.n % 8 == 0 and chosen.n <= 256, f"bN is {chosen.n}: no WGMMA has that N")
    checker.expect(
        chosen.k % 64 == 0, f"bK is {chosen.k}: keep to multiples of 64, one swizzled row of 128 bytes"
    )
    checker.expect(
        chosen.stages >= 3, f"{chosen.stages} stages: with fewer than three the loads do not run ahead"
    )
    reuse = chosen.m * chosen.n / (chosen.m + chosen.n)
    checker.expect(
        reuse >= 100, f"{chosen.m} x {chosen.n} does {reuse:.0f} multiply-adds a number, 100 are wanted"
    )
    accumulators = chosen.m // 2 * chosen.n // 128
    checker.expect(
        accumulators < 240,
        f"{chosen.m} x {chosen.n} is {accumulators} accumulators a thread; it may have 240 registers",
    )
    spec = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
    try:
        kernel = step7.gemm.compile(spec, spec, spec, arch=common.ARCH, tile=chosen)
    except LoweringError as error:
        raise checker.Wrong(f"it does not compile: {error}") from error
    used = kernel.resources()[0]
    spilled = used.spill_loads + used.spill_stores
    checker.expect(spilled == 0, f"the compiler spills: {spilled} accesses to memory for want of registers")


if __name__ == "__main__":
    checker.main(__file__)
