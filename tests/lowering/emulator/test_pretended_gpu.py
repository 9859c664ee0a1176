"""PyTorch's "cuda" is the CPU within `emulator.run(torch_cuda=True)`, and itself again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from lowering import emulator  # noqa: E402


@pytest.fixture
def gpu() -> Iterator[emulator.Session]:
    with emulator.run("sm_90a", sms=4, torch_cuda=True) as session:
        yield session


def test_factories_and_copies_choose_the_device(gpu: emulator.Session) -> None:
    host = torch.randn(4, 4)
    assert not host.is_cuda
    assert host.device.type == "cpu"
    for there in (
        torch.zeros(3, device="cuda"), torch.empty_like(host, device="cuda:0"), host.cuda(), host.to("cuda"),
        host.to(device=torch.device("cuda", 0)), torch.tensor([1.0], device="cuda"), host.to(0),
        host.new_zeros(2, device="cuda"), torch.as_tensor(host, device="cuda"),
    ):  # fmt: skip
        assert there.is_cuda
        assert there.device == torch.device("cuda", 0)
        assert there.get_device() == 0


def test_a_copy_is_a_copy_and_the_same_device_is_the_same_tensor(gpu: emulator.Session) -> None:
    host = torch.randn(4)
    there = host.cuda()
    there.zero_()
    assert host.abs().sum() > 0
    assert there.cuda().data_ptr() == there.to("cuda").data_ptr() == there.data_ptr()
    back = there.cpu()
    assert not back.is_cuda
    assert back.data_ptr() != there.data_ptr()
    assert torch.equal(there.to(torch.float16).cpu(), torch.zeros(4).half())


def test_results_are_where_their_operands_are(gpu: emulator.Session) -> None:
    there = torch.randn(4, 4, device="cuda", requires_grad=True)
    assert (there @ there).sum(0)[None].is_cuda
    assert there.view(16)[:2].is_cuda
    assert torch.empty_like(there).is_cuda
    (there * there).sum().backward()
    assert there.grad is not None
    assert there.grad.is_cuda
    module = torch.nn.Linear(4, 4).to("cuda")
    assert module.weight.is_cuda
    assert module(there).is_cuda
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert torch.randn(2, device="cuda", generator=generator).is_cuda


def test_operators_registered_for_cuda_run(gpu: emulator.Session) -> None:
    @torch.library.custom_op("front_door::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        made = torch.empty_like(x)
        assert made.is_cuda
        return made.copy_(2 * x)

    x = torch.randn(3, device="cuda")
    assert torch.equal(twice(x), 2 * x)
    assert twice(x).is_cuda


def test_torch_cuda_answers_as_one_gpu(gpu: emulator.Session) -> None:
    cuda = torch.cuda
    assert cuda.is_available()
    assert cuda.device_count() == 1
    assert cuda.get_device_capability() == (9, 0)
    assert cuda.get_device_properties(0).multi_processor_count == 4
    with cuda.stream(cuda.Stream()):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        end.record()
        cuda.synchronize()
    assert start.elapsed_time(end) > 0
    torch.cuda.manual_seed(0)
    with pytest.raises(emulator.EmulatorError, match="graphs"):
        cuda.CUDAGraph()


def test_the_driver_answers_as_one_gpu(gpu: emulator.Session) -> None:
    import cutlass
    from cuda.bindings import driver, runtime

    cutlass.cuda.initialize_cuda_context()
    assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    assert driver.cuDeviceGetCount()[1] == 1
    assert runtime.cudaGetDeviceCount()[1] == 1
    assert cutlass.utils.HardwareInfo().get_device_multiprocessor_count() == 4
    assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 2
    _, pointer = driver.cuMemAlloc(64)
    assert driver.cuMemsetD32(pointer, 7, 16)[0] == driver.CUresult.CUDA_SUCCESS
    back = torch.zeros(16, dtype=torch.int32)
    driver.cuMemcpyDtoH(back.data_ptr(), pointer, 64)
    assert back.tolist() == [7] * 16
    driver.cuMemFree(pointer)


def test_our_own_kernels_take_cpu_tensors(gpu: emulator.Session) -> None:
    import kernels_dsl

    there = torch.zeros(16, 16, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="must be on the CPU"):
        kernels_dsl.gemm(there, there)


def test_kernels_in_object_files_are_refused(gpu: emulator.Session) -> None:
    from cutlass import cute

    with pytest.raises(emulator.EmulatorError, match=r"kept\.o holds"):
        cute.runtime.load_module("kept.o", enable_tvm_ffi=True)


def test_one_gpu_is_pretended_at_a_time(gpu: emulator.Session) -> None:
    other = emulator.run("sm_80", torch_cuda=True)
    with pytest.raises(emulator.EmulatorError, match="one GPU at a time"):
        other.__enter__()


def test_everything_is_put_back() -> None:
    from cuda.bindings import driver

    before = torch.empty, torch.Tensor.to, torch.cuda.Event, torch.Tensor.device, driver.cuInit
    with emulator.run(torch_cuda=True), emulator.run(torch_cuda=True):
        assert torch.empty is not before[0]
    after = torch.empty, torch.Tensor.to, torch.cuda.Event, torch.Tensor.device, driver.cuInit
    assert all(a is b for a, b in zip(before, after))
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)
