#!/bin/busybox sh
# /init of the emulated machine: two soft-RoCE devices on the two ends of one cable, then the tests.
/bin/busybox mkdir -p /bb && /bin/busybox --install -s /bb
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/bb HOME=/root
. /exports
ip() { /bin/ip "$@"; }  # not busybox's, which its shell would prefer
finish() { echo "blink: $1"; sync; poweroff -f; }

mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs devtmpfs /dev || finish "no /proc, /sys or /dev"
mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp
for module in /modules/*.ko; do insmod "$module" || finish "can't load $module"; done

# The link: one veth pair in one network namespace, as rdma_rxe 6.1 only sends and receives in the first one. Both
# addresses are local, so the rules make packets between them take the cable, not the loopback device.
ip link set lo up
ip link add dpu mtu 4200 type veth peer name host mtu 4200 || finish "can't make a veth pair"
for side in dpu host; do
  echo 1 >/proc/sys/net/ipv4/conf/$side/accept_local
  echo 0 >/proc/sys/net/ipv4/conf/$side/rp_filter
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip address add 10.77.0.1/24 dev dpu && ip address add 10.77.0.2/24 dev host
# Local addresses come after these rules.
ip rule add pref 10 from 10.77.0.1 to 10.77.0.2 iif lo lookup 101
ip rule add pref 11 from 10.77.0.2 to 10.77.0.1 iif lo lookup 102
ip rule add pref 20 lookup local && ip rule del pref 0
mkdir -p "$BLINK_REPOSITORY" && mount -t 9p -o \
   trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro repository "$BLINK_REPOSITORY" \
  || finish "can't mount the repository"
models=${BLINK_MODEL_FILE%/*}
mkdir -p "$models" && mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro model "$models" \
  || finish "can't mount the model's folder"
sh "$BLINK_REPOSITORY/tests/rdma/vm/link.sh" up || finish "can't bring the link up"
for side in dpu host; do
  rdma link add "rxe_$side" type rxe netdev $side || finish "can't make a soft-RoCE device on $side"
done

export PYTHONPATH="$BLINK_REPOSITORY/tests/rdma/vm/site:$BLINK_REPOSITORY" PYTHONDONTWRITEBYTECODE=1
python3 "$BLINK_REPOSITORY/tests/rdma/vm/guest.py" && finish "done" || finish "the tests' runner failed"
