"""Exercise 9: a fused function of your own.

Write the epilogue min(max(acc + bias, 0), limit) for step 9's kernel, for any `limit`: `capped_relu(limit)`
returns the function. It is traced, so it gets tensors of float32 values, and `if` does not work on them:
`cutlass.cute.where(condition, x, y)` chooses value by value, `cute.zeros_like(x)` and
`cute.full_like(x, value)` make constants. See `kernels_dsl/blocks/epilogue/functions.py`.
"""

import checker


def capped_relu(limit: float):
    """An epilogue function (acc, bias) -> value."""
    raise NotImplementedError


def check(answers) -> None:
    """Runs step 9's GEMM with it: on a GPU, else in the emulator, else it is only compiled."""
    import common
    import torch

    from lowering import LoweringError
    from reference.tolerance import ToleranceError

    step9 = common.load("09_gemm_epilogue")
    lab = common.Lab()
    plan = step9.step8.Plan(step9.step7.Tile(128, 64, 64, 2), 1)
    a, b = lab.integers(128, 64, dtype=torch.bfloat16), lab.integers(64, 64, dtype=torch.bfloat16)
    bias = lab.integers(64, dtype=torch.bfloat16)
    for limit in (6.0, 2.0):
        d = lab.poison(128, 64, dtype=torch.bfloat16)
        epilogue = answers.capped_relu(limit)
        checker.expect(callable(epilogue), f"capped_relu({limit}) is {epilogue!r}; it should be a function")
        try:
            lab.launch(step9.gemm, a, b, d, bias, 1, plan=plan, epilogue=epilogue)
        except LoweringError as error:
            raise checker.Wrong(f"it does not compile: {error}") from error
        expected = (a.double() @ b.double().T + bias.double()).clamp(0, limit)
        try:
            lab.equal(f"limit {limit}", d, expected)
        except ToleranceError as error:
            raise checker.Wrong(str(error)) from error


if __name__ == "__main__":
    checker.main(__file__)
