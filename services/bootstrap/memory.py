"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

from services.bootstrap.errors import BootstrapError

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup_root: Path = CGROUP_ROOT,
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """The machine's available memory, bounded by what the cgroups above this process (v2) leave of their limits."""
    lines = meminfo.read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *_cgroup_rooms(cgroup_root, membership)])


def require_memory(parts: dict[str, int], available: int) -> None:
    """Refuse to start what cannot fit, rather than be killed half-way.

    Args:
        parts: bytes by what they are for, for the message.
        available: bytes.

    Raises:
        BootstrapError: naming every part and what is available.
    """
    needed = sum(parts.values())
    if needed > available:
        named = ", ".join(f"{name} {size >> 20}" for name, size in parts.items())
        raise BootstrapError(
            f"not enough memory: {needed >> 20} MiB needed ({named}), {available >> 20} MiB available; "
            "lower bootstrap's kv_tokens, lanes or max_context_tokens, for example with --set bootstrap.kv_tokens=N"
        )


def _cgroup_rooms(root: Path, membership: Path) -> list[int]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    group = root / own
    rooms = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            break
        try:
            limit = (directory / "memory.max").read_text().strip()
            if limit != "max":
                used = int((directory / "memory.current").read_text())
                stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                rooms.append(max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
        except (OSError, ValueError):
            continue
    return rooms
