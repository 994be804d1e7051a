#!/bin/sh
# Makes the passwords of a cluster, beside this file, and keeps those that are there: sh deploy/kubernetes/secrets/make.sh
#   nats.env     each user's password, for the brokers     bus.env, sandbox.env   the address that a service is given
#   cache.env    Valkey's password and address             api.env                the key of the REST API
set -eu
umask 077
cd "$(dirname "$0")"
if [ -e nats.env ]; then
    echo "make.sh: nats.env is there and is kept; remove the *.env files here to make all passwords anew" >&2
    exit 0
fi

# With a letter first: NATS would read a variable of digits as a number.
word() { printf p; od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
address() {
    for n in 0 1 2; do
        printf '%snats://%s:%s@nats-%d.nats.opengyre.svc:%d' "$([ $n = 0 ] || echo ,)" "$1" "$2" "$n" "$3"
    done
}

: >bus.env
: >sandbox.env
for user in bootstrap gateway allocator rollout sandbox trajectory trainer host operator; do
    password=$(word)
    echo "BUS_$(echo $user | tr a-z A-Z)=$password" >>.nats.env
    file=bus.env
    [ $user != sandbox ] || file=sandbox.env
    echo "$user=$(address $user "$password" 4222)" >>$file
done
route=$(word)
echo "BUS_ROUTE=$route" >>.nats.env
echo "BUS_ROUTES=[$(address route "$route" 6222)]" >>.nats.env

cache=$(word)
printf 'password=%s\nurl=redis://:%s@valkey.opengyre.svc:6379\n' "$cache" "$cache" >cache.env
echo "key=$(word)" >api.env
mv .nats.env nats.env # last: where it is, all are
