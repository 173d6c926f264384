#!/usr/bin/env bash
# Start a scheduler and the workers of all hosts over SSH, until Ctrl-C.
#
#   ./start.sh [--dry-run] [HOSTS_FILE] [-- OPTION...]
#
# HOSTS_FILE is "hosts" beside this script unless given. Options after -- go to `dask ssh`,
# for instance --ssh-username, --ssh-port, --ssh-private-key or --remote-python: the Python
# on the hosts that has daskinfer, if its path is another one there.
set -euo pipefail

usage() {
    sed -n 's/^# \{0,1\}//; 3,8p' "$0" >&2
    exit 2
}

dry_run=false
hosts_file="$(dirname "$0")/hosts"
while (($#)); do
    case "$1" in
        --dry-run) dry_run=true ;;
        --) shift; break ;;
        -*) usage ;;
        *) hosts_file="$1" ;;
    esac
    shift
done

# dask ssh's own --hostfile knows no comments.
mapfile -t hosts < <(sed 's/#.*//' "$hosts_file" | tr -s '[:space:]' '\n' | sed '/^$/d')
if ((${#hosts[@]} == 0)); then
    echo "$hosts_file names no host" >&2
    exit 2
fi

command=(dask ssh --remote-dask-worker daskinfer.cli.worker "$@" "${hosts[@]}")
if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
else
    exec "${command[@]}"
fi
