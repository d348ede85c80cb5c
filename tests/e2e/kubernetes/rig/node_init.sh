#!/bin/bash
# The first process of a node, inside its own namespaces: makes the machine look like a node, then
# starts containerd and kubelet and buries orphans. Killing it kills the node.
#
# All that it mounts is in the node's mount namespace and ends with it. It must not write to
# anything of the machine: sysctls of the machine are covered by files, /var/lib, /var/log and /run
# are empty, /etc is a copy that can be written.
#
# From the rig: NODE_NAME NODE_ADDRESS NODE_DIRECTORY (configuration and logs) NODE_HIERARCHIES
# (cgroup mount options) NODE_CONTAINERD (its root) NODE_UNPACKED (images, for all nodes) NODE_LABELS.
set -euo pipefail
cd /

hostname "$NODE_NAME"
mount --make-rprivate /

# The kubelet sets these for the whole machine; here it sets files.
for name in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
    kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    cover="$NODE_DIRECTORY/sysctl-${name//\//-}"
    cat "/proc/sys/$name" >"$cover"
    mount --bind "$cover" "/proc/sys/$name"
done

# A fresh view of the devices of this network namespace and of the cgroups below our own.
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755,size=1m cgroup /sys/fs/cgroup
for options in $NODE_HIERARCHIES; do
    place="/sys/fs/cgroup/${options##*=}"
    mkdir "$place"
    case $options in *=*) options="none,$options" ;; esac
    mount -t cgroup -o "$options" cgroup "$place"
done

mount -t tmpfs -o mode=755,size=256m run /run
mount -t tmpfs -o mode=755,size=4g lib /var/lib
mount -t tmpfs -o mode=755,size=256m log /var/log
mkdir /run/etc-written /run/etc-scratch
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc-written,workdir=/run/etc-scratch etc /etc
mount --make-rshared /

# The rig lays the cable as soon as it knows this process.
while ! [ -e /sys/class/net/eth0 ]; do sleep 0.02; done
ip link set lo up
ip link add cni0 type bridge
ip link set eth0 master cni0 up
ip addr add "$NODE_ADDRESS/16" dev cni0
ip link set cni0 up

# Layers are shared with the other nodes; what containerd writes to is the node's own.
content=io.containerd.content.v1.content
snapshots=io.containerd.snapshotter.v1.overlayfs
mkdir -p "$NODE_CONTAINERD"/{$content,io.containerd.metadata.v1.bolt,$snapshots/snapshots}
for database in io.containerd.metadata.v1.bolt/meta.db $snapshots/metadata.db; do
    cp "$NODE_UNPACKED/$database" "$NODE_CONTAINERD/$database"
done
for shared in "$NODE_UNPACKED"/{$content/blobs,$snapshots/snapshots/*}; do
    place="$NODE_CONTAINERD/${shared#"$NODE_UNPACKED/"}"
    mkdir -p "$place"
    mount --bind "$shared" "$place"
done

containerd --config "$NODE_DIRECTORY/containerd.toml" >"$NODE_DIRECTORY/containerd.log" 2>&1 &
while ! ctr version >/dev/null 2>&1; do
    kill -0 $! || { echo "containerd ended; see containerd.log"; exit 1; }
    sleep 0.05
done

kubelet --config="$NODE_DIRECTORY/kubelet.yaml" --kubeconfig="$NODE_DIRECTORY/kubeconfig" \
    --hostname-override="$NODE_NAME" --node-ip="$NODE_ADDRESS" --node-labels="$NODE_LABELS" \
    >"$NODE_DIRECTORY/kubelet.log" 2>&1 &

sleep infinity &
while true; do wait -n || true; done
