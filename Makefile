# Everything is done by tools/tasks.py; this file only finds some Python that
# starts it.

# Name a Python to use instead of the one that is found.
PYTHON ?=
# Which releases `make test-releases` runs: all, others (all but the default
# one), or a list.
RELEASES ?= all
# Further arguments for mgpu-ext check or pytest.
ARGS ?=

export PYTHON RELEASES

# The last candidates are for pyenv, whose `python3` fails where the version in
# .python-version is not installed.
define task
for python in "$$PYTHON" python3.12 python3 python3.11 python \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[1-9]*/bin/python3; do \
  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' \
      </dev/null >/dev/null 2>&1; then \
    exec "$$python" -B tools/tasks.py $(1); \
  fi; \
done; \
echo 'make: error: no Python found. Install Python 3.12, or name one with' \
    'PYTHON=...' >&2; \
exit 2
endef

.PHONY: help check test test-releases clean

help:
	@echo 'make check          check the shipped kernels (ARGS: see mgpu-ext check --help)'
	@echo 'make test           run the tests on the default JAX (ARGS go to pytest)'
	@echo 'make test-releases  run them on every supported JAX (RELEASES="0.11.2 ...")'
	@echo 'make clean          remove the environments and what tests leave behind'
	@echo
	@echo 'The first run makes .venv with Python 3.12 (PYTHON=... names another one);'
	@echo 'later runs use it again. Nothing outside this folder is changed.'

check:
	@$(call task,check $(ARGS))

test:
	@$(call task,test $(ARGS))

test-releases:
	@$(call task,test-releases $(ARGS))

clean:
	@$(call task,clean)
