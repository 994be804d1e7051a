#!/bin/sh
# Starts what SERVICE names, with the arguments of the container.
set -eu

case "${SERVICE:-}" in
nats)
    exec nats-server --config /etc/opengyre/nats.conf "$@"
    ;;
valkey)
    # A cache: bounded memory, nothing on disk. Only the stack's own network reaches it.
    binary=$(python -c 'from opengyre.shared.embedded import valkey_binary; print(valkey_binary())')
    exec "$binary" --bind 0.0.0.0 --port 6379 --protected-mode no --dir /tmp --save "" --appendonly no \
        --maxmemory 512mb --maxmemory-policy allkeys-lru "$@"
    ;;
bootstrap)
    exec python -m opengyre.shared.bus.bootstrap "$@"
    ;;
demo)
    exec gyre demo --attach "$GYRE_GATEWAY_URL" "$@"
    ;;
tools)
    exec gyre "$@"
    ;;
"")
    echo "entrypoint: SERVICE is empty; build the image with --build-arg SERVICE=gateway, for example" >&2
    exit 64
    ;;
esac

# Replicas of a service share its name, so each is reached by its container's.
export GYRE_HTTP__ADVERTISE="${GYRE_HTTP__ADVERTISE:-$(cat /etc/hostname)}"
if [ "$SERVICE" = sandbox ]; then
    if [ -n "${NODE_NAME:-}" ]; then # of a cluster's machine; a name here has no dots
        GYRE_SANDBOX__NODE="$(printf %s "$NODE_NAME" | tr . -)"
        export GYRE_SANDBOX__NODE
    fi
    exec sh /opt/opengyre/deploy/sandbox.sh "$@"
fi
if [ "$SERVICE" = host ] && [ -n "${HOSTS_PER_CELL:-}" ]; then # neighbours are a cell: host-4 and host-5 are cell-2
    number="${GYRE_HOST__HOST##*-}"
    case "$number$HOSTS_PER_CELL" in
    *[!0-9]*)
        echo "entrypoint: with HOSTS_PER_CELL, a number, a host's name must end in its own: host-0; it is $GYRE_HOST__HOST" >&2
        exit 64
        ;;
    esac
    export GYRE_HOST__CELL="cell-$((number / HOSTS_PER_CELL))"
fi
exec python -m "opengyre.$SERVICE" "$@"
