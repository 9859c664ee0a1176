"""A GEMM's demands and a device's resources, as plain data for budgets, tables and the tuner."""

from __future__ import annotations

from kernels_dsl.config.promotion import Promotion
from lowering.records import frozen

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
SHORT_K, LONG_K = 4096, 8192
MIB = 1 << 20


@frozen
class GemmProblem:
    """D (M, N, L) = epilogue(A (M, K, L) @ B (N, K, L)) in the kernel's orientation.

    `ab_type` and `d_type` are "bf16", "fp16", "fp32" (fp32 operands are multiplied as tf32) or "fp8", which
    stands for e4m3 and e5m2, mixed or not. `a_k_major` and `b_k_major` say that K is
    the operand's contiguous mode. `*_align` are the bytes (1 to 16) that divide every row's address.
    `operand_bytes` is what the epilogue reads for each element of D, such as 2 for a bf16 residual;
    broadcast operands count 0. `promotion`: how partial sums of fp8 products are added, None for the tensor
    cores' own sum over all of K. `grouped`: M is the mean of L groups of rows, of any sizes, each with a B.
    `gated`: D has half of the N columns, each of two neighbours.
    """

    m: int
    n: int
    k: int
    l: int = 1
    ab_type: str = "bf16"
    d_type: str = "bf16"
    a_k_major: bool = True
    b_k_major: bool = False
    a_align: int = 16
    b_align: int = 16
    d_align: int = 16
    operand_bytes: int = 0
    promotion: Promotion | None = None
    grouped: bool = False
    gated: bool = False

    @property
    def ab_bytes(self) -> int:
        """Bytes of an element of A or B."""
        return ELEMENT_BYTES[self.ab_type]

    @property
    def d_bytes(self) -> int:
        """Bytes of an element of D."""
        return ELEMENT_BYTES[self.d_type]

    @property
    def flops(self) -> int:
        """Two operations a multiply-add."""
        return 2 * self.m * self.n * self.k * self.l

    @property
    def traffic(self) -> int:
        """Bytes that must move at least: A and B read once, D written once, tensor operands read once."""
        inputs = (self.m + self.n) * self.k * self.ab_bytes
        return self.l * (inputs + self.m * self.n * (self.d_bytes + self.operand_bytes))


@frozen
class Device:
    """The limits of a GPU that decide about configurations.

    `capability` is (major, minor). `smem_bytes` is the most dynamic shared memory that a CTA can ask for.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_bytes: int

    @property
    def has_wgmma(self) -> bool:
        """TMA and WGMMA as the SM90 family uses them; later architectures dropped WGMMA."""
        return self.capability == (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Matrix instructions take e4m3 and e5m2."""
        return self.capability >= (8, 9)

    @property
    def widens_fp8(self) -> bool:
        """mma.sync of fp8 is two instructions of fp16, after every fragment was widened in registers."""
        return self.capability[0] in (9, 10)

    def families(self) -> tuple[str, ...]:
        """Kernel families that run on this device, the fastest first."""
        if self.has_wgmma:
            return ("sm90", "sm80")
        return ("sm80",) if self.capability >= (8, 0) else ()


H200 = Device("H200", (9, 0), 132, 232448)
L40S = Device("L40S", (8, 9), 142, 101376)
A100 = Device("A100", (8, 0), 108, 166912)
DEVICES_BY_ARCH = {
    "sm_80": A100,
    "sm_86": Device("A40", (8, 6), 84, 101376),
    "sm_89": L40S,
    "sm_90a": H200,
    "sm_100a": Device("B200", (10, 0), 148, 232448),
    "sm_120a": Device("RTX 5090", (12, 0), 170, 101376),
}
"""A typical device of each architecture, for compiling where none is at hand."""


@frozen
class Matrix:
    """The large matrix of a product of few rows: tiles of 64 of its rows, K, bytes of an element; SMs.

    `fast`: fp8 whose sums are not promoted. `scaled`: operands have scales of 128 of K. `unit`: columns of a
    tile are multiples of it. `k_contiguous`: lines of both operands are along K.
    """

    tiles: int
    k: int
    element_bytes: int
    sms: int
    fast: bool
    scaled: bool
    unit: int
    k_contiguous: bool

    @property
    def fp8(self) -> bool:
        return self.element_bytes == 1

    @property
    def bytes(self) -> int:
        return self.tiles * 64 * self.k * self.element_bytes

    def ctas(self, height: int, ctas: int = 1) -> int:
        """CTAs, `ctas` for each tile of `height` times 64 rows."""
        return -(-self.tiles // height) * ctas

    def waves(self, height: int, ctas: int = 1) -> int:
        """Waves of them."""
        return -(-self.ctas(height, ctas) // self.sms)

    @property
    def third(self) -> bool:
        """Tiles leave two of three SMs without work."""
        return self.waves(1, 3) == 1

    @property
    def two_thirds(self) -> bool:
        """Tiles leave between a third and a quarter of the SMs without work."""
        return self.sms * 2 <= self.tiles * 3 and self.tiles * 4 <= self.sms * 3

    @property
    def paired(self) -> bool:
        """Two CTAs a tile run at once."""
        return self.waves(1, 2) == 1

    @property
    def little_over(self) -> bool:
        """Tiles are more than the SMs by a third at most."""
        return self.sms < self.tiles <= self.sms * 4 // 3

    @property
    def little_left(self) -> bool:
        """The last wave of tiles is for an eighth of the SMs at most."""
        return self.waves(1) > 1 and 0 < self.tiles % self.sms <= self.sms // 8

    @property
    def tall(self) -> int:
        """CTAs of a cluster that share K of 192 rows such that all run at once, on four of five SMs or more.

        1 where none do. Clusters of more than two do not fill the device; sums that are fast need registers.
        """
        if self.k < LONG_K or self.paired or self.fast:
            return 1
        for count, most in ((4, self.sms * 10 // 11), (3, self.sms * 10 // 11), (2, self.sms)):
            if self.sms * 4 // 5 <= self.ctas(3, count) <= most:
                return count
        return 1
