.DEFAULT_GOAL := help

.PHONY: help run test lint types format proto schemas bench soak

help: ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

run: ## Install, then serve the embedded model on this machine
	@scripts/run

test: ## Install, then run every check and test
	@scripts/test

lint: ## Lint, and check the layers
	@.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/lint-imports

types: ## Check the types
	@.venv/bin/mypy

format: ## Format the code and fix what can be fixed
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

proto: ## Generate the protocol code again
	@scripts/proto

schemas: ## Write the golden files of the settings again, for review
	@.venv/bin/python -m tests.settings_schemas

bench: ## Measure this machine: a table, and bench-results.json
	@scripts/install edge,worker,replay,dev && .venv/bin/kinroute bench --json bench-results.json

soak: ## Throw dice at the cache manager and its ranks for STEPS steps (1000000) by SEED (1)
	@STEPS="$(or $(STEPS),1000000)" SEED="$(or $(SEED),1)" GAME="$(GAME)" .venv/bin/python -m tests.soak
