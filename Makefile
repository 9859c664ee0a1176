# make demo: compile, run (with a GPU) and check the kernels.   make test: the tests.
# Tests that compile no kernel and run none in the emulator.
FAST := tests/test_structure.py tests/test_docs_limits.py tests/test_public_interface.py \
	tests/config/test_*_config.py tests/config/test_stream_k.py \
	tests/lowering/test_constants.py tests/lowering/test_re*.py tests/lowering/test_signature.py \
	tests/lowering/test_sources.py tests/ops/test_call_cache.py tests/ops/test_kernel_launch.py \
	tests/ops/test_op*.py tests/ops/test_plain_tensors.py tests/ops/*/test_*_errors.py \
	tests/ops/attention/test_attention_options.py tests/ops/bsr/test_bsr_refusals.py \
	tests/ops/gemm/test_gemm_layout.py
VENV := .venv
RUN := $(VENV)/bin/python
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast fuzz lint docs bench wheel doctor clean

help:
	@echo "make demo     compile the kernels; with a GPU: run, check and time them"
	@echo "make test     the tests, one process a core; with a GPU: the GPU tests too"
	@echo "make test-fast  structure, checks of arguments, configurations, lowering: a minute"
	@echo "make fuzz     two and a half minutes of random calls in the emulator, checked byte by byte"
	@echo "make lint     ruff and mypy"
	@echo "make docs     the documentation as a site, in build/site; warnings are errors"
	@echo "make bench    the benchmarks (needs a GPU)"
	@echo "make wheel    the wheel in dist/, with compiled kernels: some minutes, no GPU needed"
	@echo "make doctor   what this machine has and lacks"
	@echo "make clean    remove the virtual environment"

$(VENV)/.complete: pyproject.toml constraints-cpu.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)

demo: $(VENV)/.complete
	$(RUN) -m kernels_dsl demo

test: $(VENV)/.complete
	tools/run_tests.sh $(RUN) $(ARGS)

test-fast: $(VENV)/.complete
	$(RUN) -m pytest -q $(FAST) $(ARGS)

fuzz: $(VENV)/.complete
	tools/fuzz_emulated.sh $(RUN)

lint: $(VENV)/.complete
	@status=0; $(RUN) -m ruff check . || status=1; $(RUN) -m mypy || status=1; exit $$status

docs: $(VENV)/.complete
	$(RUN) -m sphinx -q -W --keep-going -b html -c docs/site . build/site

bench: $(VENV)/.complete
	$(RUN) -m kernels_dsl bench gemm
	$(RUN) -m kernels_dsl bench attention
	$(RUN) -m kernels_dsl bench bsr
	$(RUN) -m kernels_dsl bench fp8

wheel: $(VENV)/.complete
	$(RUN) tools/wheel.py dist $(ARGS)

doctor: $(VENV)/.complete
	$(RUN) -m kernels_dsl doctor

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
