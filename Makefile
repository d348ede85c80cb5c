# The two promises of the README are `make run` and `make test`; both need nothing but Python >= 3.11.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install locks bytecode node-images run check test test-all test-ray-oldest frameworks test-frameworks mutants bench lint manifests docs kubernetes-binaries images release publish workflows clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(STAMP)  ## make the virtual environment

# uv installs the CUDA build of torch from its cache in seconds; pip alone needs minutes. Compiled
# bytecode saves several seconds of every start where python may not write it later.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the rest into $(VENV): 7 GB, some minutes"
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --editable '.[dev]'
	touch $(STAMP)

run: $(STAMP)  ## train a transformer on the standard library's source: 2 nodes x 2 workers on this machine
	@$(BIN)/holdfast delete stdlib-bytes --yes > /dev/null 2>&1 || true  # its last run, if it has ended
	$(BIN)/holdfast run examples/stdlib-bytes.yaml

docs: $(STAMP)  ## the documentation site, with every link checked, in .venv/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: $(STAMP)  ## style, types, import rules and language
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.tidy.language

# actionlint is not a wheel: `go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12`.
workflows: $(STAMP)
	$(BIN)/zizmor --offline --quiet .github
	if command -v actionlint > /dev/null; then actionlint; else echo "actionlint: not installed, skipped"; fi

check: lint docs workflows  ## style, types, import rules, language, unit tests, simulation: ten minutes on two cores
	$(BIN)/python -m pytest -n 2 -q tests/unit tests/sim tests/tidy --deselect tests/tidy/test_tools.py

# Hundreds of processes of the tests import the package; where Python may not write bytecode, as in many
# containers, each of them compiled it again, for 0.7 s.
bytecode: $(STAMP)
	$(BIN)/python -m compileall -q holdfast orchestrator workers

# What the images of the Kubernetes tests share: built once, for a minute.
node-images: $(STAMP)
	-$(BIN)/python -m tests.e2e.kubernetes.rig.images  # the tests say what is missing

test: bytecode node-images  ## everything but the long tests, before a change lands
	$(BIN)/python -m pytest -n 3 --max-worker-restart 2 --durations 100 --durations-min 5

test-all: bytecode node-images  ## the whole suite, with the long tests (tests/long_tests.py)
	$(BIN)/python -m pytest -n 3 --max-worker-restart 2 --all

# `make mutants MUTANTS='--sample 200 --seed 7'` judges a sample, MUTANTS=--again only those that were
# not noticed the last time.
mutants: $(STAMP)  ## which small changes of orchestrator/core its tests do not notice
	$(BIN)/python -m tests.mutants $(MUTANTS)

test-ray-oldest: $(STAMP)  ## what leans on Ray, with the oldest that is promised, in .venv/ray-oldest
	test -x $(VENV)/ray-oldest/bin/python || $(PYTHON) -m venv $(VENV)/ray-oldest
	$(BIN)/uv pip install --quiet --python $(VENV)/ray-oldest/bin/python --editable '.[dev]' \
	  "ray[default]==$$($(BIN)/python -c 'from holdfast.orchestrator.backends.ray.cluster import OLDEST; \
	  print(*OLDEST, sep=".")').*"
	$(VENV)/ray-oldest/bin/python -m pytest tests/contract/test_backends.py \
	  $(addprefix tests/e2e/ray/test_,faults.py journal.py drain.py gang.py jobs_api.py metrics.py) -k ray

# With pip, Python 3.11 brings a setuptools that is too old for torch 2.15: the environments have none.
# The setup of DeepSpeed imports torch. One operator is compiled when it starts on CPUs, for minutes and into
# the user's cache: before the tests, not by four ranks of which one is killed.
frameworks: $(STAMP)  ## .venv/frameworks: other frameworks, for their tests and bench/frameworks
	test -x $(VENV)/frameworks/bin/python || $(PYTHON) -m venv --without-pip $(VENV)/frameworks
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV)/frameworks/bin/python \
	  --editable '.[ray,kubernetes]' setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV)/frameworks/bin/python \
	  --no-build-isolation-package deepspeed -r tests/frameworks/requirements.txt
	DS_ACCELERATOR=cpu $(VENV)/frameworks/bin/python -c \
	  'from deepspeed.comm.torch import build_shm_op; build_shm_op()'

test-frameworks: frameworks  ## scripts of other frameworks under Holdfast, in environments of their own
	$(VENV)/frameworks/bin/python -m pytest -p no:xdist --all -k frameworks tests/frameworks \
	  tests/e2e/ray/test_jobs_api.py tests/e2e/kubernetes/nodes/test_examples.py
	test -x $(VENV)/torchtitan/bin/python || $(PYTHON) -m venv --without-pip $(VENV)/torchtitan
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV)/torchtitan/bin/python --editable '.[train]' \
	  setuptools -r tests/frameworks/requirements-torchtitan.txt
	$(VENV)/torchtitan/bin/python -m pytest -p no:xdist --all tests/frameworks -k titan
	test -x $(VENV)/swift/bin/python || $(PYTHON) -m venv --without-pip $(VENV)/swift
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV)/swift/bin/python --editable '.[train]' \
	  setuptools -r tests/frameworks/requirements-swift.txt
	$(VENV)/swift/bin/python -m pytest -p no:xdist --all tests/frameworks -k swift

bench: $(STAMP)  ## side-by-side measurements; writes bench/results/
	$(BIN)/python -m bench.recovery
	$(BIN)/python -m bench.staging
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[bench]'
	$(BIN)/python -m bench.ray
	$(BIN)/python -m bench.ray_step --nodes 1
	$(BIN)/python -m bench.ray_step --nodes 2

# Real Kubernetes programs for tests/e2e/kubernetes, built once into ~/.cache/holdfast/kubernetes.
kubernetes-binaries:  ## build what the Kubernetes tests run: needs Go 1.26, five minutes, once
	$(PYTHON) tests/e2e/kubernetes/binaries/build.py
	$(PYTHON) tests/e2e/kubernetes/published/get.py
	$(PYTHON) tests/e2e/kubernetes/published/promtool.py

# Everything that an image installs, with hashes; `make locks LOCKS=--upgrade` takes newer versions.
LOCK = $(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command 'make locks' --extra s3 pyproject.toml $(LOCKS)
locks: $(STAMP)  ## choose the versions that both images install
	$(LOCK) --extra kubernetes -o images/operator/requirements.txt
	echo 'torch>=2.11' | $(LOCK) --extra train --extra torchao - -o images/worker/requirements.txt

manifests: $(STAMP)  ## write the chart's CRD and manifests/ anew; needs helm (make kubernetes-binaries)
	$(BIN)/python -m helm.render
	$(BIN)/python -m helm.ray_dashboard

images: $(STAMP)  ## both images, without a base image, in dist/images; `make images IMAGES=operator` builds one
	$(BIN)/python -m images.build $(IMAGES)

release: $(STAMP)  ## wheel, sdist, chart, images of REGISTRY and their bills of materials, in dist
	$(BIN)/python -m tools.release --registry "$(REGISTRY)" $(RELEASE)

publish: $(STAMP)  ## push what `make release` built: images and chart, to REGISTRY
	$(BIN)/python -m tools.release --registry "$(REGISTRY)" --push

clean:  ## remove what the targets above made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
