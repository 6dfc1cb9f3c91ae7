#!/usr/bin/env bash
# root.sh LOCK MIRROR DIRECTORY: unpacks the packages of LOCK (lock.sh) as a root file system, inside an image's build.
set -euo pipefail
lock=$1 mirror=$2 root=$3
mkdir -p "$root"/{etc/ssl/certs,tmp,run,models} "$root"/usr/{bin,lib/ssl,sbin}
for each in bin lib sbin; do ln -s "usr/$each" "$root/$each"; done
while read -r path hash; do
  /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User= download-file "$mirror/${path//+/%2b}" /tmp/package.deb "SHA256:$hash" \
    || { echo "$mirror/$path is gone: deploy/images/lock.sh pins what the mirror has now" >&2; exit 1; }
  dpkg-deb --extract /tmp/package.deb "$root"
  rm /tmp/package.deb
done < "$lock"
ln -s python3 "$root/usr/bin/python"
# What maintainer scripts would have made.
find "$root/usr/share/ca-certificates" -name '*.crt' -print0 | sort -z | xargs -0 cat > "$root/etc/ssl/certs/ca-certificates.crt"
ln -sf /etc/ssl/certs/ca-certificates.crt "$root/usr/lib/ssl/cert.pem"
echo 'blink:x:10001:10001::/nonexistent:/usr/sbin/nologin' > "$root/etc/passwd"
echo 'blink:x:10001:' > "$root/etc/group"
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
chmod 1777 "$root/tmp"
rm -rf "$root"/usr/share/{doc,man,lintian,locale,bash-completion,bug} "$root"/usr/share/{info,applications,pixmaps} \
  "$root"/usr/lib/python3*/{lib2to3,idlelib,ensurepip,pydoc_data}
bash bytecode.sh "$root"/usr/lib/python3*
