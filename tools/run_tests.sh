#!/usr/bin/env bash
# run_tests.sh PYTHON [pytest's arguments]: first the tests that time the host, alone, then the others, one
# process a core. Fails where a test failed, or none was found.
set -uo pipefail
python=$1
shift
none=5 # pytest's exit status where no test was selected
"$python" -m pytest -q -m alone "$@"
alone=$?
"$python" -m pytest -n auto --maxprocesses 16 -m "not alone" "$@"
others=$?
((others == none)) && exit $alone
((alone == none || alone == 0)) && exit $others
exit $alone
