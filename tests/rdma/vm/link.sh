#!/bin/busybox sh
# The link between the emulated machine's two sides: `link.sh up` or `link.sh down`; run once before by /init to make it.
# Both addresses are local, so the rules that /init made send packets between them over the cable, by these tables.
ip() { /bin/ip "$@"; }  # not busybox's, which its shell would prefer
if [ "$1" = down ]; then
  ip link set host down  # the other end then has no carrier: what it sends is lost
  exit
fi
ip link set dpu up && ip link set host up || exit 1
ip route replace 10.77.0.2 dev dpu src 10.77.0.1 table 101
ip route replace 10.77.0.1 dev host src 10.77.0.2 table 102
ip neighbour replace 10.77.0.2 lladdr "$(cat /sys/class/net/host/address)" dev dpu nud permanent
ip neighbour replace 10.77.0.1 lladdr "$(cat /sys/class/net/dpu/address)" dev host nud permanent
