#!/usr/bin/env bash
# Runs the slow tests in shards, one after another, and remembers which of them passed for the sources as they are: stop it
# when you like, and the next call goes on. Exits with 1 if a shard failed; those that passed are not run again.
#
#   tests/run_slow.sh [SHARDS [PYTEST OPTION...]]        # 24 shards unless told
set -euo pipefail
cd "$(dirname "$0")/.."
shards=${1:-24}
shift || true

sources=$(git ls-files -z --cached --others --exclude-standard jaxshard tests pyproject.toml | sort -uz |
  { xargs -0 sha256sum 2>/dev/null || true; } | sha256sum | cut -c 1-16) # a file that was deleted has no sum
passed=.pytest_cache/slow/$sources-$shards
mkdir -p "$passed"
failed=()
for shard in $(seq "$shards"); do
  if [ -e "$passed/$shard" ]; then
    echo "shard $shard/$shards: passed before"
    continue
  fi
  start=$SECONDS
  status=0
  pytest -q -n 2 -m slow --shard "$shard/$shards" "$@" || status=$?
  [ "$status" -ne 2 ] || exit 2 # interrupted, or a file that can't be imported
  if [ "$status" -eq 0 ] || [ "$status" -eq 5 ]; then # 5: no test in this shard
    touch "$passed/$shard"
    echo "shard $shard/$shards: passed in $((SECONDS - start)) s"
  else
    failed+=("$shard")
    echo "shard $shard/$shards: FAILED after $((SECONDS - start)) s"
  fi
done
[ "${#failed[@]}" -eq 0 ] || { echo "failed shards: ${failed[*]} of $shards"; exit 1; }
echo "all $shards shards passed"
