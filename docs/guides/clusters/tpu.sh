#!/usr/bin/env bash
# jaxshard train on a Cloud TPU pod: makes the TPU, installs, trains, and starts again after a failure or a preemption.
# Run it where gcloud is logged in, and in tmux or screen: it stays until the training is done.
#
# JAX finds the other hosts of the pod by itself. When a process dies the others notice within 30 seconds and end too.
set -euo pipefail

NAME=${NAME:-jaxshard}
ZONE=${ZONE:-us-west4-a}
TYPE=${TYPE:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
JAXSHARD=${JAXSHARD:-git+https://github.com/jaxshard/jaxshard}  # or the URL of a wheel
SHARE=${SHARE:-10.0.0.2:/share}   # NFS that all hosts reach, such as Filestore: they write one checkpoint together
STARTS=${STARTS:-20}

tpu() { gcloud compute tpus tpu-vm "$1" "$NAME" --zone="$ZONE" "${@:2}"; }
everywhere() { tpu ssh --worker=all --command="$1"; }

make() {
    tpu create --accelerator-type="$TYPE" --version="$VERSION" --spot
    everywhere "sudo apt-get -q install -y nfs-common && sudo mkdir -p /share && sudo mount $SHARE /share &&
        python3 -m venv ~/env && ~/env/bin/pip install -q 'jaxshard[tpu] @ $JAXSHARD'"
}

# The same command on every host. After a common step all save and end on SIGTERM, which a preemption may send to one.
TRAIN="JAX_COMPILATION_CACHE_DIR=/share/first/compiled ~/env/bin/jaxshard train --model gpt2 --data /share/text \
    --checkpoint /share/first/checkpoints --resume --checkpoint-every 500 --keep 3 --log /share/first/log.jsonl"

for ((start = 1; start <= STARTS; start++)); do
    case $(tpu describe --format='value(state)' 2>/dev/null || echo NONE) in
        READY) ;;
        NONE) make ;;
        *) tpu delete --quiet && make ;;   # preempted, or broken
    esac
    if everywhere "$TRAIN"; then
        # Done, unless a preemption ended it: then the TPU is gone, and the next start goes on.
        [[ $(tpu describe --format='value(state)' 2>/dev/null || echo NONE) == READY ]] && exit 0
    fi
    echo "start $start of $STARTS ended before the training did" >&2
done
exit 1
