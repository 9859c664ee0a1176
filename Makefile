# make demo: compile, run (with a GPU) and check the kernels.   make test: the tests.
VENV := .venv
RUN := $(VENV)/bin/python
.DEFAULT_GOAL := help
.PHONY: help demo test fuzz lint bench doctor clean

help:
	@echo "make demo     compile the kernels; with a GPU: run, check and time them"
	@echo "make test     the tests, one process a core; with a GPU: the GPU tests too"
	@echo "make fuzz     two minutes of random calls in the emulator, checked byte by byte"
	@echo "make lint     ruff and mypy"
	@echo "make bench    the benchmarks (needs a GPU)"
	@echo "make doctor   what this machine has and lacks"
	@echo "make clean    remove the virtual environment"

$(VENV)/.complete: pyproject.toml constraints-cpu.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)

demo: $(VENV)/.complete
	$(RUN) -m kernels_dsl demo

test: $(VENV)/.complete
	tools/run_tests.sh $(RUN) $(ARGS)

fuzz: $(VENV)/.complete
	tools/fuzz_emulated.sh $(RUN)

lint: $(VENV)/.complete
	@status=0; $(RUN) -m ruff check . || status=1; $(RUN) -m mypy || status=1; exit $$status

bench: $(VENV)/.complete
	$(RUN) -m kernels_dsl bench gemm
	$(RUN) -m kernels_dsl bench attention
	$(RUN) -m kernels_dsl bench bsr
	$(RUN) -m kernels_dsl bench fp8

doctor: $(VENV)/.complete
	$(RUN) -m kernels_dsl doctor

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
