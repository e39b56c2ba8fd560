#!/usr/bin/env bash
# Run tests in the ways in which machines and shells differ; all of them must pass.
#
#   tests/ways.sh tests/serving/cli/test_main.py ...
#
# PYTHON is the environment's: .venv/bin/python.
cd "$(dirname "$0")/.." || exit
run=("${PYTHON:-.venv/bin/python}" -m pytest --numprocesses 0 --quiet -m "not slow" "$@")
status=0

# way NAME COMMAND...
way() {
  local name=$1 output
  shift
  if output=$("$@" 2>&1); then
    echo "$name: $(tail -1 <<< "$output")"
  else
    echo "$output"
    echo "$name: failed"
    status=1
  fi
}

beside_two_others() {
  local others
  (while :; do :; done) & others=$!
  (while :; do :; done) & others="$others $!"
  "$@"
  local ended=$?
  kill $others
  return $ended
}

way "as it is" "${run[@]}"
way "in another order" "${run[@]}"
way "signals ignored" bash -c 'trap "" HUP INT QUIT; exec "$@"' - "${run[@]}"
way "a bare shell" env --unset=HOME TERM=dumb COLUMNS=20 LC_ALL=C http_proxy=http://127.0.0.1:1 \
  "${run[@]}"
way "umask 077, 256 files" bash -c 'umask 077; ulimit -S -n 256; exec "$@"' - "${run[@]}"
way "one core" taskset --cpu-list 0 "${run[@]}"
way "a busy machine" beside_two_others "${run[@]}"
exit $status
