# Only the commands that a person types. The work is in CMakePresets.json and tools/.
.PHONY: help setup demo test build cuda-build core bench lint format tidy fuzz asan tsan soak install wheel deb docs clean
.DEFAULT_GOAL := help

# A libtorch file can take over 2 GB to compile; the number of jobs follows cores and memory.
JOBS ?= $(shell n=$$(nproc); m=$$(awk '/MemAvailable/ {print int($$2 / 2500000)}' /proc/meminfo); \
          [ "$$m" -lt "$$n" ] && n=$$m; [ "$$n" -lt 1 ] && n=1; echo $$n)
PREFIX ?= /usr/local
# What is installed.
BUILD ?= build/release
# The libtorch of cuda-build: a preset names it.
TESSERA_CUDA_TORCH ?= 2.11.0

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: ## install the Debian packages and the venv that are missing
	@tools/setup

demo: setup ## train, kill, resume, export on real text; PyTorch checks the results
	@tools/build release $(JOBS) train_gpt dcp_guide tessera_command
	@tools/demo

test: setup ## build and run every test
	@tools/build-and-test release $(JOBS)

build: setup ## build everything
	@tools/build release $(JOBS)

cuda-build: setup ## build everything for CUDA; needs no GPU and no nvcc, only wheels
	@.venv/bin/python tools/cuda-setup $(TESSERA_CUDA_TORCH)
	@tools/build cuda-$(TESSERA_CUDA_TORCH) $(JOBS)

core: ## build and test the part that needs no libtorch
	@tools/setup --core-only
	@tools/build-and-test core $(JOBS)

bench: build ## run the benchmarks
	@bench/run

lint: ## check format, layers, budgets and lists; clang-tidy on changed files
	@tools/setup --core-only
	@tools/lint

format: ## fix formatting in place by clang-format
	@tools/lint --format

tidy: ## lint, with clang-tidy on all files, libtorch code too
	@tools/setup
	@tools/lint --all

fuzz: ## fuzz every parser, 200,000 inputs each
	@tools/setup --fuzz
	@tools/build fuzz $(JOBS)
	@tools/fuzz

asan: setup ## build and test under AddressSanitizer and UBSan
	@tools/build-and-test asan $(JOBS)

tsan: setup ## build and test under ThreadSanitizer
	@tools/build-and-test tsan $(JOBS)

soak: build ## run the long counts: kills, delays, damages, round trips, trainings
	@tests/soak

install: build ## install libraries, headers and the stripped command under PREFIX
	@cmake --install $(BUILD) --prefix $(PREFIX) --strip

deb: setup ## build Debian packages into dist/, and check them with lintian
	@tools/deb $(JOBS)

docs: ## build the pages of the C++ headers and of the Python package into build/docs
	@tools/docs

wheel: setup ## build the wheel and the sdist of the Python package into dist/, and test it
	@tools/wheel
	@tools/wheel-test

clean: ## remove what was built; the venv stays
	rm -rf build demo dist
