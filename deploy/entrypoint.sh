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
    exec sh /opt/opengyre/deploy/sandbox.sh "$@"
fi
exec python -m "opengyre.$SERVICE" "$@"
