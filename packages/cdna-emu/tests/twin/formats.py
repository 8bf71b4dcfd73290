"""Float formats by definition: decoding by powers of two, encoding by the nearest entry of the table of all values."""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Format:
    """Sign, exponent and mantissa of a narrow float.

    specials: "ieee" (highest exponent: infinity, NaN), "fn" (all ones is the only NaN), "fnuz" (negative zero is)
    or "none".
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    specials: str

    @property
    def bits(self) -> int:
        """Width of an element."""
        return 1 + self.exponent + self.mantissa

    @property
    def largest(self) -> int:
        """Code of the largest finite value."""
        ones = (1 << self.bits - 1) - 1
        if self.specials == "ieee":
            return ones - (1 << self.mantissa)
        return ones - (self.specials == "fn")

    @functools.cached_property
    def magnitudes(self) -> F64:
        """Values of the codes 0 to largest, and what would come after it."""
        return np.array([self._magnitude(code) for code in range(self.largest + 2)])

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = code >> self.mantissa, code & (1 << self.mantissa) - 1
        if exponent == 0:
            return float(np.ldexp(mantissa, 1 - self.bias - self.mantissa))
        return float(np.ldexp(mantissa + (1 << self.mantissa), exponent - self.bias - self.mantissa))

    def decode(self, codes: npt.ArrayLike) -> F64:
        """Values as float64."""
        raw = np.asarray(codes).astype(np.int64) & (1 << self.bits) - 1
        negative, code = raw >> self.bits - 1 == 1, raw & (1 << self.bits - 1) - 1
        value = np.full(raw.shape, np.nan)
        finite = code <= self.largest
        value[finite] = self.magnitudes[code[finite]]
        if self.specials == "ieee":
            value[code == self.largest + 1] = np.inf
        value = np.where(negative, -value, value)
        if self.specials == "fnuz":
            value[negative & (code == 0)] = np.nan
        return value

    def encode(
        self, values: npt.ArrayLike, *, rounding: str = "nearest", saturate: bool = False
    ) -> npt.NDArray[np.int64]:
        """Codes of float64 values: "nearest" (ties to even) or "zero". NaN gives some NaN of the format."""
        value = np.asarray(values, np.float64)
        magnitude = np.abs(value)
        table = self.magnitudes
        below = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 2)
        low, high = table[below], table[below + 1]
        up = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (below % 2 == 1))
        code = below + (up & (rounding == "nearest"))
        infinite = np.isinf(value)
        code = np.where(infinite | (magnitude >= table[-1]), self.largest + 1, code)
        overflow = code > self.largest
        if saturate:
            code = np.where(overflow, self.largest, code)
        elif rounding == "zero":
            code = np.where(overflow & ~infinite, self.largest, code)
        nan = np.isnan(value) | (overflow & (not saturate) & (self.specials in ("fn", "fnuz")))
        sign = np.signbit(value).astype(np.int64) << self.bits - 1
        if self.specials == "fnuz":
            return np.where(nan, 1 << self.bits - 1, np.where(code == 0, 0, code | sign))
        quiet = (1 << self.bits - 1) - 1 if self.specials == "fn" else self.largest + 1 + (1 << self.mantissa - 1)
        return np.where(nan, quiet, code) | sign


F16 = Format("f16", 5, 10, 15, "ieee")
BF16 = Format("bf16", 8, 7, 127, "ieee")
FP8 = Format("fp8", 4, 3, 7, "fn")
BF8 = Format("bf8", 5, 2, 15, "ieee")
FP8_FNUZ = Format("fp8_fnuz", 4, 3, 8, "fnuz")
BF8_FNUZ = Format("bf8_fnuz", 5, 2, 16, "fnuz")
FP6 = Format("fp6", 2, 3, 1, "none")
BF6 = Format("bf6", 3, 2, 3, "none")
FP4 = Format("fp4", 2, 1, 1, "none")


def fp8_of(arch: str) -> Format:
    """E4M3 of an architecture."""
    return {"gfx942": FP8_FNUZ, "gfx950": FP8}[arch]


def bf8_of(arch: str) -> Format:
    """E5M2 of an architecture."""
    return {"gfx942": BF8_FNUZ, "gfx950": BF8}[arch]


def encode_one(fmt: Format, value: float, rounding: str = "nearest") -> int:
    """Code of one value."""
    return int(fmt.encode([value], rounding=rounding)[0])
