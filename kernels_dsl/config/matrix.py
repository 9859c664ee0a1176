"""The large matrix of a product of few rows, and how tiles of it share out the SMs."""

from __future__ import annotations

from lowering.records import frozen

SHORT_K, LONG_K = 4096, 8192
MIB = 1 << 20


@frozen
class Matrix:
    """The large matrix: tiles of 64 of its rows, K, bytes of an element; SMs of the device.

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
