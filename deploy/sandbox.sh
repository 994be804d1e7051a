#!/bin/sh
# The sandbox service in a container. Runs as root with SYS_ADMIN, uses that right twice, gives it up (unless images are
# to be mounted: SANDBOX_IMAGES), and then keeps the service going: sandboxes live in this container's process namespace, so a service that crashes must be started
# again in here, where it finds them.
set -eu

# A sandbox gets a /proc of its own, which the kernel grants only where the one outside hides nothing; the engine's has
# masked and read-only parts.
mount -t proc -o nosuid,nodev,noexec proc /proc

# The engine mounts the container's own control group read-only; a sandbox's memory is limited by a group below it.
for point in /sys/fs/cgroup/memory /sys/fs/cgroup/unified /sys/fs/cgroup; do
    if [ -e "$point/cgroup.procs" ]; then
        mount -o remount,bind,rw "$point" ||
            echo "sandbox: $point stays read-only; memory is limited for each process only" >&2
    fi
done

# Where AppArmor keeps user namespaces from those without the right, the service has to keep it; and who mounts roots.
restricted=/proc/sys/kernel/apparmor_restrict_unprivileged_userns
if [ -n "${SANDBOX_IMAGES:-}" ] || { [ -e "$restricted" ] && [ "$(cat "$restricted")" != 0 ]; }; then
    set -- python -m opengyre.sandbox "$@"
else
    set -- setpriv --inh-caps=-sys_admin --bounding-set=-sys_admin python -m opengyre.sandbox "$@"
fi

uptime_s() { cut -d. -f1 /proc/uptime; }

stopping=
child=
trap 'stopping=1; kill -TERM "$child" 2>/dev/null || true' TERM INT
while :; do
    began=$(uptime_s)
    "$@" &
    child=$!
    status=0
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends the first wait early
        status=0
        wait "$child" || status=$?
    done
    if [ -n "$stopping" ]; then
        exit "$status"
    fi
    # One that cannot even start is the engine's to restart, with its growing delays.
    if [ $(($(uptime_s) - began)) -lt 10 ]; then
        exit "$status"
    fi
    echo "sandbox: the service ended with status $status and is started again" >&2
done
