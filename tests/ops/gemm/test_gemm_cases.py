"""The generated cases on modelled kernels: checks the op and the cases themselves without a GPU."""

import pytest

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.config.problem import ELEMENT_BYTES
from tests.ops.gemm import gemm_cases


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_generated_cases_on_modelled_kernels(model_kernels, family: str) -> None:
    for number in range(60):
        case = gemm_cases.generate(number, family)
        try:
            gemm_cases.run(case, "cpu")
        except Exception as error:
            error.args = (f"{case}\n{error}",)
            raise


def test_the_cases_cover_what_they_should() -> None:
    cases = [gemm_cases.generate(number, "sm90") for number in range(150)]
    assert {case.dtype for case in cases} == {case.out_dtype for case in cases} == set(gemm_cases.DTYPES)
    assert set(ELEMENT_BYTES) == {"bf16", "fp16", "fp32", "fp8"} and len(gemm_cases.DTYPES) == 3
    for field in ("m", "n", "k"):
        assert any(getattr(case, field) == 0 for case in cases)
        assert any(getattr(case, field) == 1 for case in cases)
    assert {case.activation for case in cases} == {None, *ACTIVATIONS}
    assert {case.out.contiguous for case in cases} == {-1, -2}
    assert len({str(case) for case in cases}) == len(cases)
    assert gemm_cases.generate(7, "sm90") == gemm_cases.generate(7, "sm90")
