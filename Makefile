# Thin over dev.py, which sets up what each command needs. Arguments: make test ARGS="-k ring"
PYTHON ?= python3

.PHONY: train test check test-gpu bench docs setup
train test check test-gpu bench docs setup:
	$(PYTHON) dev.py $@ $(ARGS)
