# One command each; every target makes its own .venv and needs only Python 3.11 to 3.14 with venv.
#   make demo    watch plain on-policy distillation collapse and Stable-OPD hold (3 to 10 minutes on 2 cores, after the install)
#   make test    the tests, 6 to 26 minutes on 2 cores, idle or busy
#   make test-cluster   test-slurm and test-sglang, one after the other; with --jobs 2 at the same time, 13 to 20 minutes
#   make test-slurm     on a real Slurm, with NeMo-Run: apt-get install slurm-wlm munge iproute2
#   make test-sglang    with real SGLang servers, the suite of a GPU on a CPU, and old releases of transformers
#   make rehearse   every shipped config on 1 to 128 nodes, set up, stepped and published without a GPU
#   make resolve  which pins contradict, on Python 3.11 to 3.14, x86-64 and aarch64, for every extra (needs a network)
#   make checks  format, lint, types, shell scripts, spelling: the hooks of .pre-commit-config.yaml over all files
#   make sglang  a venv of SGLang's own, .venv-sglang, for rollout servers on a CPU (about 1.6 GB)
#   make gpu     the suite of a Hopper GPU, twelve minutes without a network (docs/evidence/gpu.md); GPU_ARGS="--parts kernels loss"
#   make gpu-bundle   what that suite needs on a machine without a network, in build/gpu-bundle (at most 60 MB)
#   make agents  a venv of agents' packages, .venv-agents, for the tests of docs/agents.md (about 1.3 GB)
#   make old-transformers   the oldest release of transformers of each family, in .venv-old, for a test (about 0.7 GB)
#   make launch  a venv of NeMo-Run's own, .venv-launch, for the experiments in launch/ (about 0.5 GB)
#
# PYTHON=python3.12 picks an interpreter. Without a GPU, a CPU build of torch saves gigabytes:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: gpu gpu-bundle sglang agents launch old-transformers resolve demo test test-cluster test-slurm test-sglang rehearse checks install format clean
install: $(INSTALLED)

# pip takes the versions of the dependency group `dev` as constraints.
CONSTRAINTS := .venv/constraints.txt
$(INSTALLED): pyproject.toml
	@test -z "$(wildcard .venv/lib/python3*/site-packages/transformer_engine*)" || \
		{ echo "refused: .venv is a cluster's (it has Transformer Engine), and this would install another torch. Use another checkout"; exit 1; }
	@$(PYTHON) tools/check_python.py make $(MAKECMDGOALS)
	$(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]))' > $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint $(CONSTRAINTS) torch || \
		{ echo "pip found no torch that fits (above): needed is the $$(grep ^torch= $(CONSTRAINTS)) of pyproject.toml; \
	try without this machine's own constraints and indexes: env -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null make $(MAKECMDGOALS)"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/stable-opd demo

# Two tests at a time, each with one thread: most of them wait, or start ranks of their own. BEHIND='nice -n 5' lowers
# their priority, for a gate that runs tests with deadlines beside them.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BEHIND) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

ON_SLURM = tests/integration/test_slurm_*.py tests/integration/test_nemorun_*.py
test-cluster: test-slurm test-sglang
test-slurm: $(INSTALLED) sglang launch
	$(BIN)/python -m pytest -m cluster $(ON_SLURM)
test-sglang: $(INSTALLED) sglang old-transformers
	$(BIN)/python -m pytest -m cluster tests/integration tests/benchmarks $(addprefix --ignore=,$(wildcard $(ON_SLURM)))

# With server nodes, and with pipeline stages that one node does not hold.
ON_MANY_NODES = $(addprefix configs/stable_opd_,32b.yaml 30b_a3b.yaml 8b_235b.yaml)
rehearse: $(INSTALLED)
	$(BIN)/stable-opd rehearse $(wildcard configs/*.yaml)
	$(BIN)/stable-opd rehearse $(ON_MANY_NODES) --nodes 4 --nodes 16 --nodes 128 --server-nodes 2 parallel.pipeline=2

checks: $(INSTALLED)
	$(BEHIND) $(BIN)/pre-commit run --all-files --show-diff-on-failure --hook-stage manual

resolve: $(INSTALLED)
	$(BEHIND) $(BIN)/python -m tools.resolve_installs

sglang: .venv-sglang/.installed
.venv-sglang/.installed: requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt $(shell find tools/sglang_cpu/sglang_cpu -name '*.py')
	@$(PYTHON) tools/check_python.py --until 3.12 make sglang  # SGLang's wheels and those of its pins
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --requirement requirements/sglang-cpu.txt
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --requirement requirements/sglang-cpu-nodeps.txt
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps ./tools/sglang_cpu
	@touch $@

agents: .venv-agents/.installed
.venv-agents/.installed: requirements/agent-clients.txt
	@$(PYTHON) tools/check_python.py --until 3.13 make agents
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --requirement $<
	@touch $@

# Each release in a folder of its own, to be put before this environment's packages.
old-transformers: .venv-old/.installed
.venv-old/.installed: requirements/old-transformers.txt $(INSTALLED)
	rm -rf .venv-old && mkdir .venv-old
	while read -r transformers others; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-compile --no-deps \
			--target ".venv-old/$${transformers##*==}" "$$transformers" $$others || exit 1; \
	done < requirements/old-transformers.txt
	@touch $@

launch: .venv-launch/.installed
.venv-launch/.installed: pyproject.toml
	@$(PYTHON) tools/check_python.py --until 3.13 make launch  # NeMo-Run's leptonai
	$(PYTHON) -m venv .venv-launch
	$(PYTHON) -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["launch"]))' > .venv-launch/requirements.txt
	.venv-launch/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --requirement .venv-launch/requirements.txt
	@touch $@

# Not from $(INSTALLED), which needs a network: the environment's Python, or one that has torch for CUDA.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_ARGS ?=
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS)

# ARCHIVES: tar files of compiled site-packages, such as Transformer Engine.
ARCHIVES ?=
gpu-bundle: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu.bundle --archives $(ARCHIVES)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-sglang .venv-agents .venv-launch .venv-old .pytest_cache .ruff_cache
