# Two commands do everything: `make demo` and `make test`. Both set up what they need first.
export ORT_DISABLE_TELEMETRY = 1

.PHONY: demo test soak bench lock setup setup-dev lint clean

setup:
	@python3 deploy/setup.py run

setup-dev:
	@python3 deploy/setup.py dev

demo: setup
	@.venv/bin/glottis demo

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: setup-dev lint
	.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

soak: setup-dev
	.venv/bin/pytest -m soak --timeout=1800

bench: SHELL := /bin/bash
bench: setup
	mkdir -p bench/results
	set -eo pipefail; for name in hsm liveness speech tokens; do .venv/bin/python -m bench.$$name | tee bench/results/$$name.jsonl; done

lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url requirements/run.in -o requirements/run.txt
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url requirements/dev.in -o requirements/dev.txt

clean:
	rm -rf .venv demo-out *.egg-info
